"""The convolutional network of the federated EMNIST benchmarks."""

import flax.linen as nn
import jax

from fedcodist.core.checks import check_integer, check_several
from fedcodist.models.cnn import ConvolutionAndRelu


def emnist_cnn(*, classes: int = 62, dropout: tuple[float, float] = (0.25, 0.5)) -> "EMNISTCNN":
    """The network of Reddi et al., arXiv 2003.00295: 1,206,590 parameters for 62 classes."""
    return EMNISTCNN(classes=classes, dropout=dropout)


class EMNISTCNN(nn.Module):
    """Two unpadded 3x3 convolutions, 2x2 max-pooling, a dense layer of 128 and a linear output.

    ReLU follows each layer but the last; 28 -> 26 -> 24 -> 12. Called with [B, 28, 28, 1] floats and
    `train`; returns logits [B, classes]. In training, values are dropped with the key "dropout".

    Attributes:
      classes: width of the outputs.
      dropout: rates after the pooling and after the dense layer, in [0, 1).

    Raises:
      ValueError, TypeError: for other values, or images of another shape.
    """

    classes: int = 62
    dropout: tuple[float, float] = (0.25, 0.5)

    def __post_init__(self) -> None:
        check_integer("classes", self.classes, low=2)
        check_several("dropout", self.dropout)
        if len(self.dropout) != 2 or not all(0 <= rate < 1 for rate in self.dropout):
            raise ValueError(f"dropout must be two rates in [0, 1), got {self.dropout!r}")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        if x.ndim != 4 or x.shape[1:] != (28, 28, 1):
            raise ValueError(f"x must be [B, 28, 28, 1], got {x.shape}")
        x = ConvolutionAndRelu(32, "VALID", name="conv1")(x)
        x = ConvolutionAndRelu(64, "VALID", pooled=True, name="conv2")(x)
        x = nn.Dropout(self.dropout[0], deterministic=not train)(x)
        x = nn.relu(nn.Dense(128, name="dense1")(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(self.dropout[1], deterministic=not train)(x)
        return nn.Dense(self.classes, name="output")(x)
