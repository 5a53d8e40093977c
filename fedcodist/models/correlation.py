"""Correlation with kernels of any size and stride; on a CPU a product of windows and the kernel.

The stock gradients of a convolution are very slow in loops on a CPU, and those of a strided one always
are. For 64 images 32x32x16, 32 features and stride 2 on one core, the gradient of a 3x3 kernel takes
340 ms, and 4 ms in this form. For 3x3 kernels at stride 1 there is `conv3x3`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedcodist.models.convolution import patches, same_varying_axes


def product(windows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Windows [B, H, W, K^2 C] times kernels [K, K, C, N]: [B, H, W, N]."""
    return windows @ kernel.reshape(-1, kernel.shape[-1])


def correlate(
    images: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    padding: int = 0,
    multiply: Callable[[jax.Array, jax.Array], jax.Array] = product,
) -> jax.Array:
    """Correlates images with square kernels, whole windows only.

    Args:
      images: [B, H, W, C] floats; H + 2 padding and W + 2 padding are at least the kernel's size K.
      kernel: [K, K, C, N] of the same dtype.
      stride: of the windows, along rows and columns.
      padding: rows and columns of zeros on each side of the images.
      multiply: the product of windows and kernel on a CPU: `product`, `product_of_rows` or
        `product_with_fast_gradient`.

    Returns:
      [B, (H + 2 padding - K) // stride + 1, (W + 2 padding - K) // stride + 1, N].
    """

    def by_windows(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return multiply(_windows(images, kernel.shape[0], stride, padding), kernel)

    def stock(images: jax.Array, kernel: jax.Array) -> jax.Array:
        margins = ((padding, padding), (padding, padding))
        return jax.lax.conv_general_dilated(
            images, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    images, kernel = same_varying_axes(images, kernel)
    return jax.lax.platform_dependent(images, kernel, cpu=by_windows, default=stock)


def product_of_rows(windows: jax.Array, kernel: jax.Array) -> jax.Array:
    """As `product`, a product of two matrices."""
    features = kernel.shape[-1]
    rows = windows.reshape(-1, windows.shape[-1]) @ kernel.reshape(-1, features)
    return rows.reshape(*windows.shape[:-1], features)


def product_with_fast_gradient(windows: jax.Array, kernel: jax.Array) -> jax.Array:
    """As `product`, with a gradient of the kernel that transposes no cotangents; reverse mode only."""
    return _product(windows, kernel.reshape(-1, kernel.shape[-1]))


@jax.custom_vjp
def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """[B, H, W, K] times [K, N]."""
    return rows @ matrix


def _product_forward(
    rows: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(rows, matrix), (rows, matrix)


def _product_backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # As the second factor, XLA would transpose the cotangents, a tenth of a step of FedMD's networks.
    rows, matrix = residuals
    flat = lambda array: array.reshape(-1, array.shape[-1])
    of_matrix = jax.lax.dot_general(flat(cotangent), flat(rows), (((0,), (0,)), ((), ())))
    return cotangent @ matrix.T, of_matrix.T


_product.defvjp(_product_forward, _product_backward)


def _windows(images: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
    """[B, H, W, C] -> [B, H', W', size^2 C], offsets in the kernel's row-major order."""
    if (size, stride) == (3, 2):
        return _windows3x3_at_stride_2(images, padding)
    if padding:
        images = _padded(images, (padding, padding), (padding, padding))
    if (size, stride) == (2, 2):
        return _windows2x2_at_stride_2(images)
    return patches(images, size, stride)


def _windows2x2_at_stride_2(images: jax.Array) -> jax.Array:
    """Each pixel belongs to one window."""
    batch, height, width, channels = images.shape
    rows, columns = height // 2, width // 2
    whole = images[:, : 2 * rows, : 2 * columns].reshape(batch, rows, 2, columns, 2, channels)
    return whole.swapaxes(2, 3).reshape(batch, rows, columns, 4 * channels)


def _windows3x3_at_stride_2(images: jax.Array, padding: int) -> jax.Array:
    """Even and odd columns, then rows, are separated first: slices with a stride have slow gradients."""
    batch, *sides, channels = images.shape
    height, width = ((side + 2 * padding - 3) // 2 + 1 for side in sides)
    # The last row and column of a window are in the next pairs.
    needed = (2 * height + 2, 2 * width + 2)
    fill = [max(padding, n - padding - side) for n, side in zip(needed, sides, strict=True)]
    images = _padded(images, (padding, fill[0]), (padding, fill[1]))[:, : needed[0], : needed[1]]
    pairs = images.reshape(batch, needed[0], width + 1, 2, channels)
    columns = [pairs[:, :, j // 2 : j // 2 + width, j % 2] for j in range(3)]
    shifted = jnp.concatenate(columns, axis=-1)
    pairs = shifted.reshape(batch, height + 1, 2, width, 3 * channels)
    windows = [pairs[:, i // 2 : i // 2 + height, i % 2] for i in range(3)]
    return jnp.concatenate(windows, axis=-1)


def _padded(images: jax.Array, rows: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
    return jnp.pad(images, ((0, 0), rows, columns, (0, 0)))
