"""A first convolution and its batch normalisation as one product, which equals the two layers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcodist.models.convolution import conv3x3
from fedcodist.models.normalization import BatchNorm, BatchNormOfMoments
from fedcodist.models.normalized_product import (
    moments_of_products,
    normalized_convolution,
    patches_and_one,
    scaled_product,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")


class Layers(nn.Module):
    """Convolution, then normalisation, as two layers or as one product."""

    features: int
    is_product: bool

    @nn.compact
    def __call__(self, x, train=True, mask=None):
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(1.0), shape)
        bias = self.param("bias", nn.initializers.normal(1.0), shape[-1:])
        if not self.is_product:
            norm = BatchNorm(momentum=0.99, epsilon=1e-3, name="norm")
            return norm(conv3x3(x, kernel) + bias, train=train, mask=mask)
        norm = BatchNormOfMoments(momentum=0.99, epsilon=1e-3, name="norm")
        return normalized_convolution(x, kernel, bias, norm, train, mask)


# Few, since each is compiled.
SHAPES = st.sampled_from([(3, 4, 5, 2), (1, 1, 1, 1)])


FEATURES = 4


@functools.partial(jax.jit, static_argnames=("is_product", "train"))
def both_derivatives(variables, x, real, cotangent, is_product, train):
    """Outputs and running averages, and gradients of parameters and images."""

    def loss(params, x):
        outputs, state = Layers(FEATURES, is_product).apply(
            {**variables, "params": params}, x, train, real, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(outputs) * cotangent), (outputs, state)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], x)


@settings(max_examples=12)
@given(shape=SHAPES, seed=st.integers(0, 2**16), data=st.data())
def test_outputs_gradients_and_averages_are_those_of_the_two_layers(shape, seed, data):
    real = data.draw(hnp.arrays(bool, shape[0]))
    with jax.enable_x64(True):
        draws = np.random.default_rng(seed)
        x, cotangent = draws.normal(2, 3, shape), draws.normal(size=(*shape[:3], FEATURES))
        shapes = jax.eval_shape(Layers(FEATURES, False).init, jax.random.key(0), x)
        variables = jax.tree.map(lambda leaf: draws.uniform(0.25, 1.25, leaf.shape), shapes)
        for train in (True, False):
            ours, theirs = (
                both_derivatives(variables, x, real, cotangent, is_product, train)
                for is_product in (True, False)
            )
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), ours, theirs
            )


def test_both_start_alike():
    """An initialisation in training mode records nothing."""
    start = (jax.random.key(0), jnp.ones((2, 3, 3, 1)))
    starts = [Layers(FEATURES, is_product).init(*start) for is_product in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *starts)


def test_padded_examples_are_never_read():
    draws = np.random.default_rng(0)
    patches, weights = draws.normal(size=(3, 4, 4, 5)), draws.normal(size=(5, 6))
    patches[1] = np.nan
    found = moments_of_products(jnp.asarray(patches), jnp.asarray(weights), jnp.array([1, 0, 1]))
    expected = patches[[0, 2]].reshape(-1, 5) @ weights
    assert found.number == 32
    np.testing.assert_allclose(found.mean, expected.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.var, expected.var(0), rtol=1e-4)


def test_a_large_mean_costs_the_variance_no_digits():
    """In float32 the mean of squares less the squared mean would be wrong in the first digit."""
    draws = np.random.default_rng(0)
    patches = draws.normal(3000, 1, (8, 16, 16, 4)).astype(np.float32)
    weights = draws.uniform(0.5, 1, (4, 3)).astype(np.float32)
    found = moments_of_products(jnp.asarray(patches), jnp.asarray(weights))
    expected = (patches.astype(np.float64).reshape(-1, 4) @ weights).var(0)
    np.testing.assert_allclose(found.var, expected, rtol=1e-3)


def test_bfloat16_has_moments_in_float32_and_rounds_once():
    """Channels of images that are not centred have means other than zero."""
    draws = np.random.default_rng(0)
    patches = np.concatenate([draws.uniform(size=(8, 6, 6, 27)), np.ones((8, 6, 6, 1))], axis=-1)
    patches = jnp.asarray(patches, jnp.bfloat16)
    weights = jnp.asarray(draws.normal(size=(28, 5)), jnp.bfloat16)
    product = np.asarray(patches, np.float64).reshape(-1, 28) @ np.asarray(weights, np.float64)
    found = moments_of_products(patches, weights)
    assert {each.dtype for each in found} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(found.mean, product.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.var, product.var(0), rtol=1e-4)
    factor = jax.lax.rsqrt(found.var)
    outputs = scaled_product(patches, weights, factor, -found.mean * factor)
    assert outputs.dtype == jnp.bfloat16
    outputs = np.asarray(outputs, np.float64).reshape(-1, 5)
    expected = (product - product.mean(0)) / product.std(0)
    np.testing.assert_allclose(outputs, expected, rtol=2**-8, atol=1e-4)
    assert np.abs(outputs.mean(0)).max() < 1e-3


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mask must have shape \(4,\), got \(1,\)"):
        moments_of_products(jnp.ones((4, 2, 2, 3)), jnp.ones((3, 2)), jnp.ones(1))


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (1, 1, 1, 1)])
def test_the_last_column_is_one(shape):
    patches = patches_and_one(jnp.zeros(shape))
    assert patches.shape == (*shape[:3], 9 * shape[3] + 1)
    assert (patches[..., -1] == 1).all() and not patches[..., :-1].any()
