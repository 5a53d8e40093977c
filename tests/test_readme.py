"""The README's Python runs as it stands, and its set-up and links are there."""

import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedcodist as fc
from fedcodist.config.registry import ENTRIES
from fedcodist.core.inputs import ClientData

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USE, METHOD = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_periodic_codistillation_runs_and_learns(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    final = eval(done.stdout.splitlines()[-1])
    assert all(final[model]["held_out"]["accuracy"][0] > 0.6 for model in ("small", "large"))


def test_the_method_is_fed_prox():
    names = {}
    exec(METHOD, names)
    model = fc.from_flax_linen(nn.Dense(3), jnp.zeros((1, 4)))
    training = fc.LocalTraining(batch_size=2)
    draws = np.random.default_rng(0)
    columns = {"image": draws.normal(size=(5, 4)).astype(np.float32), "label": np.arange(5) % 3}
    start, size = jnp.int32(0), jnp.int32(5)
    data = ClientData(
        jax.tree.map(jnp.asarray, columns), start, size, size, capacity=5, ragged=False
    )
    message = model.init(jax.random.key(0))

    def update(method):
        result = method.client_update(message, None, data, jax.random.key(1), method.hyper)
        return jax.tree.leaves(result.update)

    theirs = fc.fed_prox(model, training, hyper=fc.FedProxHyper(0.05, 1.0, proximal_weight=2.0))
    for ours, expected in zip(
        update(names["fed_prox"](model, training, 2.0)), update(theirs), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)


def test_the_readme_is_one_page_that_names_all_methods():
    assert len(README.splitlines()) <= 150
    for name, entry in ENTRIES.items():
        if name != "centralised":  # beside local_only_steps
            assert f"docs/methods/{name}.md" in README
        assert f"`{entry.kind}.{name}`" in README


def test_links_of_the_documents_lead_to_files():
    for path in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), (path.name, target)


def test_every_name_of_the_package_can_be_imported():
    for name in fc.__all__:
        assert getattr(fc, name).__name__ == name
