"""Networks that output hidden states compute the same as without."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs, as_layers, logits_of, with_layers
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.models.cnn import CNN
from fedcodist.models.digits import MLP, BatchNormMLP

pytestmark = pytest.mark.usefixtures("compile_quickly")

IMAGES = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
BATCH = {"image": jnp.asarray(IMAGES), "label": jnp.array([1, 0, 2])}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_losses_of_logits_of_16_bits_are_computed_in_float32(dtype):
    """In bfloat16 a log-probability is known to 1 %, and small differences of models vanish."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), dtype)
    model = from_flax_linen(nn.Dense(5, dtype=dtype), jnp.zeros((1, 4)))
    found, expected = (model.loss(each, BATCH) for each in (logits, logits.astype(jnp.float32)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)
    for outputs in (logits, LayerOutputs(logits)):
        assert logits_of(outputs).dtype == jnp.float32
        np.testing.assert_array_equal(logits_of(outputs), logits)
    counts = jnp.arange(3)
    assert logits_of(counts) is counts


def test_hidden_states_are_those_of_the_layers_in_the_given_order():
    model = with_layers(MLP((7, 5)), IMAGES[:1], ["Dense_0", "Dense_1"])
    plain = from_flax_linen(MLP((7, 5)), IMAGES[:1])
    variables = model.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, variables, plain.init(jax.random.key(0)))
    outputs, _ = jax.jit(model.apply)(variables, BATCH)
    params = jax.tree.map(np.asarray, variables.params)
    dense = lambda x, name: x @ params[name]["kernel"] + params[name]["bias"]
    first = dense(IMAGES.reshape(3, -1), "Dense_0")
    second = dense(np.maximum(first, 0), "Dense_1")
    for found, expected in zip(outputs.hidden, (first, second), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs.logits, plain.apply(variables, BATCH)[0], rtol=1e-6)
    np.testing.assert_allclose(
        model.loss(outputs, BATCH), plain.loss(outputs.logits, BATCH), rtol=1e-6
    )
    right, total = model.metrics["accuracy"](outputs, BATCH)
    expected = plain.metrics["accuracy"](outputs.logits, BATCH)
    np.testing.assert_array_equal((right, total), expected)
    assert model.num_classes == 10
    reverse = with_layers(MLP((7, 5)), IMAGES[:1], ["Dense_1", "Dense_0"])
    assert [h.shape for h in reverse.apply(variables, BATCH)[0].hidden] == [(3, 5), (3, 7)]


def test_images_between_layers_are_pooled():
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 24, 3)), jnp.float32)
    network = CNN((4, 6, 5), (7,), classes=3)
    model = with_layers(network, images[:1], ["conv1", "conv3", "dense1"])
    variables = jax.jit(model.init)(jax.random.key(0))
    hidden = jax.jit(model.apply)(variables, {"image": images})[0].hidden
    assert [state.shape for state in hidden] == [(2, 4), (2, 5), (2, 7)]
    show = functools.partial(network.apply, capture_intermediates=True, mutable="intermediates")
    _, captured = jax.jit(show)({"params": variables.params}, images)
    stage = captured["intermediates"]["conv3"]["__call__"][0]
    np.testing.assert_allclose(hidden[1], np.mean(stage, axis=(1, 2)), rtol=1e-5)


def test_mutable_state_is_kept():
    model = with_layers(BatchNormMLP((4,)), IMAGES[:1], ["BatchNorm_0"])
    variables = model.init(jax.random.key(0))
    outputs, mutable = model.apply(variables, BATCH, train=True, mask=jnp.ones(3))
    np.testing.assert_allclose(np.mean(outputs.hidden[0], axis=0), 0, atol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), mutable, variables.mutable)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_a_loss_and_metrics_of_ones_own_get_the_logits():
    certain = lambda outputs, batch: (outputs.max(-1), jnp.ones(len(outputs)))
    total = SummedMetric(lambda outputs, batch: outputs[:, 0], lambda sums: sums)
    model = with_layers(
        MLP((7,)),
        IMAGES[:1],
        ["Dense_0"],
        loss=lambda outputs, batch: outputs[:, 0] ** 2,
        metrics={"certain": certain, "total": total},
    )
    outputs, _ = model.apply(model.init(jax.random.key(0)), BATCH)
    np.testing.assert_array_equal(model.loss(outputs, BATCH), outputs.logits[:, 0] ** 2)
    np.testing.assert_array_equal(
        model.metrics["certain"](outputs, BATCH)[0], outputs.logits.max(-1)
    )
    np.testing.assert_array_equal(model.metrics["total"].sums(outputs, BATCH), outputs.logits[:, 0])


def test_a_network_may_read_several_columns():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.Dense(4)(x["a"]) + nn.Dense(4)(x["b"]))

    columns = {"a": jnp.ones((2, 5)), "b": jnp.ones((2, 6))}
    model = with_layers(Two(), columns, ["Dense_1"], inputs=("a", "b"))
    outputs, _ = model.apply(model.init(jax.random.key(0)), columns)
    assert outputs.logits.shape == (2, 3) and outputs.hidden[0].shape == (2, 4)


def test_an_unknown_layer_is_one_line():
    message = r"^layers must be of \['Dense_0', 'Dense_1'\], got 'dense'\.$"
    with pytest.raises(ValueError, match=message):
        with_layers(MLP((7,)), IMAGES[:1], ["dense"])


def test_a_layer_that_returns_no_array_is_one_line():
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x), x

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Pair(name="pair")(x)[0]

    with pytest.raises(ValueError, match=r"^layers must .*, 'pair' returns a tuple of 2\.$"):
        with_layers(Network(), jnp.zeros((1, 4)), ["pair"])


@pytest.mark.parametrize("layer", ["block", "block/Dense_0"])
def test_a_layer_whose_output_stays_inside_a_transformation_is_one_line(layer):
    """It was accepted, and training ended in JAX's error of a leaked tracer."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(6)(x))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.remat(Block)(name="block")(x))

    message = rf"^layers must not be under nn\.remat, .* where '{layer}' is: "
    with pytest.raises(ValueError, match=message):
        with_layers(Network(), jnp.zeros((1, 4)), ["Dense_0", layer])
    assert with_layers(Network(), jnp.zeros((1, 4)), ["Dense_0"]).num_classes == 3


def test_plain_logits_show_nothing():
    assert as_layers(jnp.zeros((2, 3)))[1:] == ((), (), None)
