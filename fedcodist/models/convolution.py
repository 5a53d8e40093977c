"""3x3 convolution and 2x2 max-pooling, with another implementation on CPUs.

On a CPU the stock gradients of a convolution are very slow inside loops. That of max-pooling
(select-and-scatter) is slow everywhere. So on a CPU both gradients of a convolution are plain
convolutions, for which XLA:CPU has fast kernels, and the pool's gradient compares with the maximum.
On an NVIDIA GPU convolutions under a vmap over kernels, as of clients at once, multiply patches with
matrices: a round of 20 clients of both CNNs takes 9 ms instead of 28 on an H200. All else is stock.
Derivatives of all orders are defined in reverse mode, none in forward mode. Those of second and higher
order cannot be taken through a loop or a `jax.checkpoint` that contains these functions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

Padding = Literal["SAME", "VALID"]

_CACHED_VALUES = 3 * 2**16  # three quarters of a megabyte of float32


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
    inputs, kernel = same_varying_axes(*_promote(inputs, kernel))
    with jax.named_scope("conv3x3"):
        return _convolution(inputs, kernel, padding)


def max_pool_2x2(inputs: jax.Array) -> jax.Array:
    """Takes the maximum of each 2x2 window at stride 2; an odd last row or column is dropped.

    The gradient goes to one maximum per window, the first in row-major order, as in
    `jax.lax.reduce_window`.

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
    with jax.named_scope("max_pool_2x2"):
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


def same_varying_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts arrays so that all vary over every mesh axis that any of them varies over.

    Inside shard_map a kernel may be replicated while the images differ per device. A custom gradient
    must not mix the two. With this cast, JAX adds the sum over devices in the gradient.
    """
    axes = frozenset().union(*map(_varying_axes, arrays))
    return tuple(
        jax.lax.pcast(array, tuple(missing), to="varying") if missing else array
        for array in arrays
        for missing in [axes - _varying_axes(array)]
    )


def _varying_axes(array: jax.Array) -> frozenset[str]:
    kind = jax.typeof(array)
    # JAX before 0.10 stores the axes elsewhere.
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolution(inputs: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    stock = functools.partial(_correlate, margin=1 if padding == "SAME" else 0)
    return jax.lax.platform_dependent(
        inputs,
        kernel,
        cpu=_on_cpu(
            functools.partial(_outputs_by_convolution, padding=padding),
            functools.partial(_outputs_by_patches, padding=padding),
        ),
        cuda=_unless_mapped(stock, functools.partial(_outputs_by_patches, padding=padding)),
        default=stock,
    )


def _convolution_forward(
    inputs: jax.Array, kernel: jax.Array, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolution(inputs, kernel, padding), (inputs, kernel)


def _convolution_backward(
    padding: Padding, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Two functions, so that the gradient of images that need none is dead code.
    inputs, kernel = residuals
    with jax.named_scope("inputs_gradient"):
        inputs_gradient = _inputs_gradient(cotangent, kernel, padding)
    with jax.named_scope("kernel_gradient"):
        kernel_gradient = _kernel_gradient(inputs, cotangent, padding)
    return inputs_gradient, kernel_gradient


_convolution.defvjp(_convolution_forward, _convolution_backward)


# Both gradients are linear in each of their two arrays, and their gradients are the two other functions
# of the three. So derivatives of all orders are defined, such as those of FedL2G and Per-FedAvg.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _inputs_gradient(cotangent: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    stock = functools.partial(_inputs_by_convolution, padding=padding, correlate=_correlate)
    return jax.lax.platform_dependent(
        cotangent,
        kernel,
        cpu=_on_cpu(
            functools.partial(
                _inputs_by_convolution, padding=padding, correlate=_correlate_in_vectors
            ),
            functools.partial(_inputs_by_patches, padding=padding),
        ),
        cuda=_unless_mapped(stock, functools.partial(_inputs_by_patches, padding=padding)),
        default=stock,
    )


def _inputs_gradient_forward(
    cotangent: jax.Array, kernel: jax.Array, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _inputs_gradient(cotangent, kernel, padding), (cotangent, kernel)


def _inputs_gradient_backward(
    padding: Padding, residuals: tuple[jax.Array, jax.Array], slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    cotangent, kernel = residuals
    return _convolution(slope, kernel, padding), _kernel_gradient(slope, cotangent, padding)


_inputs_gradient.defvjp(_inputs_gradient_forward, _inputs_gradient_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kernel_gradient(inputs: jax.Array, cotangent: jax.Array, padding: Padding) -> jax.Array:
    stock = functools.partial(_kernel_stock, padding=padding)
    return jax.lax.platform_dependent(
        inputs,
        cotangent,
        cpu=_on_cpu(
            functools.partial(_kernel_by_convolution, padding=padding),
            functools.partial(_kernel_by_patches, padding=padding),
        ),
        cuda=_unless_mapped(stock, functools.partial(_kernel_by_patches, padding=padding)),
        default=stock,
    )


def _kernel_gradient_forward(
    inputs: jax.Array, cotangent: jax.Array, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _kernel_gradient(inputs, cotangent, padding), (inputs, cotangent)


def _kernel_gradient_backward(
    padding: Padding, residuals: tuple[jax.Array, jax.Array], slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inputs, cotangent = residuals
    return _inputs_gradient(cotangent, slope, padding), _convolution(inputs, slope, padding)


_kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)


def _on_cpu(
    by_convolution: Callable[[jax.Array, jax.Array], jax.Array],
    by_patches: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Chooses between the two CPU implementations of a function of two arrays.

    XLA:CPU has fast kernels for a float32 convolution only if it is a plain one: batch and spatial
    dimensions first, channels last, no groups, no dilation. Under a vmap over kernels it would be a
    grouped one, and other dtypes are slow. So are images of two rows: for 10 images 2x2x256 and 256
    features on one core, a convolution takes 18 ms, and patches take 1 ms. In these cases patches are
    multiplied with a matrix.
    """
    plain = _unless_mapped(by_convolution, by_patches)

    def choose(images: jax.Array, right: jax.Array) -> jax.Array:
        is_fast = images.dtype == jnp.float32 and min(images.shape[1:3]) > 3
        return (plain if is_fast else by_patches)(images, right)

    return choose


def _unless_mapped(
    by_convolution: Callable[[jax.Array, jax.Array], jax.Array],
    by_patches: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A convolution which under vmap would be a grouped one; there patches take its place."""
    plain = jax.custom_batching.custom_vmap(by_convolution)

    @plain.def_vmap
    def mapped(
        axis_size: int, batched: Sequence[bool], left: jax.Array, right: jax.Array
    ) -> tuple[jax.Array, bool]:
        del axis_size
        axes = tuple(0 if is_batched else None for is_batched in batched)
        return jax.vmap(by_patches, axes)(left, right), True

    return plain


def _outputs_by_convolution(inputs: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    return _correlate_in_vectors(inputs, kernel, 1 if padding == "SAME" else 0)


def _inputs_by_convolution(
    cotangent: jax.Array,
    kernel: jax.Array,
    padding: Padding,
    correlate: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> jax.Array:
    # The transpose of a correlation is the correlation with the mirrored kernel.
    return correlate(cotangent, _mirrored(kernel), 1 if padding == "SAME" else 2)


def _correlate_in_vectors(inputs: jax.Array, kernel: jax.Array, margin: int) -> jax.Array:
    """Computes neighbouring columns of outputs at once where the features of one do not fill a vector.

    Colour images have 3 channels, so two columns become a pixel of 6. For 20 images 24x24x3 on one core,
    with 16 and 32 features, this takes 0.22 and 0.35 ms instead of 0.77 and 0.88 ms. 16 channels and
    features fill one vector, but the kernels work on several; windows of four columns fill them. For 20
    images 32x32x16 this takes 0.93 ms instead of 1.60 ms.
    """
    channels, features = kernel.shape[2:]
    width = inputs.shape[2] + 2 * margin - 2
    if width % 2 or (channels >= 8 and max(channels, features) > 16):
        return _correlate(inputs, kernel, margin)
    both = jnp.concatenate(
        [jnp.pad(kernel, ((0, 0), (column, 1 - column), (0, 0), (0, 0))) for column in range(2)], -1
    )
    if channels >= 8:
        outputs = _correlate(inputs, both, margin, strides=(1, 2))
    else:
        inputs = jnp.pad(inputs, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        pairs = inputs.reshape(*inputs.shape[:2], width // 2 + 1, 2 * channels)
        outputs = _correlate(pairs, both.reshape(3, 2, 2 * channels, 2 * features), 0)
    return outputs.reshape(*outputs.shape[:2], width, features)


def _kernel_by_convolution(inputs: jax.Array, cotangent: jax.Array, padding: Padding) -> jax.Array:
    """Correlates images with cotangents, with the roles of examples and channels exchanged.

    The cotangents are the window of that correlation. Chunks of examples keep it in the cache.
    """
    batch = cotangent.shape[0]
    size = _chunk_size(batch, math.prod(cotangent.shape[1:]))
    chunks = max(1, -(-batch // size))
    margin = 1 if padding == "SAME" else 0

    def kernel_of(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, cotangents = pair
        columns = _correlate(images.transpose(3, 1, 2, 0), cotangents.transpose(1, 2, 0, 3), margin)
        return columns.transpose(1, 2, 0, 3)

    if chunks == 1:
        return kernel_of((inputs, cotangent))

    def split(array: jax.Array) -> jax.Array:
        fill = [(0, chunks * size - batch)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, fill).reshape(chunks, size, *array.shape[1:])

    return jnp.sum(jax.lax.map(kernel_of, (split(inputs), split(cotangent))), axis=0)


def _chunk_size(batch: int, window: int) -> int:
    """Examples at a time: as many as keep the window in the cache, an even number, with little padding.

    These are milliseconds on one core with a cache of 1 MB, with JAX 0.12. 20 images 32x32x16 to 16
    features take 1.1 in chunks of 10, 1.4 in one and 1.7 in chunks of 4. 20 images 26x26x32 to 64
    features take 2.3 in chunks of 4 and 4.2 in one. 20 images 16x16x32 to 32 features take 1.1 in chunks
    of 4 and 0.64 in one. 128 images 6x6x32 to 32 features take 1.4 in chunks of 8 and 0.57 in one.

    Args:
      batch: number of examples.
      window: values of one example's cotangents.
    """
    most = max(1, _CACHED_VALUES // max(1, window))
    if batch <= most:
        return max(1, batch)
    sizes = [size for size in range(most, most // 2, -1) if size % 2 == 0] or [1]
    return min(sizes, key=lambda size: -batch % size)


def _outputs_by_patches(inputs: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    return patches3x3(inputs, padding) @ kernel.reshape(-1, kernel.shape[-1])


def _inputs_by_patches(cotangent: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    if padding == "VALID":
        cotangent = jnp.pad(cotangent, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return _outputs_by_patches(cotangent, _mirrored(kernel), "SAME")


def _kernel_by_patches(inputs: jax.Array, cotangent: jax.Array, padding: Padding) -> jax.Array:
    # Contracting the rows of (cotangent, patches) and transposing the small result is faster on a
    # CPU than contracting (patches, cotangent).
    patches = patches3x3(inputs, padding)
    channels, features = inputs.shape[-1], cotangent.shape[-1]
    product = jax.lax.dot_general(
        cotangent.reshape(-1, features),
        patches.reshape(-1, 9 * channels),
        (((0,), (0,)), ((), ())),
    )
    return product.T.reshape(3, 3, channels, features)


def _kernel_stock(inputs: jax.Array, cotangent: jax.Array, padding: Padding) -> jax.Array:
    margin = 1 if padding == "SAME" else 0
    zeros = jnp.zeros((3, 3, inputs.shape[-1], cotangent.shape[-1]), inputs.dtype)
    inputs, kernel = same_varying_axes(inputs, zeros)
    return jax.vjp(lambda w: _correlate(inputs, w, margin), kernel)[1](cotangent)[0]


def _correlate(
    inputs: jax.Array, kernel: jax.Array, margin: int, strides: tuple[int, int] = (1, 1)
) -> jax.Array:
    """Correlates images with kernels, after padding with `margin` rows and columns of zeros."""
    return jax.lax.conv_general_dilated(
        inputs, kernel, strides, ((margin, margin),) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _mirrored(kernel: jax.Array) -> jax.Array:
    return kernel[::-1, ::-1].swapaxes(2, 3)


def patches3x3(inputs: jax.Array, padding: Padding) -> jax.Array:
    """[B, H, W, C] -> [B, H', W', 9 C], offsets in the kernel's row-major order."""
    if padding == "SAME":
        inputs = jnp.pad(inputs, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return patches(inputs, 3)


def patches(images: jax.Array, size: int, stride: int = 1) -> jax.Array:
    """[B, H, W, C] -> [B, H', W', size^2 C], every window of the images without padding.

    Offsets are in the kernel's row-major order. Columns are shifted first and rows then, which makes
    2 size slices in place of size^2. XLA:CPU compiles each of them by itself.
    """
    last = size - 1
    height, width = images.shape[1] - last, images.shape[2] - last
    rows = [images[:, :, j : j + width : stride] for j in range(size)]
    shifted = jnp.concatenate(rows, axis=-1)
    windows = [shifted[:, i : i + height : stride] for i in range(size)]
    return jnp.concatenate(windows, axis=-1)


@jax.custom_vjp
def _pool(inputs: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(
        inputs,
        cpu=lambda x: functools.reduce(jnp.maximum, _quarters(x)),
        default=_stock_pool,
    )


def _pool_forward(inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    outputs = _pool(inputs)
    return outputs, (inputs, outputs)


def _pool_backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array]:
    def compare(inputs: jax.Array, outputs: jax.Array, cotangent: jax.Array) -> jax.Array:
        places = jnp.arange(4, dtype=jnp.int8)
        winner = jnp.select([quarter == outputs for quarter in _quarters(inputs)], list(places), -1)
        wins = winner[:, :, None, :, None] == places.reshape(2, 1, 2, 1)
        return jnp.where(wins, cotangent[:, :, None, :, None], 0).reshape(inputs.shape)

    def stock(inputs: jax.Array, outputs: jax.Array, cotangent: jax.Array) -> jax.Array:
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
