"""The codistillation paper's small and large convolutional networks for 100-way image classes."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_integers, check_several
from fedcodist.models import convolution

Initializer = Callable[..., jax.Array]
# Haiku's default for kernels, in which FedJAX builds its networks: the normal distribution of deviation
# 1 / sqrt(fan_in), cut off at two deviations. Flax's lecun_normal is 1.137 times as wide.
HAIKU_KERNELS: Initializer = nn.initializers.variance_scaling(
    0.87962566103423978**2, "fan_in", "truncated_normal"
)


def small_cnn(*, input_size: int = 24, classes: int = 100, **options: Any) -> "CNN":
    """The small network: 109,348 parameters for 100 classes, with either input size.

    Args:
      input_size: 24 or 32.
      classes: width of the outputs.
      options: `dropout` and `kernel_init`, see `CNN`.
    """
    return CNN((16, 32, 32), (64, 128), classes, input_size, **options)


def large_cnn(*, input_size: int = 24, classes: int = 100, **options: Any) -> "CNN":
    """The large network: 410,084 parameters for 100 classes, with either input size.

    Args:
      input_size: 24 or 32.
      classes: width of the outputs.
      options: `dropout` and `kernel_init`, see `CNN`.
    """
    return CNN((32, 64, 64), (128, 256), classes, input_size, **options)


class CNN(nn.Module):
    """Three 3x3 convolutions, hidden dense layers and a linear output, with ReLU between.

    With `input_size` 24 the convolutions are padded and the first two are max-pooled
    (24 -> 12 -> 6 -> 6). With 32 they are not padded and the last two are pooled
    (32 -> 30 -> 28 -> 14 -> 12 -> 6). Called with [B, input_size, input_size, channels] floats; returns
    logits [B, classes]. With classes None there is no output layer; the embedding [B, last hidden] is
    returned.

    Attributes:
      filters: features of the convolutions.
      hidden: units of the dense layers before the output.
      classes: width of the outputs, or None.
      input_size: 24 or 32.
      dropout: the rates after flattening and after the first dense layer. The paper names none; those
        of FedJAX's CNN for EMNIST are (0.25, 0.5).
      kernel_init: of all kernels; `HAIKU_KERNELS` for those that FedJAX starts with.

    Raises:
      ValueError, TypeError: sizes are no integers or too small, `input_size` is neither 24 nor 32,
        `dropout` is not two rates in [0, 1), or the images have another size.
    """

    filters: Sequence[int]
    hidden: Sequence[int]
    classes: int | None = 100
    input_size: int = 24
    dropout: tuple[float, float] = (0.0, 0.0)
    kernel_init: Initializer = nn.initializers.lecun_normal()

    def __post_init__(self) -> None:
        if self.input_size not in (24, 32):
            raise ValueError(f"input_size must be 24 or 32, got {self.input_size!r}")
        if self.classes is not None:
            check_integer("classes", self.classes, low=2)
        check_integers("filters", self.filters, low=1)
        check_integers("hidden", self.hidden, low=1)
        check_several("dropout", self.dropout)
        if len(self.dropout) != 2 or not all(0 <= rate < 1 for rate in self.dropout):
            raise ValueError(f"dropout must be two rates in [0, 1), got {self.dropout!r}")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if x.ndim != 4 or x.shape[1:3] != (self.input_size, self.input_size):
            raise ValueError(
                f"x must be [B, {self.input_size}, {self.input_size}, channels], got {x.shape}"
            )
        padding: convolution.Padding = "SAME" if self.input_size == 24 else "VALID"
        pooled = (0, 1) if self.input_size == 24 else (1, 2)
        for layer, features in enumerate(self.filters):
            x = ConvolutionAndRelu(
                features, padding, layer in pooled, self.kernel_init, name=f"conv{layer + 1}"
            )(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(self.dropout[0], deterministic=not train)(x)
        for layer, features in enumerate(self.hidden):
            dense = nn.Dense(features, kernel_init=self.kernel_init, name=f"dense{layer + 1}")
            x = nn.relu(dense(x))
            if layer == 0:
                x = nn.Dropout(self.dropout[1], deterministic=not train)(x)
        if self.classes is None:
            return x
        return nn.Dense(self.classes, kernel_init=self.kernel_init, name="output")(x)


class ConvolutionAndRelu(nn.Module):
    """A 3x3 convolution with bias, ReLU and, where `pooled`, 2x2 max-pooling.

    Parameters are those of `flax.linen.Conv`. Bias and ReLU keep the order of values, so they can come
    after the pooling, on a quarter of the values. This saves 6 % of a round of the large network.
    """

    features: int
    padding: convolution.Padding = "SAME"
    pooled: bool = False
    kernel_init: Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel",
            self.kernel_init,
            (3, 3, x.shape[-1], self.features),
            jnp.float32,
        )
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        x = convolution.conv3x3(x, kernel, self.padding)
        if self.pooled:
            x = convolution.max_pool_2x2(x)
        return nn.relu(x + bias)
