"""Networks with exits: their parameters, outputs and what they refuse."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from never_in_training import REFUSAL, NeverInTraining

from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.exits import Exits, digits_exits, with_exits


def blocks():
    return [nn.Conv(2, (3, 3)), nn.Conv(3, (3, 3)), BatchNormMLP((5,), classes=None)]


def model(depth=None):
    return with_exits(Exits(blocks(), classes=4, depth=depth), jnp.zeros((1, 6, 6, 1)))


def test_exits_read_what_blocks_return():
    variables = model().init(jax.random.key(0))
    images = {"image": jax.random.normal(jax.random.key(1), (3, 6, 6, 1))}
    outputs, _ = model().apply(variables, images)
    assert [each.shape for each in outputs.hidden] == [(3, 4)] * 3
    np.testing.assert_allclose(outputs.logits, np.mean(outputs.hidden, axis=0), rtol=1e-5)
    first = nn.Conv(2, (3, 3)).apply({"params": variables.params["blocks_0"]}, images["image"])
    exit_ = variables.params["exit_0"]
    expected = first.mean(axis=(1, 2)) @ exit_["kernel"] + exit_["bias"]
    np.testing.assert_allclose(outputs.hidden[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallower_network_is_the_first_blocks_of_a_deeper_one(depth):
    variables = model().init(jax.random.key(0))
    images = {"image": jax.random.normal(jax.random.key(1), (3, 6, 6, 1))}
    shallow = jax.eval_shape(model(depth).init, jax.random.key(0))
    part = {name: variables.params[name] for name in shallow.params}
    assert jax.tree.map(jnp.shape, part) == jax.tree.map(jnp.shape, dict(shallow.params))
    assert len(part) == 2 * depth
    exits = model(depth).apply(variables._replace(params=part, mutable={}), images)[0].hidden
    whole = model().apply(variables, images)[0].hidden
    for ours, theirs in zip(exits, whole[:depth], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_blocks_are_told_of_training():
    variables = model().init(jax.random.key(0))
    images = {"image": jax.random.normal(jax.random.key(1), (3, 6, 6, 1))}
    _, mutable = model().apply(variables, images, train=True, mask=jnp.ones(3))
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), mutable, variables.mutable)
    assert all(jax.tree.leaves(changed)) and jax.tree.leaves(changed)


def test_the_digits_network_has_so_many_parameters():
    network = with_exits(digits_exits(), jnp.zeros((1, 8, 8, 1)))
    params = jax.eval_shape(network.init, jax.random.key(0)).params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 10_318


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(depth=0), "depth must be at least 1, got 0"),
        (dict(depth=4), "depth must be at most the network's 3 blocks, got 4"),
        (dict(depth=1.5), "depth must be an integer of at least 1, got 1.5"),
        (dict(blocks=[]), "blocks must not be empty"),
        (dict(classes=1), "classes must be at least 2, got 1"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        Exits(**{"blocks": blocks(), "classes": 4, **options})
    assert "\n" not in str(error.value)


def test_a_network_without_exits_is_named():
    with pytest.raises(
        TypeError, match=r"^module must be Exits of blocks, .*, got Dense\("
    ) as error:
        with_exits(nn.Dense(5), jnp.zeros((1, 4)))
    assert "\n" not in str(error.value)


def test_a_part_whose_dropout_would_never_be_on_is_refused():
    with pytest.raises(ValueError, match=rf"^module\.blocks\[0\] {REFUSAL}"):
        with_exits(Exits([NeverInTraining()], 3), jnp.zeros((1, 4)))
