"""ResNets for ImageNet's image sizes (He et al., arXiv 1512.03385, table 1).

In blocks of three convolutions the 3x3 one has the stride, as in PyTorch's torchvision. In the paper it
is the first 1x1 one.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_boolean, check_integer, check_integers
from fedcodist.models.correlation import correlate
from fedcodist.models.normalization import BatchNorm
from fedcodist.models.resnet import BasicBlock, Convolution, Normalize


def resnet18(*, classes: int | None = 1000) -> "ImageNetResNet":
    """ResNet-18: 11,689,512 parameters for 1,000 classes."""
    return ImageNetResNet(blocks=(2, 2, 2, 2), classes=classes)


def resnet34(*, classes: int | None = 1000) -> "ImageNetResNet":
    """ResNet-34: 21,797,672 parameters for 1,000 classes."""
    return ImageNetResNet(blocks=(3, 4, 6, 3), classes=classes)


class ImageNetResNet(nn.Module):
    """A 7x7 stem and max-pooling at stride 2 each, stages of blocks, the mean, an output.

    The paper has four stages, of 64, 128, 256 and 512 channels; the first of them make smaller networks.
    Where a stage changes the shape of its inputs, its shortcut is a normalised 1x1 convolution. Called
    with [B, H, W, C] floats, H and W multiples of 32, `train` and an optional mask [B] of real examples;
    returns logits [B, classes].

    Attributes:
      blocks: of each stage, at least 1.
      classes: width of the outputs. With None there is no output layer; the mean [B, channels of the
        last stage] is returned.
      bottleneck: whether blocks have three convolutions, 1x1, 3x3 and 1x1, the last of which has four
        times the channels. Basic blocks have two of 3x3.
      axis_name: mesh axis whose devices share one batch, or None.

    Raises:
      ValueError, TypeError: for other values, or images of another shape.
    """

    blocks: Sequence[int]
    classes: int | None = 1000
    bottleneck: bool = False
    axis_name: str | None = None

    def __post_init__(self) -> None:
        check_integers("blocks", self.blocks, low=1)
        if not len(self.blocks):
            raise ValueError("blocks must not be empty")
        if self.classes is not None:
            check_integer("classes", self.classes, low=2)
        check_boolean("bottleneck", self.bottleneck)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        if x.ndim != 4 or x.shape[1] % 32 or x.shape[2] % 32:
            raise ValueError(f"x must be [B, H, W, C], H and W multiples of 32, got {x.shape}")

        def normalize(x: jax.Array, name: str) -> jax.Array:
            return BatchNorm(axis_name=self.axis_name, name=name)(x, train=train, mask=mask)

        x = nn.relu(normalize(Stem(64, name="stem")(x), "stem_norm"))
        x = max_pool_3x3(x)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage + 1}_block{block + 1}"
                features = 64 * 2**stage
                if self.bottleneck:
                    x = BottleneckBlock(features, stride, name=name)(x, normalize)
                else:
                    x = BasicBlock(features, stride, "B", name=name)(x, normalize)
        x = jnp.mean(x, (1, 2))
        return x if self.classes is None else nn.Dense(self.classes, name="output")(x)


class Stem(nn.Module):
    """A 7x7 convolution at stride 2, with three rows of zeros around images; no bias."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (7, 7, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape, jnp.float32)
        x, kernel = nn.dtypes.promote_dtype(x, kernel)
        return correlate(x, kernel, stride=2, padding=3)


def max_pool_3x3(x: jax.Array) -> jax.Array:
    """The maximum of each 3x3 window around pixels 0, 2, ... of images [B, H, W, C]; H and W even.

    The stock operation's gradient is slow on a CPU. Where several pixels of a window have its maximum,
    the gradient is shared among them.
    """
    x = _of_three_rows(x).swapaxes(1, 2)
    return _of_three_rows(x).swapaxes(1, 2)


def _of_three_rows(x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    pairs = x.reshape(batch, height // 2, 2, width, channels)
    even, odd = pairs[:, :, 0], pairs[:, :, 1]
    above = jnp.pad(odd[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=-jnp.inf)
    return jnp.maximum(jnp.maximum(even, odd), above)


class BottleneckBlock(nn.Module):
    """Normalised convolutions 1x1, 3x3 and 1x1 added to a shortcut, then ReLU; 4 x features channels."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, normalize: Normalize) -> jax.Array:
        wide = 4 * self.features
        y = nn.relu(normalize(Convolution(self.features, 1, name="conv1")(x), "norm1"))
        y = Convolution(self.features, stride=self.stride, name="conv2")(y)
        y = Convolution(wide, 1, name="conv3")(nn.relu(normalize(y, "norm2")))
        y = normalize(y, "norm3")
        if x.shape != y.shape:
            x = normalize(Convolution(wide, 1, self.stride, name="shortcut")(x), "shortcut_norm")
        return nn.relu(y + x)
