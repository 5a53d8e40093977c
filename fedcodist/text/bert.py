"""BERT's encoder (Devlin et al., 2019), which returns hidden states and attention of every layer."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_number

PAD = 0
# The tables of the embeddings, by their names among the parameters.
TABLES = ("words", "positions", "types")

_draw = nn.initializers.truncated_normal(0.02)


class Encoded(NamedTuple):
    """The outputs of an encoder for tokens [batch, length]. Embeddings do not count as a layer.

    Attributes:
      is_real: bool [batch, length], False where tokens are padding.
      hidden: one [batch, length, width] per layer; the last is the encoder's output.
      attention: one [batch, heads, queries, keys] per layer, before dropout.
    """

    is_real: jax.Array
    hidden: tuple[jax.Array, ...]
    attention: tuple[jax.Array, ...]


def bert_base(vocabulary: int = 30_522, layers: int = 12) -> "Encoder":
    """Width 768, twelve heads: 108,891,648 parameters with twelve layers, 7,087,872 in each."""
    return Encoder(vocabulary, width=768, layers=layers, heads=12)


def bert_mini(vocabulary: int, layers: int = 4) -> "Encoder":
    """Width 256, four heads, 789,760 parameters a layer (Turc et al., 2019): small enough for a CPU."""
    return Encoder(vocabulary, width=256, layers=layers, heads=4)


class Encoder(nn.Module):
    """Embeddings, then layers of attention to all positions and a GELU layer, normalised after each.

    Called with tokens int [batch, length], 0 for padding, which is not attended to. Token types int
    [batch, length] are optional, 0 by default. Returns `Encoded`, where states of padding have no
    meaning. Dropout is on in training where there is a key.

    Attributes:
      vocabulary: number of tokens.
      width: width of hidden states, a multiple of `heads` where `head_width` is not given.
      layers: number of layers.
      heads: attention heads of each layer.
      positions: longest length.
      types: number of token types.
      dropout: rate, for attention, embeddings and what each layer adds.
      head_width: width of a head; `width` / `heads` where not given.
      inner_width: neurons of each layer's GELU layer; four times `width` where not given.

    Raises:
      ValueError, TypeError: sizes below 1; a rate outside of 0 to 1; a `width` that is no multiple of
        `heads` without a `head_width`; tokens of another rank, or too many of them.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    positions: int = 512
    types: int = 2
    dropout: float = 0.1
    head_width: int | None = None
    inner_width: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "positions", "types"):
            check_integer(name, getattr(self, name), low=1)
        for name in ("head_width", "inner_width"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low=1)
        check_number("dropout", self.dropout, low=0, high=1)
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads = {self.heads}, got {self.width!r}."
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, types: jax.Array | None = None, *, train: bool = False
    ) -> Encoded:
        check_tokens(tokens, self.positions)
        drop = nn.Dropout(self.dropout, deterministic=not (train and self.has_rng("dropout")))
        sizes = (self.vocabulary, self.positions, self.types)
        x = drop(Embeddings(sizes, self.width, name="embeddings")(tokens, types))
        is_real, hidden, attention = tokens != PAD, [], []
        head_width = self.head_width or self.width // self.heads
        widths = (self.heads, head_width, self.inner_width or 4 * self.width)
        for layer in range(self.layers):
            x, shares = Layer(*widths, name=f"layer{layer}")(x, is_real, drop)
            hidden.append(x)
            attention.append(shares)
        return Encoded(is_real, tuple(hidden), tuple(attention))


def check_tokens(tokens: jax.Array, positions: int) -> None:
    """Raises ValueError unless tokens are [batch, length] of at most so many positions."""
    if tokens.ndim != 2 or tokens.shape[1] > positions:
        raise ValueError(
            f"tokens must be [batch, length] of at most {positions} positions, "
            f"got {list(tokens.shape)}."
        )


class Embeddings(nn.Module):
    """The normalised sum of the embeddings of each token, its position and its type."""

    sizes: tuple[int, int, int]
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array, types: jax.Array | None) -> jax.Array:
        words, positions, kinds = (
            self.param(name, _draw, (size, self.width))
            for name, size in zip(TABLES, self.sizes, strict=True)
        )
        x = words[tokens] + positions[: tokens.shape[1]]
        return normalised("norm", x + (kinds[0] if types is None else kinds[types]))


class Layer(nn.Module):
    """Attention, then two dense layers, the first with `inner_width` neurons.

    Dropout, the residual connection and normalisation follow after both.
    """

    heads: int
    head_width: int
    inner_width: int

    @nn.compact
    def __call__(
        self, x: jax.Array, is_real: jax.Array, drop: nn.Dropout
    ) -> tuple[jax.Array, jax.Array]:
        width = x.shape[-1]
        of_heads = self.heads * self.head_width
        split = (*x.shape[:2], self.heads, self.head_width)
        queries, keys, values = (
            dense(name, of_heads, x).reshape(split) for name in ("query", "key", "value")
        )
        seen, shares = attend(queries, keys, values, is_real, drop)
        x = normalised("attention_norm", x + drop(dense("attention_output", width, seen)))
        inner = nn.gelu(dense("inner", self.inner_width, x), approximate=False)
        return normalised("norm", x + drop(dense("output", width, inner))), shares


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    is_real: jax.Array,
    drop: Callable[[jax.Array], jax.Array] = lambda shares: shares,
) -> tuple[jax.Array, jax.Array]:
    """Attention to real positions: (what is seen [batch, length, heads * width], the shares).

    Args:
      queries, keys, values: [batch, length, heads, width].
      is_real: bool [batch, length].
      drop: dropout of the shares [batch, heads, queries, keys], which are returned without it.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / queries.shape[-1] ** 0.5
    # A finite number: the softmax over padding alone must be finite.
    lowest = jnp.finfo(scores.dtype).min
    shares = jax.nn.softmax(jnp.where(is_real[:, None, None, :], scores, lowest))
    seen = jnp.einsum("bhqk,bkhd->bqhd", drop(shares), values)
    return seen.reshape(*seen.shape[:2], -1), shares


def dense(
    name: str, width: int, x: jax.Array, kernel_init: nn.initializers.Initializer = _draw
) -> jax.Array:
    """A dense layer, by default drawn as BERT's; call it within a module."""
    # Examples and positions become one axis: with two, the kernel's gradient is up to twice as slow on
    # XLA:CPU.
    rows = nn.Dense(width, kernel_init=kernel_init, name=name)(x.reshape(-1, x.shape[-1]))
    return rows.reshape(*x.shape[:-1], width)


def normalised(name: str, x: jax.Array) -> jax.Array:
    """BERT's layer normalisation; call it within a module."""
    return nn.LayerNorm(epsilon=1e-12, use_fast_variance=False, name=name)(x)
