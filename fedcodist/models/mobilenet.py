"""MobileNetV2 (Sandler et al., https://arxiv.org/abs/1801.04381, table 2)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_number
from fedcodist.models.normalization import BatchNorm

# Table 2: expansion t, channels c, blocks n and the first block's stride s.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """A 3x3 stem at stride 2, inverted residuals, a 1x1 convolution, the mean, dropout, an output.

    3,504,872 parameters for 1,000 classes. Called with [B, H, W, C] floats, H and W multiples of 32,
    `train` and an optional mask [B] of real examples; returns logits [B, classes].

    Attributes:
      classes: width of the outputs. With None there is no output layer; [B, 1280] is returned.
      dropout: rate before the output, in [0, 1), as PyTorch's torchvision has it.
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

        def layer(
            x: jax.Array, features: int, size: int, name: str, stride: int = 1, groups: int = 1
        ) -> jax.Array:
            """A convolution and its normalisation."""
            convolution = nn.Conv(
                features,
                (size, size),
                strides=stride,
                padding=size // 2,
                feature_group_count=groups,
                use_bias=False,
                kernel_init=nn.initializers.he_normal(),
                name=f"{name}_conv",
            )
            norm = BatchNorm(axis_name=self.axis_name, name=f"{name}_norm")
            return norm(convolution(x), train=train, mask=mask)

        x = nn.relu6(layer(x, 32, 3, "stem", stride=2))
        for stage, (expansion, features, blocks, first_stride) in enumerate(STAGES, start=1):
            for block in range(blocks):
                name, stride = f"stage{stage}_block{block + 1}", 1 if block else first_stride
                y, inner = x, expansion * x.shape[-1]
                if expansion > 1:
                    y = nn.relu6(layer(y, inner, 1, f"{name}_expand"))
                y = nn.relu6(layer(y, inner, 3, f"{name}_depthwise", stride, groups=inner))
                y = layer(y, features, 1, f"{name}_project")
                x = x + y if x.shape == y.shape else y
        x = jnp.mean(nn.relu6(layer(x, 1280, 1, "last")), (1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return x if self.classes is None else nn.Dense(self.classes, name="output")(x)
