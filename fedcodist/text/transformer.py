"""Small decoder-only transformers, about as large as the codistillation paper's LSTMs."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer
from fedcodist.core.readout import Readout
from fedcodist.text.lstm import VOCABULARY
from fedcodist.text.next_token import position_weights


def small_transformer(vocabulary: int = VOCABULARY) -> "Transformer":
    """Four blocks of width 128: 2,083,860 parameters for 10,004 tokens, 5 % above the small LSTM."""
    return Transformer(vocabulary, width=128, heads=4, blocks=4)


def large_transformer(vocabulary: int = VOCABULARY) -> "Transformer":
    """Four blocks of width 208: 4,178,740 parameters for 10,004 tokens, 2 % below the large LSTM."""
    return Transformer(vocabulary, width=208, heads=4, blocks=4)


class Transformer(nn.Module):
    """Blocks of causal attention and a GELU layer of four times the width, normalised before each.

    Positions are rotations of queries and keys (Su et al., 2021, https://arxiv.org/abs/2104.09864), so
    sentences longer than those in training can be read. The output layer shares the embedding's kernel.
    Called with tokens int [B, T], padded at the end; returns a `Readout` of [B, T, width].

    Raises:
      ValueError: names a size that is below 1; `width` is no multiple of 2 `heads`.
    """

    vocabulary: int
    width: int
    heads: int
    blocks: int

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "blocks"):
            check_integer(name, getattr(self, name), low=1)
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 heads = {2 * self.heads}, got {self.width!r}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Readout:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got {tokens.shape}")
        draw = nn.initializers.normal(0.02)
        embedding = self.param("embedding", draw, (self.vocabulary, self.width))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.vocabulary,))
        x = embedding[tokens]
        for block in range(self.blocks):
            x = Block(self.heads, name=f"block{block + 1}")(x)
        x = nn.LayerNorm(name="norm")(x)
        return Readout(x, embedding.T, bias, position_weights(tokens))


class Block(nn.Module):
    """Attention to earlier positions, then two dense layers, both with residual connections."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        split = nn.Dense(3 * width, name="queries_keys_values")(nn.LayerNorm(name="norm1")(x))
        split = split.reshape(*x.shape[:2], 3, self.heads, width // self.heads)
        queries, keys, values = (split[:, :, part] for part in range(3))
        seen = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
        x += nn.Dense(width, name="attention_output")(seen.reshape(x.shape))
        inner = nn.gelu(nn.Dense(4 * width, name="dense1")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(width, name="dense2")(inner)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates pairs of features [B, T, heads, features] by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cosine, sine = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
