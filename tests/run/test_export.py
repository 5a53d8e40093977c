"""Exported models: the same arrays back, and the same predictions outside the library's loop."""

import json
import os
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.core.model import Variables
from fedcodist.models.digits import BatchNormMLP
from fedcodist.run.export import load_model, save_model

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8, 8, 1)), jnp.float32)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        theirs = np.asarray(theirs)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


def test_a_round_trip_gives_the_same_bits(tmp_path):
    variables = Variables(
        {
            "layer": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T, "n": np.int32(3)},
            "half": {"w": np.array([1.5, np.nan], ml_dtypes.bfloat16)},
        },
        {"batch_stats": {"mean": np.zeros((0, 2)), "mask": np.array([True, False])}},
    )
    save_model(tmp_path / "model.safetensors", variables, {"round": "5"})
    assert_same(load_model(tmp_path / "model.safetensors"), variables)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"round": "5"}
        assert "params/layer/kernel" in file.keys()  # noqa: SIM118
        assert "mutable/batch_stats/mean" in file.keys()  # noqa: SIM118


def test_keys_that_names_of_tensors_cannot_hold_as_they_are(tmp_path):
    params = {
        "mlp/~/linear_0": {"w": np.ones(1)},
        "mlp": {"~": {"linear_0": {"w": np.ones(2)}}},
        "100%": {"%2F": np.ones(3), "%252F": np.ones(4)},
        "layers": {0: {"w": np.ones(5)}, 10: {"w": np.ones(6)}},
        "names": {"0": np.ones(7), "[0]": np.ones(8)},
    }
    save_model(tmp_path / "model", Variables(params, {}))
    assert_same(load_model(tmp_path / "model"), Variables(params, {}))


class Layer(NamedTuple):
    kernel: np.ndarray
    bias: np.ndarray


def test_trees_that_are_no_dictionaries_are_written_too(tmp_path):
    path = tmp_path / "model"
    save_model(path, Variables([(np.ones(1), np.ones(2)), Layer(np.ones(3), np.ones(4))], {}))
    layers = {0: {0: np.ones(1), 1: np.ones(2)}, 1: {"kernel": np.ones(3), "bias": np.ones(4)}}
    assert_same(load_model(path), Variables(layers, {}))
    save_model(path, Variables(np.ones(5), {}))
    assert_same(load_model(path), Variables(np.ones(5), {}))


def linen_model():
    return from_flax_linen(BatchNormMLP(hidden=(4,)), IMAGES)


def nnx_model():
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(64, 4, rngs=rngs), nnx.Linear(4, 10, rngs=rngs)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            x = self.norm(self.layers[0](x.reshape(len(x), -1)))
            return self.layers[1](nnx.relu(x))

    return from_flax_nnx(lambda rngs: Network(rngs), IMAGES)


def haiku_model():
    hk = pytest.importorskip("haiku")
    return from_haiku(lambda x: hk.nets.MLP([4, 10])(x.reshape(len(x), -1)), IMAGES)


@pytest.mark.parametrize("make", [linen_model, nnx_model, haiku_model])
def test_every_library_predicts_the_same_after_loading(make, tmp_path):
    model = make()
    variables = model.init(jax.random.key(1))
    batch = {"image": IMAGES}
    expected, _ = model.apply(variables, batch)
    save_model(tmp_path / "model", jax.tree.map(np.asarray, variables))
    loaded = load_model(tmp_path / "model")
    assert_same(loaded, Variables(dict(variables.params), dict(variables.mutable)))
    found, _ = model.apply(loaded, batch)
    np.testing.assert_array_equal(found, expected)


def test_a_linen_model_is_used_without_the_library(tmp_path):
    """Inference in three lines of Flax."""
    network = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(3)])
    model = from_flax_linen(network, jnp.zeros((1, 6)))
    variables = model.init(jax.random.key(0))
    save_model(tmp_path / "model", variables)
    x = jnp.ones((2, 6))
    params = load_model(tmp_path / "model").params
    np.testing.assert_array_equal(
        network.apply({"params": params}, x), model.apply(variables, {"image": x})[0]
    )


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "missing", "a folder"])
def test_a_file_that_is_no_model_is_one_line(damage, tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, Variables({"w": np.zeros(100)}, {}))
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text(json.dumps({"w": [1, 2, 3]}))
    else:
        os.unlink(path)
        if damage == "a folder":
            path.mkdir()
    with pytest.raises(
        ValueError, match=r"cannot read a model from .*model\.safetensors"
    ) as raised:
        load_model(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["weight", "encoder/weight", "params"])
def test_another_programs_file_is_one_line(name, tmp_path):
    safetensors.numpy.save_file({name: np.zeros(3)}, tmp_path / "model")
    with pytest.raises(ValueError, match=f"holds '{name}', which is no model of fedcodist"):
        load_model(tmp_path / "model")


def test_bad_input_is_one_line(tmp_path):
    variables = Variables({"w": np.zeros(2)}, {})
    for wrong in ({"w": np.zeros(2)}, {"small": variables}):
        with pytest.raises(TypeError, match=r"^variables must be Variables, of params and mutable"):
            save_model(tmp_path / "model", wrong)
    with pytest.raises(
        FileNotFoundError, match=r"^there is no folder .*none to write a\.safetensors"
    ):
        save_model(tmp_path / "none" / "a.safetensors", variables)
