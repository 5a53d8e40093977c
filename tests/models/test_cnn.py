"""The paper's networks: parameter totals, and equality with plain flax.linen layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.models import cnn, digits, emnist


class PlainCNN(nn.Module):
    """The same network from flax.linen's own layers."""

    filters: tuple[int, ...]
    hidden: tuple[int, ...]
    padding: str
    pooled: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for i, features in enumerate(self.filters):
            x = nn.Conv(features, (3, 3), padding=self.padding, name=f"conv{i + 1}")(x)
            x = nn.relu(x)
            if i in self.pooled:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        for i, features in enumerate(self.hidden):
            x = nn.relu(nn.Dense(features, name=f"dense{i + 1}")(x))
        return nn.Dense(100, name="output")(x)


def count(variables):
    return sum(leaf.size for leaf in jax.tree.leaves(variables))


@pytest.mark.parametrize("input_size", [24, 32])
@pytest.mark.parametrize(("make", "total"), [(cnn.small_cnn, 109_348), (cnn.large_cnn, 410_084)])
def test_parameter_totals(make, total, input_size):
    images = jnp.zeros((1, input_size, input_size, 3))
    shapes = jax.eval_shape(make(input_size=input_size).init, jax.random.key(0), images)
    assert count(shapes) == total


@pytest.mark.parametrize(
    ("make", "input_size"),
    [
        (cnn.small_cnn, 24),
        pytest.param(cnn.large_cnn, 32, marks=pytest.mark.slow),
        pytest.param(cnn.small_cnn, 32, marks=pytest.mark.slow),
        pytest.param(cnn.large_cnn, 24, marks=pytest.mark.slow),
    ],
)
def test_equals_the_network_of_plain_layers(make, input_size):
    with jax.enable_x64(True):
        ours = make(input_size=input_size)
        plain = PlainCNN(
            ours.filters,
            ours.hidden,
            *(("SAME", (0, 1)) if input_size == 24 else ("VALID", (1, 2))),
        )
        images = jax.random.normal(jax.random.key(1), (2, input_size, input_size, 3), "float64")
        variables = plain.init(jax.random.key(0), images)
        same_start = ours.init(jax.random.key(0), images)
        jax.tree.map(np.testing.assert_array_equal, same_start, variables)
        # Non-zero biases, so that a bias added at the wrong place shows.
        variables = jax.tree.map(lambda leaf: leaf.astype("float64") + 0.01, variables)

        def gradient(module):
            return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(module.apply(v, images)))))(variables)

        np.testing.assert_allclose(
            ours.apply(variables, images), plain.apply(variables, images), rtol=1e-9, atol=1e-12
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10 * np.linalg.norm(b)),
            gradient(ours),
            gradient(plain),
        )


@pytest.mark.slow
def test_float32_gradient_is_close_to_the_plain_one():
    ours, images = cnn.large_cnn(), jax.random.normal(jax.random.key(1), (6, 24, 24, 3))
    plain = PlainCNN(ours.filters, ours.hidden, "SAME", (0, 1))
    variables = plain.init(jax.random.key(0), images)

    def gradient(module):
        return jax.grad(lambda v: jnp.mean(jnp.square(module.apply(v, images))))(variables)

    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(
            np.linalg.norm(a - b), 1e-4 * np.linalg.norm(b) + 1e-12
        ),
        jax.jit(gradient, static_argnums=0)(ours),
        jax.jit(gradient, static_argnums=0)(plain),
    )


def test_dropout_is_off_in_evaluation_and_drops_its_share_in_training():
    module = cnn.CNN((2, 2, 32), (64, 8), dropout=(0.25, 0.5))

    @jax.jit
    def outputs():
        images = jax.random.normal(jax.random.key(1), (8, 24, 24, 3))
        variables = module.init(jax.random.key(0), images)
        is_shown = lambda layer, _: isinstance(layer, nn.Dropout | cnn.ConvolutionAndRelu)
        _, trained = module.apply(
            variables,
            images,
            train=True,
            rngs={"dropout": jax.random.key(2)},
            capture_intermediates=is_shown,
            mutable=["intermediates"],
        )
        plain = module.clone(dropout=(0.0, 0.0)).apply(variables, images)
        return trained["intermediates"], module.apply(variables, images), plain

    layers, evaluated, plain = outputs()
    np.testing.assert_array_equal(evaluated, plain)
    kept = np.asarray(layers["conv3"]["__call__"][0]).reshape(8, -1)
    after = np.asarray(layers["Dropout_0"]["__call__"][0])
    # What is not dropped is scaled, so that the mean stays.
    is_dropped = (after == 0) & (kept > 0)
    np.testing.assert_allclose(after[~is_dropped], kept[~is_dropped] / 0.75, rtol=1e-6)
    assert abs(is_dropped.sum() / (kept > 0).sum() - 0.25) < 0.02
    dense = np.asarray(layers["Dropout_1"]["__call__"][0])
    assert dense.shape == (8, 64) and (dense == 0).mean() > 0.4


def test_haikus_kernels_are_cut_off_at_two_deviations_of_the_plain_one():
    kernel = np.asarray(cnn.HAIKU_KERNELS(jax.random.key(0), (400, 300)))
    deviation = 1 / np.sqrt(400)
    assert np.abs(kernel).max() <= 2 * deviation
    # The deviation of a standard normal variable between -2 and 2.
    assert kernel.std() == pytest.approx(0.8796 * deviation, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cnn.small_cnn(dropout=(0.25, 1.0)), r"dropout must be two rates in \[0, 1\)"),
        (lambda: cnn.small_cnn(dropout=(0.25,)), r"dropout must be two rates in \[0, 1\)"),
        (lambda: cnn.small_cnn(input_size=28), "input_size must be 24 or 32, got 28"),
        (lambda: cnn.small_cnn(classes=1), "classes must be at least 2, got 1"),
        (
            lambda: cnn.small_cnn().init(jax.random.key(0), jnp.zeros((1, 32, 32, 3))),
            r"x must be \[B, 24, 24, channels\]",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("classes", ["10", 10.5, 10.0, True])
def test_classes_are_an_integer(classes):
    with pytest.raises(
        TypeError, match=f"^classes must be an integer of at least 2, got {classes!r}"
    ):
        cnn.small_cnn(classes=classes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cnn.CNN((8, 8, 8.5), (4,)),
            r"filters\[2\] must be an integer of at least 1, got 8.5",
        ),
        (lambda: cnn.CNN((8, 8, 8), 4), "hidden must be a list, got 4"),
        (lambda: cnn.small_cnn(dropout=0.5), "dropout must be a list, got 0.5"),
        (lambda: emnist.emnist_cnn(dropout=0.5), "dropout must be a list, got 0.5"),
        (lambda: digits.MLP(hidden=16), "hidden must be a list, got 16"),
        (lambda: digits.MLP(hidden=(16, 0)), r"hidden\[1\] must be at least 1, got 0"),
        (lambda: digits.BatchNormMLP(classes="10"), "classes must be an integer of at least 1"),
    ],
)
def test_sizes_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()


def test_digits_networks():
    images = jnp.ones((2, 8, 8, 1))
    sizes = []
    for module in (digits.small_digits(), digits.large_digits()):
        variables = module.init(jax.random.key(0), images)
        assert module.apply(variables, images).shape == (2, 10)
        sizes.append(count(variables))
    assert sizes == [2_410, 17_226]
