"""3x3 convolution and 2x2 max-pooling, lowered per platform.

XLA's CPU convolution is slow inside loops, and so is the stock gradient of max-pooling
(select-and-scatter). On a CPU a convolution is therefore patches times a matrix and the pool's
gradient is a comparison with the maximum; elsewhere both are the stock operations.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

Padding = Literal["SAME", "VALID"]


def conv3x3(inputs: jax.Array, kernel: jax.Array, padding: Padding = "SAME") -> jax.Array:
    """Correlates images with 3x3 kernels at stride 1.

    Args:
      inputs: [B, H, W, C] floats.
      kernel: [3, 3, C, N] floats; the two are promoted to a common dtype.
      padding: "SAME" (zeros around, H' = H) or "VALID" (H' = H - 2).

    Returns:
      [B, H', W', N].

    Raises:
      ValueError: for another padding, or shapes that do not fit.
    """
    _check_convolution(inputs, kernel, padding)
    inputs, kernel = _same_varying_axes(*_promote(inputs, kernel))
    return _convolution(inputs, kernel, padding)


def max_pool_2x2(inputs: jax.Array) -> jax.Array:
    """Takes the maximum of each 2x2 window at stride 2; an odd last row or column is dropped.

    The gradient goes to one winner per window, the first in row-major order among equals, which is
    also what the gradient of `jax.lax.reduce_window` does.

    Args:
      inputs: [B, H, W, C] floats with H, W >= 2.

    Returns:
      [B, H // 2, W // 2, C].

    Raises:
      ValueError: when `inputs` is not [B, H, W, C] with H, W >= 2.
    """
    if inputs.ndim != 4 or min(inputs.shape[1:3]) < 2:
        raise ValueError(f"inputs must be [B, H, W, C] with H, W >= 2, got {inputs.shape}")
    height, width = inputs.shape[1] // 2 * 2, inputs.shape[2] // 2 * 2
    return _pool(inputs[:, :height, :width])


def _check_convolution(inputs: jax.Array, kernel: jax.Array, padding: str) -> None:
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding must be 'SAME' or 'VALID', got {padding!r}")
    if inputs.ndim != 4:
        raise ValueError(f"inputs must be [B, H, W, C], got shape {inputs.shape}")
    if kernel.ndim != 4 or kernel.shape[:3] != (3, 3, inputs.shape[-1]):
        raise ValueError(
            f"kernel must be [3, 3, {inputs.shape[-1]}, N] for inputs {inputs.shape}, "
            f"got shape {kernel.shape}"
        )
    if padding == "VALID" and min(inputs.shape[1:3]) < 3:
        raise ValueError(f"inputs must have H, W >= 3 for padding 'VALID', got {inputs.shape}")


def _promote(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    dtype = jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def _same_varying_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    # Inside shard_map a kernel may be replicated where the images differ per device. A custom
    # gradient must not mix the two; casting here lets JAX add the sum over devices in the gradient.
    axes = frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))
    return tuple(
        jax.lax.pcast(array, tuple(axes - jax.typeof(array).mat.varying), to="varying")
        if axes - jax.typeof(array).mat.varying
        else array
        for array in arrays
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolution(inputs: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    return jax.lax.platform_dependent(
        inputs,
        kernel,
        cpu=lambda x, w: _times(_patches(x, padding), w),
        default=lambda x, w: _stock_convolution(x, w, padding),
    )


def _convolution_forward(inputs, kernel, padding):
    return _convolution(inputs, kernel, padding), (inputs, kernel)


def _convolution_backward(padding, residuals, cotangent):
    # Two separate platform switches: where the images need no gradient, theirs is dead code.
    inputs, kernel = residuals

    def inputs_stock(x, w, g):
        return jax.vjp(lambda x: _stock_convolution(x, w, padding), x)[1](g)[0]

    def kernel_stock(x, w, g):
        return jax.vjp(lambda w: _stock_convolution(x, w, padding), w)[1](g)[0]

    def inputs_cpu(x, w, g):
        # The transpose of a correlation is a correlation with the mirrored kernel.
        full = jnp.pad(g, ((0, 0), (1, 1), (1, 1), (0, 0))) if padding == "VALID" else g
        return _times(_patches(full, "SAME"), w[::-1, ::-1].swapaxes(2, 3))

    def kernel_cpu(x, w, g):
        patches = _patches(x, padding)
        rows = patches.reshape(-1, patches.shape[-1])
        # Contracting the rows of (g, patches) and transposing the small result is faster on a CPU
        # than contracting (patches, g).
        product = jax.lax.dot_general(g.reshape(-1, g.shape[-1]), rows, (((0,), (0,)), ((), ())))
        return product.T.reshape(w.shape)

    return (
        jax.lax.platform_dependent(inputs, kernel, cotangent, cpu=inputs_cpu, default=inputs_stock),
        jax.lax.platform_dependent(inputs, kernel, cotangent, cpu=kernel_cpu, default=kernel_stock),
    )


_convolution.defvjp(_convolution_forward, _convolution_backward)


def _stock_convolution(inputs: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    return jax.lax.conv_general_dilated(
        inputs, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _patches(inputs: jax.Array, padding: Padding) -> jax.Array:
    """[B, H, W, C] -> [B, H', W', 9 C], offsets in the kernel's row-major order."""
    if padding == "SAME":
        inputs = jnp.pad(inputs, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = inputs.shape[1] - 2, inputs.shape[2] - 2
    return jnp.concatenate(
        [inputs[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1
    )


def _times(patches: jax.Array, kernel: jax.Array) -> jax.Array:
    return patches @ kernel.reshape(-1, kernel.shape[-1])


@jax.custom_vjp
def _pool(inputs: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(
        inputs,
        cpu=lambda x: functools.reduce(jnp.maximum, _quarters(x)),
        default=_stock_pool,
    )


def _pool_forward(inputs):
    outputs = _pool(inputs)
    return outputs, (inputs, outputs)


def _pool_backward(residuals, cotangent):
    def compare(inputs, outputs, cotangent):
        free = jnp.ones(outputs.shape, bool)
        gradients = []
        for quarter in _quarters(inputs):
            wins = free & (quarter == outputs)
            free = free & ~wins
            gradients.append(jnp.where(wins, cotangent, 0))
        return _join_quarters(gradients)

    def stock(inputs, outputs, cotangent):
        del outputs
        return jax.vjp(_stock_pool, inputs)[1](cotangent)[0]

    return (jax.lax.platform_dependent(*residuals, cotangent, cpu=compare, default=stock),)


_pool.defvjp(_pool_forward, _pool_backward)


def _stock_pool(inputs: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(inputs, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _quarters(inputs: jax.Array) -> list[jax.Array]:
    """[B, 2 H, 2 W, C] -> the four [B, H, W, C] of each window's members in row-major order."""
    batch, height, width, channels = inputs.shape
    windows = inputs.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return [windows[:, :, i, :, j] for i in range(2) for j in range(2)]


def _join_quarters(quarters: list[jax.Array]) -> jax.Array:
    """The inverse of `_quarters`."""
    batch, height, width, channels = quarters[0].shape
    rows = [jnp.stack(quarters[k : k + 2], axis=3) for k in (0, 2)]
    return jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, channels)
