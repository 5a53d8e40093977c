"""Small networks for scikit-learn's handwritten digits: 8x8x1 images, 10 classes."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedcodist.core.checks import check_integer, check_integers
from fedcodist.models.normalization import BatchNorm


def small_digits() -> "MLP":
    """64-32-10: 2,410 parameters."""
    return MLP(hidden=(32,))


def large_digits() -> "MLP":
    """64-128-64-10: 17,226 parameters, 7.1 times the small network's."""
    return MLP(hidden=(128, 64))


class MLP(nn.Module):
    """Dense layers with ReLU between. Called with [B, ...] floats; returns logits [B, classes].

    With classes None there is no output layer; the embedding [B, last hidden] is returned.

    Raises:
      ValueError, TypeError: sizes are no integers or too small.
    """

    hidden: Sequence[int]
    classes: int | None = 10

    def __post_init__(self) -> None:
        _check_sizes(self.hidden, self.classes)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for features in self.hidden:
            x = nn.relu(nn.Dense(features)(x))
        return x if self.classes is None else nn.Dense(self.classes)(x)


class BatchNormMLP(nn.Module):
    """Dense layers, each followed by batch normalisation and ReLU.

    Called with [B, ...] floats, `train` and an optional mask [B] of real examples. Returns logits [B,
    classes], or with classes None the embedding [B, last hidden]. With `axis_name` the batch is the
    union over that axis's devices.

    Raises:
      ValueError, TypeError: sizes are no integers or too small.
    """

    hidden: Sequence[int] = (32,)
    classes: int | None = 10
    axis_name: str | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.hidden, self.classes)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for features in self.hidden:
            x = nn.Dense(features)(x)
            x = nn.relu(BatchNorm(axis_name=self.axis_name)(x, train=train, mask=mask))
        return x if self.classes is None else nn.Dense(self.classes)(x)


def _check_sizes(hidden: Sequence[int], classes: int | None) -> None:
    check_integers("hidden", hidden, low=1)
    if classes is not None:
        check_integer("classes", classes, low=1)  # one logit or one number may be enough
