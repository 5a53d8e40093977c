"""The README's Python runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fedcodist as fc
from fedcodist.models.digits import large_digits

ROOT = Path(__file__).parents[1]
ALGORITHM, OWN_DATA, PARTIES, INFERENCE = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


def run(code, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_new_algorithm_runs_and_learns(tmp_path):
    final = eval(run(ALGORITHM, tmp_path).splitlines()[-1])
    assert final["large"]["test"]["accuracy"][0] > 0.7


def test_data_of_your_own(tmp_path):
    clients, smallest, largest = map(int, run(OWN_DATA, tmp_path).split())
    assert clients == 100
    assert 1 <= smallest < 50 < largest


@pytest.mark.slow
def test_parties_with_networks_of_their_own_agree(tmp_path):
    for line in run(PARTIES, tmp_path).splitlines():
        found = eval(line.split(" ", 1)[1].replace("} {", "}, {"))
        alone, together = (each["accuracy"][0] for each in found)
        assert together > alone > 1 / 4


def test_a_saved_model_predicts(tmp_path):
    model = fc.from_flax_linen(large_digits(), jnp.zeros((1, 8, 8, 1)))
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    path = tmp_path / "runs" / "digits" / "large_seed0.safetensors"
    fc.save_model(path, model.init(jax.random.key(0)))
    assert 0 <= float(run(INFERENCE, tmp_path)) <= 1


def test_every_name_of_the_package_can_be_imported():
    for name in fc.__all__:
        assert getattr(fc, name).__name__ == name
