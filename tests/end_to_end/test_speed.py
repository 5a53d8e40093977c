"""The paper's CNNs reach the share of the machine's GEMM peak that the project promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import clean_environment

ROOT = Path(__file__).parents[2]
SHARE_OF_PEAK = {"FedAvg small": 45.0, "FedAvg large": 58.0}


@pytest.mark.slow
def test_rounds_reach_their_share_of_the_gemm_peak():
    command = [sys.executable, "benchmarks/fedavg_cnn.py", "--workloads", "small", "large"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(None), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    for name, least in SHARE_OF_PEAK.items():
        line = next(line for line in done.stdout.splitlines() if line.startswith(name))
        share = float(re.search(r"([\d.]+)%", line).group(1))
        assert share >= least, f"{line} (on an otherwise idle machine)"
