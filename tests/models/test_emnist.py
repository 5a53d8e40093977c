"""The EMNIST network: its size, plain layers, its dropout, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.models import emnist

EXAMPLE = jnp.zeros((1, 28, 28, 1))


def images(seed, count, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).uniform(size=(count, 28, 28, 1)), dtype)


def model(**attributes):
    return from_flax_linen(emnist.emnist_cnn(**attributes), EXAMPLE)


def plain_network(params, x):
    """Without dropout."""
    for layer in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x,
            params[layer]["kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jnp.maximum(x + params[layer]["bias"], 0)
    window = (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, window, "VALID")
    x = x.reshape(len(x), 12 * 12 * 64)
    x = jnp.maximum(x @ params["dense1"]["kernel"] + params["dense1"]["bias"], 0)
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def test_parameter_total():
    totals = {
        classes: parameter_count(jax.eval_shape(model(classes=classes).init, jax.random.key(0)))
        for classes in (62, 10)
    }
    assert totals == {62: 1_206_590, 10: 1_206_590 - 129 * 52}
    assert model().num_classes == 62


def test_equals_plain_layers_with_gradients():
    with jax.enable_x64(True):
        network, x = model(dropout=(0.0, 0.0)), images(0, 2, "float64")
        variables = jax.tree.map(
            lambda leaf: leaf.astype("float64") + 0.01,
            jax.jit(network.init)(jax.random.key(0)),
        )

        def gradients(apply):
            return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(apply(p)))))(
                variables.params
            )

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10 * np.linalg.norm(b)),
            gradients(lambda p: network.apply(Variables(p, {}), {"image": x}, train=True)[0]),
            gradients(lambda p: plain_network(p, x)),
        )
        # In evaluation, whatever the rates.
        np.testing.assert_allclose(
            jax.jit(model().apply)(variables, {"image": x})[0],
            jax.jit(plain_network)(variables.params, x),
            rtol=1e-9,
        )


def test_dropout_follows_the_key_and_only_in_training():
    network, batch = model(), {"image": images(0, 2)}
    variables = jax.jit(network.init)(jax.random.key(0))
    train = jax.jit(lambda key: network.apply(variables, batch, train=True, key=key)[0])
    outputs = train(jax.random.key(1))
    np.testing.assert_array_equal(outputs, train(jax.random.key(1)))
    assert np.abs(outputs - train(jax.random.key(2))).max() > 1e-3
    evaluate = jax.jit(lambda key: network.apply(variables, batch, key=key))
    evaluated, mutable = evaluate(jax.random.key(1))
    np.testing.assert_array_equal(evaluated, evaluate(jax.random.key(2))[0])
    assert mutable == {}


@pytest.mark.parametrize(("dropout", "layer"), [((0.25, 0.0), "dense1"), ((0.0, 0.5), "output")])
def test_each_rate_is_that_of_its_place(dropout, layer):
    """The gradient of a dense kernel is zero for the inputs that were dropped."""
    network, batch = model(dropout=dropout), {"image": images(0, 1)}
    # Positive weights keep every unit active.
    variables = jax.tree.map(jnp.abs, jax.jit(network.init)(jax.random.key(0)))

    def loss(params):
        outputs, _ = network.apply(Variables(params, {}), batch, train=True, key=jax.random.key(5))
        return jnp.sum(jnp.arange(62) * outputs)

    gradient = jax.jit(jax.grad(loss))(variables.params)
    dropped = {
        name: np.mean(np.all(np.asarray(gradient[name]["kernel"]) == 0, axis=1))
        for name in ("dense1", "output")
    }
    rate = max(dropout)
    assert abs(dropped.pop(layer) - rate) < 3 * np.sqrt(
        rate * (1 - rate) / len(gradient[layer]["kernel"])
    )
    assert list(dropped.values()) == [0]


def test_loss_falls():
    network = model()
    batch = {"image": images(0, 8), "label": jnp.arange(8)}

    def step(params, key):
        def loss(params):
            outputs, _ = network.apply(Variables(params, {}), batch, train=True, key=key)
            return jnp.mean(network.loss(outputs, batch))

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    start = jax.jit(network.init)(jax.random.key(0)).params
    keys = jax.random.split(jax.random.key(1), 20)
    _, losses = jax.jit(lambda params: jax.lax.scan(step, params, keys))(start)
    assert np.isfinite(losses).all() and losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: emnist.emnist_cnn(classes=1), "classes must be at least 2, got 1"),
        (lambda: emnist.emnist_cnn(dropout=(0.25, 1.0)), r"dropout must be two rates in \[0, 1\)"),
        (lambda: emnist.emnist_cnn(dropout=(0.25,)), r"dropout must be two rates in \[0, 1\)"),
        (
            lambda: emnist.emnist_cnn().init(jax.random.key(0), jnp.zeros((1, 28, 28))),
            r"x must be \[B, 28, 28, 1\], got \(1, 28, 28\)",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
