"""GoogLeNet (Szegedy et al., https://arxiv.org/abs/1409.4842, table 1) with batch normalisation.

As in PyTorch's torchvision, layers are normalised, there are no auxiliary outputs, and the branches that
have 5x5 kernels in the paper have 3x3 ones.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_number
from fedcodist.models.normalization import BatchNorm

# Table 1: channels of 1x1; of 1x1 before 3x3, and 3x3; of 1x1 before 5x5, and 5x5; of 1x1 after a pool.
# None is a max-pooling at stride 2 between.
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "pool3": None,
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "pool4": None,
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class GoogLeNet(nn.Module):
    """A stem, nine inceptions, the mean, dropout, an output.

    6,624,904 parameters for 1,000 classes. Called with [B, H, W, C] floats, H and W multiples of 32,
    `train` and an optional mask [B] of real examples; returns logits [B, classes].

    Attributes:
      classes: width of the outputs. With None there is no output layer; [B, 1024] is returned.
      dropout: rate before the output, in [0, 1), as torchvision has it.
      axis_name: mesh axis whose devices share one batch, or None.

    Raises:
      ValueError, TypeError: for other sizes or rates, or images of another shape.
    """

    classes: int | None = 1000
    dropout: float = 0.2
    axis_name: str | None = None

    def __post_init__(self) -> None:
        if self.classes is not None:
            check_integer("classes", self.classes, low=2)
        check_number("dropout", self.dropout, low=0, below=1)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        if x.ndim != 4 or x.shape[1] % 32 or x.shape[2] % 32:
            raise ValueError(f"x must be [B, H, W, C], H and W multiples of 32, got {x.shape}")

        def layer(x: jax.Array, features: int, size: int, name: str, stride: int = 1) -> jax.Array:
            """A convolution, its normalisation and ReLU."""
            convolution = nn.Conv(
                features,
                (size, size),
                strides=stride,
                padding=size // 2,
                use_bias=False,
                kernel_init=nn.initializers.he_normal(),
                name=f"{name}_conv",
            )
            norm = BatchNorm(epsilon=1e-3, axis_name=self.axis_name, name=f"{name}_norm")
            return nn.relu(norm(convolution(x), train=train, mask=mask))

        def inception(x: jax.Array, name: str, widths: Sequence[int]) -> jax.Array:
            one, before3, three, before5, five, after_pool = widths
            pooled = nn.max_pool(x, (3, 3), (1, 1), ((1, 1), (1, 1)))
            branches = (
                layer(x, one, 1, f"{name}_branch1"),
                layer(layer(x, before3, 1, f"{name}_branch2a"), three, 3, f"{name}_branch2b"),
                layer(layer(x, before5, 1, f"{name}_branch3a"), five, 3, f"{name}_branch3b"),
                layer(pooled, after_pool, 1, f"{name}_branch4"),
            )
            return jnp.concatenate(branches, axis=-1)

        x = halved(layer(x, 64, 7, "conv1", stride=2), 3)
        x = halved(layer(layer(x, 64, 1, "conv2"), 192, 3, "conv3"), 3)
        for name, widths in INCEPTIONS.items():
            if widths is None:
                x = halved(x, 3 if name == "pool3" else 2)
            else:
                x = inception(x, f"inception{name}", widths)
        x = jnp.mean(x, (1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return x if self.classes is None else nn.Dense(self.classes, name="output")(x)


def halved(x: jax.Array, size: int) -> jax.Array:
    """The maximum of windows at stride 2, the last of which may reach over the edge; H and W even."""
    return nn.max_pool(x, (size, size), (2, 2), ((0, size - 2), (0, size - 2)))
