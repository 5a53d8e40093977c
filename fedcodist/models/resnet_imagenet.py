"""ResNet-18 and ResNet-34 for ImageNet's image sizes (He et al., arXiv 1512.03385, table 1)."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.models.normalization import BatchNorm
from fedcodist.models.resnet import BasicBlock


def resnet18(*, classes: int | None = 1000) -> "ImageNetResNet":
    """ResNet-18: 11,689,512 parameters for 1,000 classes."""
    return ImageNetResNet(blocks=(2, 2, 2, 2), classes=classes)


def resnet34(*, classes: int | None = 1000) -> "ImageNetResNet":
    """ResNet-34: 21,797,672 parameters for 1,000 classes."""
    return ImageNetResNet(blocks=(3, 4, 6, 3), classes=classes)


class ImageNetResNet(nn.Module):
    """A 7x7 stem and max-pooling at stride 2 each, four stages of basic blocks, the mean, an output.

    Stages have 64, 128, 256 and 512 channels. Where a stage reduces the image, its shortcut is a
    normalised 1x1 convolution. Called with [B, H, W, C] floats, H and W multiples of 32, `train` and an
    optional mask [B] of real examples; returns logits [B, classes].

    Attributes:
      blocks: basic blocks of each stage.
      classes: width of the outputs. With None there is no output layer; the mean [B, 512] is returned.
      axis_name: mesh axis whose devices share one batch, or None.

    Raises:
      ValueError: for images of another shape.
    """

    blocks: Sequence[int]
    classes: int | None = 1000
    axis_name: str | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        if x.ndim != 4 or x.shape[1] % 32 or x.shape[2] % 32:
            raise ValueError(f"x must be [B, H, W, C], H and W multiples of 32, got {x.shape}")

        def normalize(x, name):
            return BatchNorm(axis_name=self.axis_name, name=name)(x, train=train, mask=mask)

        stem = nn.Conv(
            64,
            (7, 7),
            strides=2,
            padding=3,
            use_bias=False,
            kernel_init=nn.initializers.he_normal(),
            name="stem",
        )
        x = nn.relu(normalize(stem(x), "stem_norm"))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage + 1}_block{block + 1}"
                x = BasicBlock(64 * 2**stage, stride, "B", name=name)(x, normalize)
        x = jnp.mean(x, (1, 2))
        return x if self.classes is None else nn.Dense(self.classes, name="output")(x)
