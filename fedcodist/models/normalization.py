"""Batch normalisation that leaves padded examples out of its statistics."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp


class BatchNorm(nn.Module):
    """Normalises each channel by the mean and (biased) variance of the batch's real examples.

    y = scale (x - mean) / sqrt(var + epsilon) + bias. In train mode mean and var are those of the
    examples whose mask is true, over all axes but the last and, with `axis_name`, over all devices
    of that axis, each example counting once however they are spread; the running averages in the
    collection `batch_stats` become momentum * running + (1 - momentum) * batch. When no example is
    real, nothing is updated and the running averages normalise. In eval mode they always do.

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
        if mask is not None and mask.shape != x.shape[:1]:
            raise ValueError(f"mask must have shape {x.shape[:1]}, got {mask.shape}")
        channels = x.shape[-1:]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        scale = self.param("scale", nn.initializers.ones_init(), channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), channels, jnp.float32)

        mean, var = running_mean.value, running_var.value
        # Initialisation runs outside any mesh and must leave the averages at their start values.
        if train and not self.is_initializing():
            count, batch_mean, batch_var = _masked_moments(x, mask, self.axis_name)
            some = count > 0
            mean = jnp.where(some, batch_mean, running_mean.value)
            var = jnp.where(some, batch_var, running_var.value)
            for running, batch in ((running_mean, mean), (running_var, var)):
                update = self.momentum * running.value + (1 - self.momentum) * batch
                running.value = jnp.where(some, update, running.value).astype(running.value.dtype)
        factor = scale * jax.lax.rsqrt(var + self.epsilon)
        return ((x - mean) * factor + bias).astype(jnp.promote_types(x.dtype, scale.dtype))


def _masked_moments(
    x: jax.Array, mask: jax.Array | None, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the number of real values per channel (a scalar), their mean and variance, [C] each.

    Two passes: the difference of mean square and squared mean loses all digits in float32 for
    channels whose mean is large.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    total = (lambda tree: tree) if axis_name is None else (lambda t: jax.lax.psum(t, axis_name))
    axes = tuple(range(x.ndim - 1))
    real = jnp.ones(x.shape[:1], bool) if mask is None else mask.astype(bool)
    real = real.reshape(real.shape + (1,) * (x.ndim - 1))
    positions = math.prod(x.shape[1:-1])
    count, sums = total(
        (positions * jnp.sum(real, dtype=x.dtype), jnp.sum(jnp.where(real, x, 0), axes))
    )
    mean = sums / jnp.maximum(count, 1)
    var = total(jnp.sum(jnp.where(real, jnp.square(x - mean), 0), axes)) / jnp.maximum(count, 1)
    return count, mean, var
