"""Residual networks for 32x32 colour images: ResNet-8, ResNet-20, ResNet-56 and WRN-16-2.

ResNet-20 and ResNet-56 are those of section 4.2 of He et al., https://arxiv.org/abs/1512.03385; ResNet-8
has the same form with one block per stage. The wide network is that of Zagoruyko and Komodakis,
https://arxiv.org/abs/1605.07146. Normalisation is over the batch, with statistics as mutable state, or
over groups of channels, without statistics.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer
from fedcodist.models.convolution import conv3x3
from fedcodist.models.correlation import correlate, product_of_rows
from fedcodist.models.normalization import BatchNorm

Normalize = Callable[[jax.Array, str], jax.Array]


def resnet8(*, classes: int = 10, shortcut: str = "B", norm: str = "batch") -> "ResNet":
    """ResNet-8: 75,290 (A) or 78,042 (B) parameters for 10 classes, 5,850 more for 100."""
    return ResNet(blocks=1, classes=classes, shortcut=shortcut, norm=norm)


def resnet20(*, classes: int = 10, shortcut: str = "B", norm: str = "batch") -> "ResNet":
    """ResNet-20: 269,722 (A) or 272,474 (B) parameters for 10 classes, 5,850 more for 100."""
    return ResNet(blocks=3, classes=classes, shortcut=shortcut, norm=norm)


def resnet56(*, classes: int = 10, shortcut: str = "B", norm: str = "batch") -> "ResNet":
    """ResNet-56: 853,018 (A) or 855,770 (B) parameters for 10 classes, 5,850 more for 100."""
    return ResNet(blocks=9, classes=classes, shortcut=shortcut, norm=norm)


def wide_resnet16_2(*, classes: int = 10, norm: str = "batch") -> "WideResNet":
    """WRN-16-2: 691,674 parameters for 10 classes, 703,284 for 100."""
    return WideResNet(blocks=2, widening=2, classes=classes, norm=norm)


class ResNet(nn.Module):
    """A stem, three stages of basic blocks with 16, 32 and 64 channels, the mean, a linear output.

    Called with [B, 32, 32, 3] floats, `train` and an optional mask [B] of real examples; returns
    logits [B, classes].

    Attributes:
      blocks: basic blocks per stage, two convolutions each.
      classes: width of the outputs. With None there is no output layer; the mean [B, 4 width] is
        returned.
      shortcut: where a stage reduces the image, "A" takes every second pixel and adds channels of zeros,
        "B" is a normalised 1x1 convolution.
      norm: "batch" (`BatchNorm`, without padded examples) or "group" (two groups).
      axis_name: mesh axis whose devices share one batch, or None.
      width: channels of the first stage, 16 in the paper; the others have two and four times as many.

    Raises:
      ValueError, TypeError: for other values, or images of another shape.
    """

    blocks: int
    classes: int | None = 10
    shortcut: str = "B"
    norm: str = "batch"
    axis_name: str | None = None
    width: int = 16

    def __post_init__(self) -> None:
        check_integer("blocks", self.blocks, low=1)
        check_integer("width", self.width, low=2)
        if self.width % 2:
            raise ValueError(f"width must be an even number of at least 2, got {self.width!r}")
        if self.shortcut not in ("A", "B"):
            raise ValueError(f"shortcut must be 'A' or 'B', got {self.shortcut!r}")
        _check(self.classes, self.norm)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        _check_images(x)
        normalize = _normalization(self.norm, self.axis_name, train, mask)
        x = nn.relu(normalize(Convolution(self.width, name="stem")(x), "stem_norm"))
        for stage in range(3):
            features = self.width * 2**stage
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage + 1}_block{block + 1}"
                x = BasicBlock(features, stride, self.shortcut, name=name)(x, normalize)
        return _output(jnp.mean(x, (1, 2)), self.classes)


class WideResNet(nn.Module):
    """A stem, three stages of pre-activation blocks, normalisation, the mean, a linear output.

    Called as `ResNet` is. Stages have 16, 32 and 64 channels times `widening`; a shortcut between
    different shapes is a 1x1 convolution without normalisation.

    Raises:
      ValueError, TypeError: for other sizes or an unknown `norm`, or images of another shape.
    """

    blocks: int
    widening: int
    classes: int | None = 10
    norm: str = "batch"
    axis_name: str | None = None

    def __post_init__(self) -> None:
        check_integer("blocks", self.blocks, low=1)
        check_integer("widening", self.widening, low=1)
        _check(self.classes, self.norm)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        _check_images(x)
        normalize = _normalization(self.norm, self.axis_name, train, mask)
        x = Convolution(16, name="stem")(x)
        for stage, features in enumerate((16, 32, 64)):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage + 1}_block{block + 1}"
                x = PreActivationBlock(self.widening * features, stride, name=name)(x, normalize)
        embedding = jnp.mean(nn.relu(normalize(x, "output_norm")), (1, 2))
        return _output(embedding, self.classes)


class BasicBlock(nn.Module):
    """Two normalised 3x3 convolutions added to a shortcut, then ReLU."""

    features: int
    stride: int
    shortcut: str

    @nn.compact
    def __call__(self, x: jax.Array, normalize: Normalize) -> jax.Array:
        y = Convolution(self.features, stride=self.stride, name="conv1")(x)
        y = Convolution(self.features, name="conv2")(nn.relu(normalize(y, "norm1")))
        y = normalize(y, "norm2")
        if x.shape != y.shape:
            if self.shortcut == "A":
                extra = self.features - x.shape[-1]
                x = jnp.pad(_subsample(x, self.stride), ((0, 0), (0, 0), (0, 0), (0, extra)))
            else:
                x = Convolution(self.features, 1, self.stride, name="shortcut")(x)
                x = normalize(x, "shortcut_norm")
        return nn.relu(y + x)


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each of normalised and rectified inputs, added to a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, normalize: Normalize) -> jax.Array:
        active = nn.relu(normalize(x, "norm1"))
        y = Convolution(self.features, stride=self.stride, name="conv1")(active)
        y = Convolution(self.features, name="conv2")(nn.relu(normalize(y, "norm2")))
        if x.shape != y.shape:
            x = Convolution(self.features, 1, self.stride, name="shortcut")(active)
        return x + y


class Convolution(nn.Module):
    """`convolve` with a kernel of He et al.'s normal initialisation; no bias."""

    features: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape, jnp.float32)
        x, kernel = nn.dtypes.promote_dtype(x, kernel)
        return convolve(x, kernel, self.stride)


def convolve(inputs: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Correlates images with 1x1 or 3x3 kernels; for 3x3 ones, with one row of zeros around images.

    At stride 2, windows are centred on pixels 0, 2, ..., as in `inputs[:, ::2, ::2]`. (XLA's padding
    "SAME" centres them on pixels 1, 3, ...)

    Args:
      inputs: [B, H, W, C] floats; H and W even for stride 2.
      kernel: [1, 1, C, N] or [3, 3, C, N] of the same dtype.
      stride: 1 or 2.

    Returns:
      [B, H / stride, W / stride, N].

    Raises:
      ValueError: for another stride, or shapes that do not fit.
    """
    _check_convolution(inputs, kernel, stride)
    if kernel.shape[0] == 1:
        return product_of_rows(_subsample(inputs, stride), kernel)
    if stride == 1:
        return conv3x3(inputs, kernel)
    return correlate(inputs, kernel, stride, padding=1, multiply=product_of_rows)


def _subsample(images: jax.Array, stride: int) -> jax.Array:
    return images[:, ::stride, ::stride]


def _output(embedding: jax.Array, classes: int | None) -> jax.Array:
    """The logits of an output layer, or the embedding where there is none."""
    return embedding if classes is None else nn.Dense(classes, name="output")(embedding)


def _normalization(
    norm: str, axis_name: str | None, train: bool, mask: jax.Array | None
) -> Normalize:
    """Returns (inputs, name) -> outputs, which makes a submodule of the calling module."""
    if norm == "batch":
        return lambda x, name: BatchNorm(axis_name=axis_name, name=name)(x, train=train, mask=mask)
    # The fast variance, mean square minus squared mean, loses the digits of float32.
    return lambda x, name: nn.GroupNorm(
        num_groups=2, epsilon=1e-5, use_fast_variance=False, name=name
    )(x)


def _check(classes: int | None, norm: str) -> None:
    if classes is not None:
        check_integer("classes", classes, low=2)
    if norm not in ("batch", "group"):
        raise ValueError(f"norm must be 'batch' or 'group', got {norm!r}")


def _check_images(x: jax.Array) -> None:
    if x.ndim != 4 or x.shape[1:] != (32, 32, 3):
        raise ValueError(f"x must be [B, 32, 32, 3], got {x.shape}")


def _check_convolution(inputs: jax.Array, kernel: jax.Array, stride: int) -> None:
    if stride not in (1, 2):
        raise ValueError(f"stride must be 1 or 2, got {stride!r}")
    if inputs.ndim != 4 or (stride == 2 and (inputs.shape[1] % 2 or inputs.shape[2] % 2)):
        raise ValueError(
            f"inputs must be [B, H, W, C], H and W even for stride 2, got {inputs.shape}"
        )
    channels = inputs.shape[-1]
    if kernel.shape[:-1] not in ((1, 1, channels), (3, 3, channels)):
        raise ValueError(
            f"kernel must be [1, 1, {channels}, N] or [3, 3, {channels}, N] for inputs "
            f"{inputs.shape}, got {kernel.shape}"
        )
