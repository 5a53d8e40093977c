"""Encoders of one layer: convolution, LSTM, self-attention (Wu et al. 2022, table 5).

https://arxiv.org/abs/2108.13323. They are called as `bert.Encoder`, have its embeddings and return
`Encoded`, so they can be trained in the place of its layers, and also as students of FedKD.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer
from fedcodist.text.bert import PAD, Embeddings, Encoded, attend, check_tokens, dense
from fedcodist.text.lstm import LSTM

_DRAW = nn.initializers.lecun_normal()  # BERT's draws are for deep encoders


class ConvolutionEncoder(nn.Module):
    """A convolution over windows of tokens, with ReLU. Padding counts as zeros.

    Attributes:
      vocabulary, width, positions, types: of the embeddings, see `bert.Encoder`.
      features: number of the convolution's outputs.
      window: number of tokens that an output reads, an odd number.

    Raises:
      ValueError, TypeError: a size below 1, or an even window.
    """

    vocabulary: int
    width: int
    features: int = 256
    window: int = 3
    positions: int = 512
    types: int = 2

    def __post_init__(self) -> None:
        _check_sizes(self, "features", "window")
        if self.window % 2 == 0:
            raise ValueError(f"window must be odd, got {self.window!r}.")
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> Encoded:
        x, is_real = _embedded(self, tokens)
        x = jnp.where(is_real[..., None], x, 0)
        side = self.window // 2
        wide = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
        # A product with the windows' tokens side by side: convolutions are slow in loops on XLA:CPU.
        length = x.shape[1]
        windows = [wide[:, first : first + length] for first in range(self.window)]
        states = nn.relu(
            dense("convolution", self.features, jnp.concatenate(windows, axis=-1), _DRAW)
        )
        return Encoded(is_real, (states,), ())


class LSTMEncoder(nn.Module):
    """Long short-term memory from the first token to the last.

    Attributes:
      vocabulary, width, positions, types: of the embeddings, see `bert.Encoder`.
      hidden: units.

    Raises:
      ValueError, TypeError: a size below 1.
    """

    vocabulary: int
    width: int
    hidden: int = 256
    positions: int = 512
    types: int = 2

    def __post_init__(self) -> None:
        _check_sizes(self, "hidden")
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> Encoded:
        x, is_real = _embedded(self, tokens)
        return Encoded(is_real, (LSTM(self.hidden, name="lstm")(x),), ())


class SelfAttentionEncoder(nn.Module):
    """Attention of several heads to all real tokens, and nothing else.

    Attributes:
      vocabulary, width, positions, types: of the embeddings, see `bert.Encoder`.
      heads: number of heads.
      head_width: width of a head's outputs, which stand side by side.

    Raises:
      ValueError, TypeError: a size below 1.
    """

    vocabulary: int
    width: int
    heads: int = 16
    head_width: int = 16
    positions: int = 512
    types: int = 2

    def __post_init__(self) -> None:
        _check_sizes(self, "heads", "head_width")
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> Encoded:
        x, is_real = _embedded(self, tokens)
        split = (*x.shape[:2], self.heads, self.head_width)
        queries, keys, values = (
            dense(name, self.heads * self.head_width, x, _DRAW).reshape(split)
            for name in ("query", "key", "value")
        )
        seen, shares = attend(queries, keys, values, is_real)
        return Encoded(is_real, (seen,), (shares,))


def _check_sizes(encoder: nn.Module, *own: str) -> None:
    for name in ("vocabulary", "width", *own, "positions", "types"):
        check_integer(name, getattr(encoder, name), low=1)


def _embedded(
    encoder: ConvolutionEncoder | LSTMEncoder | SelfAttentionEncoder, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The embeddings of tokens [batch, length], and which tokens are real; call it within a module."""
    check_tokens(tokens, encoder.positions)
    sizes = (encoder.vocabulary, encoder.positions, encoder.types)
    return Embeddings(sizes, encoder.width, name="embeddings")(tokens, None), tokens != PAD
