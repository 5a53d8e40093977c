"""From the official CIFAR-100 files to a table: prepare, run, record, render."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ("fed_avg,4700", "merged_codistillation,4700,in_domain")
# The command of the README with fewer rounds, clients and steps.
SHORT = (
    "--processes=1",
    "--config.rounds=2",
    "--config.evaluation.every=1",
    "--config.evaluation.checkpoint_every=1",
    "--config.pools.small.cohort_size=2",
    "--config.pools.large.cohort_size=2",
    "--config.algorithm.steps=1",
    "--config.algorithm.batch_size=16",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if "FEDCODIST_DATA" not in os.environ:
        pytest.skip("FEDCODIST_DATA does not name a folder with cifar-100-python")
    folder = tmp_path_factory.mktemp("cifar100")
    source = Path(os.environ["FEDCODIST_DATA"]) / "cifar-100-python"
    run(folder, "datasets/cifar100/prepare.py", f"--source={source}", "--output=data/cifar100")
    return folder


def run(folder, program, *arguments):
    """Runs a program of the checkout in another folder; returns what it printed."""
    program = [str(ROOT / program)] if program.endswith(".py") else ["-m", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS[:1])
def test_real_images_become_a_table(folder, name):
    check_a_run_becomes_a_table(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS[1:])
def test_real_images_become_a_table_by_codistillation(folder, name):
    check_a_run_becomes_a_table(folder, name)


def check_a_run_becomes_a_table(folder, name):
    config = ROOT / "experiments" / "configs" / "cifar100_table1.py"
    common = ("experiments.sweep", f"--config={config}", f"--only={name}", "--workdir=runs", *SHORT)
    run(folder, *common)
    assert f"{name}: finished already" in run(folder, *common)

    run_folder = f"runs/{name.replace(',', '-')}"
    run(folder, "experiments.record", run_folder)
    (path,) = (folder / "results" / "cifar100_table1").glob(f"{name.replace(',', '-')}.json")
    record = json.loads(path.read_text())
    curve = record["curve"]["small"]
    assert curve["held_out"]["round"] == [0, 1, 2]
    assert curve["test"]["round"] == [2]  # looked at once
    for model in ("small", "large"):
        assert 0 <= record["final"][model]["test"]["accuracy"][0] < 0.2

    run(folder, "experiments.results")
    text = (folder / "RESULTS.md").read_text()
    small = 100 * record["final"]["small"]["test"]["accuracy"][0]
    assert f"{small:.2f}" in text and "†" in text and "31.84" in text
