"""Correlations of all sizes and strides, with gradients, equal the stock convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.models.correlation import (
    correlate,
    product,
    product_of_rows,
    product_with_fast_gradient,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")


def stock(images, kernel, stride, padding):
    margins = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    "size, stride, padding, height, width, multiply",
    [
        (5, 1, 0, 9, 8, product),
        (7, 2, 3, 8, 6, product),
        (2, 2, 0, 7, 6, product_with_fast_gradient),
        (2, 2, 1, 4, 3, product_of_rows),
        (3, 2, 0, 7, 6, product_with_fast_gradient),
        (3, 2, 0, 3, 9, product_with_fast_gradient),
        (3, 2, 1, 6, 5, product_of_rows),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_equals_the_stock_convolution(size, stride, padding, height, width, multiply):
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        images = jnp.asarray(draws.normal(size=(2, height, width, 3)))
        kernel = jnp.asarray(draws.normal(size=(size, size, 3, 4)))
        ours = lambda x, w: correlate(x, w, stride, padding, multiply)
        theirs = lambda x, w: stock(x, w, stride, padding)
        of_sum = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
        found, expected = jax.jit(
            lambda x, w: [(f(x, w), jax.grad(of_sum(f), (0, 1))(x, w)) for f in (ours, theirs)]
        )(images, kernel)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), found, expected)


@pytest.mark.parametrize(("platform", "is_stock"), [("cpu", False), ("cuda", True)])
def test_it_is_the_stock_one_only_off_the_cpu(platform, is_stock):
    shapes = (jnp.zeros((1, 4, 4, 2)), jnp.zeros((2, 2, 2, 3)))
    traced = jax.jit(lambda x, w: correlate(x, w, 2)).trace(*shapes)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.convolution" in program) == is_stock
    assert ("stablehlo.dot_general" in program) != is_stock
