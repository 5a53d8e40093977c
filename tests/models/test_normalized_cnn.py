"""The normalised CNN: equality with plain flax.linen layers, and the source of its statistics."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.models.normalized_cnn import NormalizedCNN


class Plain(nn.Module):
    """The same network from flax.linen's own layers."""

    width: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.avg_pool(x, (2, 2), (2, 2))
        for layer in range(3):
            features = self.width * 2**layer
            x = nn.Conv(features, (3, 3), use_bias=False, name=f"conv{layer + 1}")(x)
            if layer < 2:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.BatchNorm(not train, momentum=0.9, name=f"norm{layer + 1}")(x)
            x = nn.relu(x)
        return nn.Dense(7, name="output")(x.mean((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_equals_plain_layers(train):
    with jax.enable_x64(True):
        images = np.random.default_rng(0).normal(size=(6, 16, 16, 3))
        network, plain = NormalizedCNN(4, classes=7), Plain(4)
        variables = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, float), network.init(jax.random.key(0), images)
        )
        ours = network.apply(variables, images, train=train, mutable=["batch_stats"])
        theirs = plain.apply(variables, images, train, mutable=["batch_stats"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)


@pytest.mark.slow
def test_padded_examples_change_nothing():
    images = np.random.default_rng(1).normal(size=(6, 16, 16, 3)).astype(np.float32)
    mask = np.arange(6) < 4
    network = NormalizedCNN(4, classes=None)
    variables = network.init(jax.random.key(0), images)
    apply = lambda x, **settings: network.apply(
        variables, x, train=True, mutable=["batch_stats"], **settings
    )
    masked, masked_statistics = apply(images, mask=mask)
    whole, statistics = apply(images[:4])
    assert masked.shape == (6, 16)
    np.testing.assert_allclose(masked[:4], whole, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), masked_statistics, statistics
    )


def test_bright_pixels_of_8_bits_do_not_wrap():
    images = np.full((1, 8, 8, 3), 200, np.uint8)
    network = NormalizedCNN(2, classes=3)
    variables = network.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    found, expected = (network.apply(variables, x) for x in (images, images.astype(np.float32)))
    np.testing.assert_array_equal(found, expected)
    halves = network.apply(variables, images.astype(jnp.bfloat16))
    np.testing.assert_allclose(halves, expected, rtol=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormalizedCNN(0), "width must be at least 1, got 0"),
        (lambda: NormalizedCNN(classes=1), "classes must be at least 2, got 1"),
        *(
            (
                lambda shape=shape: NormalizedCNN().init(jax.random.key(0), jnp.zeros(shape)),
                rf"x must be \[B, H, W, C\] with H, W even and >= 8, got {re.escape(str(shape))}",
            )
            for shape in ((1, 9, 8, 3), (1, 8, 9, 3), (1, 6, 8, 3), (8, 8, 3))
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()
