"""Batch normalisation that leaves padded examples out of its statistics."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.models.convolution import same_varying_axes


class BatchNorm(nn.Module):
    """Normalises each channel by the mean and (biased) variance of the batch's real examples.

    y = scale (x - mean) / sqrt(var + epsilon) + bias. In train mode, mean and var are those of the
    examples whose mask is true, over all axes but the last. With `axis_name` they are over all devices
    of that axis, and every example counts once, however examples are divided. The running averages in
    the collection `batch_stats` become momentum * running + (1 - momentum) * batch. Without a real
    example nothing is updated, and the running averages normalise, as they always do in eval mode.

    Attributes:
      momentum: weight of the old running average, in [0, 1].
      epsilon: added to the variance, > 0.
      axis_name: mesh axis whose devices share one batch, or None.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {self.momentum!r}")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon!r}")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None = None) -> jax.Array:
        """Normalises [B, ..., C] floats; statistics are kept in float32 or wider.

        Args:
          x: [B, ..., C] floats; values of padded examples are never read by the statistics.
          train: whether to use and record the batch's statistics.
          mask: [B], true or non-zero for real examples; None when all are.

        Raises:
          ValueError: when `mask` is not [B].
        """
        real_examples(x, mask)
        averages, scale, bias = _parameters(self, x.shape[-1])
        # Initialisation runs outside any mesh and must not change the averages.
        if train and not self.is_initializing():
            x, scale, bias = same_varying_axes(x, scale, bias)
            running = [average.value for average in averages]
            outputs, count, mean, var = _by_batch(
                x, mask, scale, bias, *running, self.epsilon, self.axis_name
            )
            _record(averages, count, mean, var, self.momentum)
            return outputs
        mean, var = (average.value for average in averages)
        return _affine(x, mean, scale * jax.lax.rsqrt(var + self.epsilon), bias)


class Moments(NamedTuple):
    """The number of real values per channel (a scalar), their mean and biased variance, [C] each."""

    number: jax.Array
    mean: jax.Array
    var: jax.Array


class BatchNormOfMoments(nn.Module):
    """`BatchNorm` for moments that are known before the values: y = factor x + shift.

    It has the parameters, running averages and rules of `BatchNorm`, but each device has its own
    statistics. The moments' gradients are those of the function that computes them.

    Attributes:
      momentum, epsilon: as in `BatchNorm`.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, channels: int, moments: Moments | None) -> tuple[jax.Array, jax.Array]:
        """Returns (factor, shift), [channels] both.

        Args:
          channels: how many there are.
          moments: of the batch, in training; None normalises by the running averages.
        """
        averages, scale, bias = _parameters(self, channels)
        mean, var = (average.value for average in averages)
        if moments is not None and not self.is_initializing():
            mean = jnp.where(moments.number > 0, moments.mean, mean)
            var = jnp.where(moments.number > 0, moments.var, var)
            _record(averages, moments.number, mean, var, self.momentum)
        factor = scale * jax.lax.rsqrt(var + self.epsilon)
        return factor, bias - mean * factor


def _parameters(module: nn.Module, channels: int) -> tuple[list[nn.Variable], jax.Array, jax.Array]:
    """A layer's running averages of mean and variance, its scale and its bias."""
    averages = [
        module.variable("batch_stats", name, start, (channels,), jnp.float32)
        for name, start in (("mean", jnp.zeros), ("var", jnp.ones))
    ]
    scale = module.param("scale", nn.initializers.ones_init(), (channels,), jnp.float32)
    bias = module.param("bias", nn.initializers.zeros_init(), (channels,), jnp.float32)
    return averages, scale, bias


def _record(
    averages: list[nn.Variable], count: jax.Array, mean: jax.Array, var: jax.Array, momentum: float
) -> None:
    for average, new in zip(averages, (mean, var), strict=True):
        update = momentum * average.value + (1 - momentum) * new
        average.value = jnp.where(count > 0, update, average.value).astype(average.value.dtype)


def _affine(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    return ((x - mean) * factor + bias).astype(jnp.promote_types(x.dtype, bias.dtype))


# What `_by_batch` keeps for its gradient: x, mask, scale, bias, count, mean and 1 / deviation.
_Kept = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _by_batch(
    x: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array,
    running_mean: jax.Array,
    running_var: jax.Array,
    epsilon: float,
    axis_name: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Outputs, number of real values per channel, and the mean and variance that normalise.

    Only the outputs have gradients. Written by hand, these need two sums over the batch and one more
    pass. Derived from the two passes of the moments, they take half as long again on a CPU.
    """
    return _by_batch_forward(x, mask, scale, bias, running_mean, running_var, epsilon, axis_name)[0]


def _by_batch_forward(
    x: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array,
    running_mean: jax.Array,
    running_var: jax.Array,
    epsilon: float,
    axis_name: str | None,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], _Kept]:
    count, mean, var = _masked_moments(x, mask, axis_name)
    mean = jnp.where(count > 0, mean, running_mean)
    var = jnp.where(count > 0, var, running_var)
    inverse = jax.lax.rsqrt(var + epsilon)
    outputs = _affine(x, mean, scale * inverse, bias)
    return (outputs, count, mean, var), (x, mask, scale, bias, count, mean, inverse)


def _by_batch_backward(
    epsilon: float, axis_name: str | None, residuals: _Kept, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    x, mask, scale, bias, count, mean, inverse = residuals
    cotangent = cotangents[0].astype(mean.dtype)
    axes = tuple(range(x.ndim - 1))
    along_bias = jnp.sum(cotangent, axes)
    along_scale = inverse * jnp.sum(cotangent * (x - mean), axes)
    # The gradient through the mean and the variance, to which only real examples contribute.
    through_mean, through_var = _total(jnp.stack([along_bias, along_scale]), axis_name)
    shared = (through_mean + (x - mean) * (inverse * through_var)) / jnp.maximum(count, 1)
    inputs = scale * inverse * (cotangent - jnp.where(real_examples(x, mask), shared, 0))
    gradients = (
        inputs.astype(x.dtype),
        along_scale.astype(scale.dtype),
        along_bias.astype(bias.dtype),
    )
    return gradients[0], None, *gradients[1:], None, None


_by_batch.defvjp(_by_batch_forward, _by_batch_backward)


def real_examples(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[B, 1, ..., 1], true for real examples; raises ValueError where `mask` is not [B]."""
    if mask is not None and mask.shape != x.shape[:1]:
        raise ValueError(f"mask must have shape {x.shape[:1]}, got {mask.shape}")
    real = jnp.ones(x.shape[:1], bool) if mask is None else mask.astype(bool)
    return real.reshape(real.shape + (1,) * (x.ndim - 1))


def _total(array: jax.Array, axis_name: str | None) -> jax.Array:
    return array if axis_name is None else jax.lax.psum(array, axis_name)


def _masked_moments(
    x: jax.Array, mask: jax.Array | None, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The number of real values per channel (a scalar), their mean and variance, [C] each.

    Computed in two passes: in float32, mean square minus squared mean loses all digits for channels with
    a large mean.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes, real = tuple(range(x.ndim - 1)), real_examples(x, mask)
    count = math.prod(x.shape[1:-1]) * jnp.sum(real, dtype=x.dtype)
    mean = jnp.sum(jnp.where(real, x, 0), axes) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.where(real, jnp.square(x - mean), 0), axes)
    if axis_name is not None:
        count, mean, squares = _moments_of_all_devices(count, mean, squares, axis_name)
    return count, mean, squares / jnp.maximum(count, 1)


def _moments_of_all_devices(
    count: jax.Array, mean: jax.Array, squares: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Number of values, mean and sum of squared deviations over all devices, from those of each device.

    The parallel formula of Chan, Golub and LeVeque (1979) needs one collective. Computing the mean first
    and then the deviations would need two, and processes wait for each other in each.
    """
    statistics = jnp.concatenate([count[None], mean, squares])
    places = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)
    parts = _total(jnp.where(places[:, None], statistics, 0), axis_name)
    counts, means, squared = parts[:, :1], *jnp.split(parts[:, 1:], 2, axis=1)
    count = jnp.sum(counts)
    mean = jnp.sum(counts * means, axis=0) / jnp.maximum(count, 1)
    return count, mean, jnp.sum(squared + counts * jnp.square(means - mean), axis=0)
