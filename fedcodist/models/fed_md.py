"""FedMD's networks (Li and Wang, 2019): two to four convolutions, ten shapes for ten parties.

https://arxiv.org/abs/1910.03581. Layers are those of Keras, as in the released code: batch normalisation
with momentum 0.99 and epsilon 1e-3, Glorot's uniform initialisation, an output layer without bias.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_number, check_several
from fedcodist.models.convolution import conv3x3
from fedcodist.models.correlation import correlate, product_with_fast_gradient
from fedcodist.models.hashed_dropout import relu_and_dropout
from fedcodist.models.headed import HEAD
from fedcodist.models.normalization import BatchNorm, BatchNormOfMoments
from fedcodist.models.normalized_product import normalized_convolution

PyTree = Any
_MOMENTUM, _EPSILON = 0.99, 1e-3  # Keras'


class Shape(NamedTuple):
    """One party's network: features of its convolutions, two to four, and the dropout rate."""

    widths: tuple[int, ...]
    dropout: float


# The paper's table 1, which the released code uses for CIFAR too.
TABLE_1 = (
    Shape((128, 256), 0.2),
    Shape((128, 384), 0.2),
    Shape((128, 512), 0.2),
    Shape((256, 256), 0.3),
    Shape((256, 512), 0.4),
    Shape((64, 128, 256), 0.2),
    Shape((64, 128, 192), 0.2),
    Shape((128, 192, 256), 0.2),
    Shape((128, 128, 128), 0.3),
    Shape((128, 128, 192), 0.3),
)
# Table 2, the paper's list for CIFAR. Only the numbers of its models are those of table 1.
TABLE_2 = (
    Shape((128, 256), 0.2),
    Shape((128, 128, 192), 0.2),
    Shape((64, 64, 64), 0.2),
    Shape((128, 64, 64), 0.3),
    Shape((64, 64, 128), 0.4),
    Shape((64, 128, 256), 0.2),
    Shape((64, 128, 192), 0.2),
    Shape((128, 192, 256), 0.2),
    Shape((128, 128, 128), 0.3),
    Shape((64, 64, 64, 64), 0.2),
)


def narrower(shapes: Sequence[Shape], divisor: int) -> tuple[Shape, ...]:
    """The same networks with narrower layers, for experiments on a smaller machine.

    Raises:
      ValueError, TypeError: a divisor that is no integer of at least 1, or leaves a layer no features.
    """
    check_integer("divisor", divisor, low=1)
    least = min((width for shape in shapes for width in shape.widths), default=divisor)
    if divisor > max(1, least):
        raise ValueError(
            f"divisor must be at most {least}, the features of the narrowest layer, got {divisor}."
        )
    return tuple(Shape(tuple(w // divisor for w in s.widths), s.dropout) for s in shapes)


class FedMDNetwork(nn.Module):
    """Blocks of convolution, batch normalisation, ReLU and dropout, then a linear output.

    Called with [B, H, W, C] numbers, `train` and an optional mask [B] of real examples; returns logits
    [B, classes]. The number of widths decides the blocks:

    2. 3x3, mean of 2x2 at stride 1; 3x3 at stride 2.
    3. 3x3, mean of 2x2 at stride 1; 2x2 at stride 2, mean of 2x2 at stride 2; 3x3 at stride 2.
    4. as 3, then 3x3. (The paper names this one in table 2 and gives no more.)

    Layers at stride 1 keep the image's size; layers at stride 2 use whole windows only.

    Attributes:
      widths: features of the convolutions, two to four.
      dropout: share of features that are set to zero in training, in [0, 1).
      classes: width of the outputs, public and private classes together. With None there is no output
        layer; its flat input is returned.

    Raises:
      ValueError, TypeError: for other widths or rates, or images that are too small for the layers.
    """

    widths: Sequence[int]
    dropout: float = 0.2
    classes: int | None = 16

    def __post_init__(self) -> None:
        check_several("widths", self.widths)
        if not 2 <= len(self.widths) <= 4:
            raise ValueError(f"widths must be two to four positive numbers, got {self.widths!r}")
        for layer, width in enumerate(self.widths):
            check_integer(f"widths[{layer}]", width, low=1)
        check_number("dropout", self.dropout, low=0, below=1)
        if self.classes is not None:
            check_integer("classes", self.classes, low=2)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        smallest = 3 if len(self.widths) == 2 else 12
        if x.ndim != 4 or min(x.shape[1:3]) < smallest:
            raise ValueError(
                f"x must be [B, H, W, C] with H, W >= {smallest} for widths {tuple(self.widths)}, "
                f"got {x.shape}"
            )

        def activated(x: jax.Array) -> jax.Array:
            if not train or not self.dropout:
                return nn.relu(x)
            return relu_and_dropout(x, self.dropout, self.make_rng("dropout"))

        def block(x: jax.Array, index: int, size: int, stride: int) -> jax.Array:
            kernel, bias = _Kernel(self.widths[index], size, name=f"conv{index + 1}")(x)
            x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
            if stride == 1:
                x = conv3x3(x, kernel) + bias
            else:
                x = correlate(x, kernel, stride, multiply=product_with_fast_gradient) + bias
            norm = BatchNorm(momentum=_MOMENTUM, epsilon=_EPSILON, name=f"norm{index + 1}")
            return activated(norm(x, train=train, mask=mask))

        def first_block(x: jax.Array) -> jax.Array:
            """As `block`, of images, whose windows have few numbers."""
            kernel, bias = _Kernel(self.widths[0], 3, name="conv1")(x)
            norm = BatchNormOfMoments(momentum=_MOMENTUM, epsilon=_EPSILON, name="norm1")
            return activated(normalized_convolution(x, kernel, bias, norm, train, mask))

        x = first_block(x)
        # As in Keras, the last row and column have means of fewer pixels.
        x = nn.avg_pool(x, (2, 2), (1, 1), "SAME", count_include_pad=False)
        if len(self.widths) == 2:
            x = block(x, 1, size=3, stride=2)
        else:
            x = mean_pool_stride_2(block(x, 1, size=2, stride=2))
            x = block(x, 2, size=3, stride=2)
        if len(self.widths) == 4:
            x = block(x, 3, size=3, stride=1)
        x = x.reshape(x.shape[0], -1)
        return x if self.classes is None else _output(self.classes)(x)


class FullyConnected(nn.Module):
    """Two dense layers: the weak party of the paper's experiment on unequal parties.

    Called with [B, ...] floats; returns logits [B, classes], or with classes None the hidden layer.
    """

    hidden: int = 64
    classes: int | None = 16

    def __post_init__(self) -> None:
        check_integer("hidden", self.hidden, low=1)
        if self.classes is not None:
            check_integer("classes", self.classes, low=2)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        hidden = nn.Dense(self.hidden, kernel_init=nn.initializers.glorot_uniform(), name="hidden")
        x = nn.relu(hidden(x))
        return x if self.classes is None else _output(self.classes)(x)


def output_penalty(weight: float = 1e-3) -> Callable[[PyTree, PyTree], PyTree]:
    """A gradient hook for weight decay: weight times the sum of squares of the output layer's kernel.

    Keras' l2 has no factor one half. The released code has it in every phase, the digest included.
    """

    def add(gradient: PyTree, params: PyTree) -> PyTree:
        output = HEAD if HEAD in params else "output"
        if output not in params:
            raise ValueError(
                "output_penalty (in a config, algorithm.output_penalty) must be 0 for a network without "
                f"a layer 'output' or {HEAD!r}, got one with {sorted(params)}."
            )
        kernel = gradient[output]["kernel"] + 2 * weight * params[output]["kernel"]
        return {**gradient, output: {**gradient[output], "kernel": kernel}}

    return add


def mean_pool_stride_2(inputs: jax.Array) -> jax.Array:
    """The mean of each 2x2 window at stride 2; an odd last row or column is dropped."""
    batch, height, width, channels = inputs.shape
    whole = inputs[:, : height // 2 * 2, : width // 2 * 2]
    return whole.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


class _Kernel(nn.Module):
    """A convolution's kernel [size, size, channels of x, features] and bias [features]."""

    features: int
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.glorot_uniform(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        return kernel, bias


def _output(classes: int) -> nn.Dense:
    initializer = nn.initializers.glorot_uniform()
    return nn.Dense(classes, use_bias=False, kernel_init=initializer, name="output")
