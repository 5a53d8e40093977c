"""The codistillation paper's small and large convolutional networks for 100-way image classes."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.models import convolution


def small_cnn(*, input_size: int = 24, classes: int = 100) -> "CNN":
    """The small network: 109,348 parameters for 100 classes, with either input size."""
    return CNN(filters=(16, 32, 32), hidden=(64, 128), classes=classes, input_size=input_size)


def large_cnn(*, input_size: int = 24, classes: int = 100) -> "CNN":
    """The large network: 410,084 parameters for 100 classes, with either input size."""
    return CNN(filters=(32, 64, 64), hidden=(128, 256), classes=classes, input_size=input_size)


class CNN(nn.Module):
    """Three 3x3 convolutions, hidden dense layers and a linear output, with ReLU between.

    With `input_size` 24 the convolutions are padded and the first two are max-pooled
    (24 -> 12 -> 6 -> 6). With 32 they are not padded and the last two are pooled
    (32 -> 30 -> 28 -> 14 -> 12 -> 6). Called with [B, input_size, input_size, channels] floats; returns
    logits [B, classes]. With classes None there is no output layer; the embedding [B, last hidden] is
    returned.

    Raises:
      ValueError: `input_size` is neither 24 nor 32, or the images have another size.
    """

    filters: Sequence[int]
    hidden: Sequence[int]
    classes: int | None = 100
    input_size: int = 24

    def __post_init__(self) -> None:
        if self.input_size not in (24, 32):
            raise ValueError(f"input_size must be 24 or 32, got {self.input_size!r}")
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes!r}")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim != 4 or x.shape[1:3] != (self.input_size, self.input_size):
            raise ValueError(
                f"x must be [B, {self.input_size}, {self.input_size}, channels], got {x.shape}"
            )
        padding: convolution.Padding = "SAME" if self.input_size == 24 else "VALID"
        pooled = (0, 1) if self.input_size == 24 else (1, 2)
        for layer, features in enumerate(self.filters):
            x = ConvolutionAndRelu(features, padding, layer in pooled, name=f"conv{layer + 1}")(x)
        x = x.reshape(x.shape[0], -1)
        for layer, features in enumerate(self.hidden):
            x = nn.relu(nn.Dense(features, name=f"dense{layer + 1}")(x))
        return x if self.classes is None else nn.Dense(self.classes, name="output")(x)


class ConvolutionAndRelu(nn.Module):
    """A 3x3 convolution with bias, ReLU and, where `pooled`, 2x2 max-pooling.

    Parameters are those of `flax.linen.Conv`. Bias and ReLU keep the order of values, so they can come
    after the pooling, on a quarter of the values. This saves 6 % of a round of the large network.
    """

    features: int
    padding: convolution.Padding = "SAME"
    pooled: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel",
            nn.initializers.lecun_normal(),
            (3, 3, x.shape[-1], self.features),
            jnp.float32,
        )
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        x = convolution.conv3x3(x, kernel, self.padding)
        if self.pooled:
            x = convolution.max_pool_2x2(x)
        return nn.relu(x + bias)
