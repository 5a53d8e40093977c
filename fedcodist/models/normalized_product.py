"""A convolution of images and its batch normalisation as one product of matrices.

What a linear layer makes of a batch has moments that follow from those of what it reads: for rows x and
a column w of weights the mean is mean(x) w, the variance w cov(x) w. A 3x3 window of a colour image has
27 numbers, a wide layer hundreds of features; so these are written once, normalised already, and no
pass over them takes statistics, in either direction. On a CPU such passes are most of the time of a
wide first layer.
"""

import math

import jax
import jax.numpy as jnp

from fedcodist.models.convolution import patches3x3
from fedcodist.models.normalization import Moments, real_examples


def patches_and_one(images: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [B, H, W, 9 C + 1]: 3x3 windows, zeros around the image, and a 1 for the bias."""
    patches = patches3x3(images, "SAME")
    return jnp.concatenate([patches, jnp.ones_like(patches[..., :1])], axis=-1)


def moments_of_products(
    patches: jax.Array, weights: jax.Array, mask: jax.Array | None = None
) -> Moments:
    """The moments of `patches @ weights`, without that product, in float32 or wider.

    Args:
      patches: [B, ..., K] floats; values of padded examples are never read.
      weights: [K, N] floats.
      mask: [B], true or non-zero for real examples; None when all are.
    """
    dtype = jnp.promote_types(jnp.result_type(patches, weights), jnp.float32)
    patches, weights = patches.astype(dtype), weights.astype(dtype)
    real, axes = real_examples(patches, mask), tuple(range(patches.ndim - 1))
    count = math.prod(patches.shape[1:-1]) * jnp.sum(real, dtype=dtype)
    mean = jnp.sum(jnp.where(real, patches, 0), axes) / jnp.maximum(count, 1)
    # From centred patches: differences of large numbers have no digits left.
    centred = jnp.where(real, patches - mean, 0).reshape(-1, patches.shape[-1])
    exact = jax.lax.Precision.HIGHEST
    covariance = jnp.matmul(centred.T, centred, precision=exact) / jnp.maximum(count, 1)
    var = jnp.sum(weights * jnp.matmul(covariance, weights, precision=exact), axis=0)
    return Moments(count, jnp.matmul(mean, weights, precision=exact), jnp.maximum(var, 0))


def scaled_product(
    patches: jax.Array, weights: jax.Array, factor: jax.Array, shift: jax.Array
) -> jax.Array:
    """`(patches @ weights) * factor + shift`, whose last column of patches is 1; [B, ..., N]."""
    scaled = (weights * factor).at[-1].add(shift).astype(patches.dtype)
    # As a matrix: of more dimensions XLA:CPU would transpose the gradient, which takes longer than its
    # product.
    rows = patches.reshape(-1, patches.shape[-1])
    return (rows @ scaled).reshape(*patches.shape[:-1], -1)
