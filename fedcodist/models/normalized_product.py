"""A 3x3 convolution of images and its batch normalisation as one product of matrices.

The moments of a linear layer's outputs follow from those of its inputs. For rows x and a column w of
weights, the mean is mean(x) w and the variance w cov(x) w. A window of a colour image has 27 values, a
wide layer has hundreds of features. So features can be written once, already normalised, and no pass
over them takes statistics, forwards or backwards. On a CPU such passes are most of the time of a wide
first layer.

This has a limit: if a filter cancels what neighbouring windows have in common, the variance is a small
difference of large numbers. Its relative error is about that of the dtype times |cov(x)| |w|^2 /
variance. For images this is harmless.
"""

import math

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedcodist.models.convolution import patches3x3
from fedcodist.models.normalization import BatchNormOfMoments, Moments, real_examples


def normalized_convolution(
    images: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    norm: BatchNormOfMoments,
    train: bool,
    mask: jax.Array | None = None,
) -> jax.Array:
    """`norm` of the convolution of zero-padded images at stride 1; [B, H, W, N].

    Args:
      images: [B, H, W, C].
      kernel, bias: [3, 3, C, N] and [N].
      norm: a submodule of the calling network.
      train: whether the batch's statistics normalise, and are recorded, as in `BatchNorm`.
      mask: [B], true or non-zero for real examples; None when all are.
    """
    images, kernel, bias = promote_dtype(images, kernel, bias)
    features = kernel.shape[-1]
    weights = jnp.concatenate([kernel.reshape(-1, features), bias[None]])
    patches = patches_and_one(images)
    moments = moments_of_products(patches, weights, mask) if train else None
    return scaled_product(patches, weights, *norm(features, moments))


def patches_and_one(images: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [B, H, W, 9 C + 1]: 3x3 windows, zeros around the image, and a 1 for the bias."""
    patches = patches3x3(images, "SAME")
    return jnp.concatenate([patches, jnp.ones_like(patches[..., :1])], axis=-1)


def moments_of_products(
    patches: jax.Array, weights: jax.Array, mask: jax.Array | None = None
) -> Moments:
    """The moments of `patches @ weights`, without that product, in float32 or wider.

    Args:
      patches: [B, ..., K] floats; what padded examples hold does not matter.
      weights: [K, N] floats.
      mask: [B], true or non-zero for real examples; None when all are.
    """
    dtype = jnp.promote_types(jnp.result_type(patches, weights), jnp.float32)
    patches, weights = patches.astype(dtype), weights.astype(dtype)
    real, axes = real_examples(patches, mask), tuple(range(patches.ndim - 1))
    count = math.prod(patches.shape[1:-1]) * jnp.sum(real, dtype=dtype)
    mean = jnp.sum(jnp.where(real, patches, 0), axes) / jnp.maximum(count, 1)
    # Patches are centred first: differences of large numbers would lose their digits.
    centred = jnp.where(real, patches - mean, 0).reshape(-1, patches.shape[-1])
    highest = jax.lax.Precision.HIGHEST
    covariance = jnp.matmul(centred.T, centred, precision=highest) / jnp.maximum(count, 1)
    var = jnp.sum(weights * jnp.matmul(covariance, weights, precision=highest), axis=0)
    return Moments(count, jnp.matmul(mean, weights, precision=highest), jnp.maximum(var, 0))


def scaled_product(
    patches: jax.Array, weights: jax.Array, factor: jax.Array, shift: jax.Array
) -> jax.Array:
    """`(patches @ weights) * factor + shift`, [B, ..., N] of the dtype of patches.

    Args:
      patches: [B, ..., K] floats, of which the last number is 1 everywhere.
      weights: [K, N] floats.
      factor, shift: [N] floats.
    """
    # With more than two dimensions XLA:CPU would transpose the gradient, which takes longer than the
    # product itself.
    rows = patches.reshape(-1, patches.shape[-1])
    if jnp.finfo(patches.dtype).bits < 32:
        # Scaled weights would be rounded once more, and no longer fit the factor and shift.
        product = jnp.matmul(rows, weights, preferred_element_type=jnp.float32) * factor + shift
    else:
        product = rows @ (weights * factor).at[-1].add(shift)
    return product.astype(patches.dtype).reshape(*patches.shape[:-1], -1)
