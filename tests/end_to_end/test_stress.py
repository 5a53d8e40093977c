"""Thousands of Merged rounds over several devices end: collectives must not deadlock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import clean_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_five_thousand_merged_rounds_end(tmp_path, devices):
    command = [sys.executable, "-m", "experiments.main", f"--workdir={tmp_path / 'run'}"]
    command += ["--config=fedcodist/configs/digits_codist.py:merged_codistillation"]
    command += [f"--processes={devices}", "--config.rounds=5000", "--config.algorithm.steps=8"]
    command += ["--config.evaluation.every=500", "--config.evaluation.checkpoint_every=500"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(None), capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    # If a process had aborted, the launcher would have restarted it and printed that.
    assert "starting again" not in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 5000 and summary["finished"]
