"""BERT's encoder (Devlin et al., 2019), which shows hidden states and attention of every layer."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedcodist.client_training import OptimizerFactory
from fedcodist.model import Model, Variables

PyTree = Any
PAD = 0
# The tables of the embeddings, by their names among the parameters.
TABLES = ("words", "positions", "types")

_draw = nn.initializers.truncated_normal(0.02)


class Encoded(NamedTuple):
    """What an encoder makes of tokens [batch, length]; embeddings are no layer.

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
    """Width 256, four heads, 789,760 parameters a layer (Turc et al., 2019): trained on a CPU."""
    return Encoder(vocabulary, width=256, layers=layers, heads=4)


class Encoder(nn.Module):
    """Embeddings, then layers of attention to all positions and a GELU layer, normalised after each.

    Called with tokens int [batch, length], 0 for padding, which nothing attends to, and optionally
    their types int [batch, length], 0 where not given. Returns `Encoded`, whose states of padding
    mean nothing. Drops out in training where there is a key.

    Attributes:
      vocabulary: number of tokens.
      width: of hidden states, a multiple of `heads`.
      layers: their number.
      heads: of each layer's attention.
      positions: longest length.
      types: number of token types.
      dropout: share that is dropped, of attentions and of all that is added or embedded.

    Raises:
      ValueError: `width` is no multiple of `heads`; tokens of another rank, or too many of them.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    positions: int = 512
    types: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads = {self.heads}, got {self.width!r}."
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, types: jax.Array | None = None, *, train: bool = False
    ) -> Encoded:
        if tokens.ndim != 2 or tokens.shape[1] > self.positions:
            raise ValueError(
                f"tokens must be [batch, length] of at most {self.positions} positions, "
                f"got {list(tokens.shape)}."
            )
        drop = nn.Dropout(self.dropout, deterministic=not (train and self.has_rng("dropout")))
        sizes = (self.vocabulary, self.positions, self.types)
        x = drop(Embeddings(sizes, self.width, name="embeddings")(tokens, types))
        is_real, hidden, attention = tokens != PAD, [], []
        for layer in range(self.layers):
            x, shares = Layer(self.heads, name=f"layer{layer}")(x, is_real, drop)
            hidden.append(x)
            attention.append(shares)
        return Encoded(is_real, tuple(hidden), tuple(attention))


class Embeddings(nn.Module):
    """The sum of the tables' rows for each token, its position and its type, normalised."""

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
    """Attention, then two dense layers of which the first is four times as wide; each is dropped
    out, added to what it reads, and normalised."""

    heads: int

    @nn.compact
    def __call__(
        self, x: jax.Array, is_real: jax.Array, drop: nn.Dropout
    ) -> tuple[jax.Array, jax.Array]:
        width = x.shape[-1]
        split = (*x.shape[:2], self.heads, width // self.heads)
        queries, keys, values = (
            dense(name, width, x).reshape(split) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / split[-1] ** 0.5
        # Not minus infinity: of padding alone the softmax must be finite.
        lowest = jnp.finfo(scores.dtype).min
        shares = jax.nn.softmax(jnp.where(is_real[:, None, None, :], scores, lowest))
        seen = jnp.einsum("bhqk,bkhd->bqhd", drop(shares), values).reshape(x.shape)
        x = normalised("attention_norm", x + drop(dense("attention_output", width, seen)))
        inner = nn.gelu(dense("inner", 4 * width, x), approximate=False)
        return normalised("norm", x + drop(dense("output", width, inner))), shares


def dense(name: str, width: int, x: jax.Array) -> jax.Array:
    """A dense layer drawn as BERT's; call it within a module."""
    return nn.Dense(width, kernel_init=_draw, name=name)(x)


def normalised(name: str, x: jax.Array) -> jax.Array:
    """BERT's layer normalisation; call it within a module."""
    return nn.LayerNorm(epsilon=1e-12, use_fast_variance=False, name=name)(x)


def first_layers(params: PyTree, layers: int) -> PyTree:
    """An encoder's embeddings and its first layers: where FedKD's student starts.

    Raises:
      ValueError: one line; there are not that many layers.
    """
    names = [f"layer{layer}" for layer in range(layers)]
    if not 1 <= layers < len(params):
        raise ValueError(f"layers must be in 1..{len(params) - 1}, got {layers}.")
    return {name: params[name] for name in ("embeddings", *names)}


def with_encoder(model: Model, encoder: PyTree) -> Model:
    """The model, whose parameters 'encoder' start from given ones; the rest is drawn.

    Raises:
      ValueError: one line; the encoder's parameters are not of the model's names and shapes.
    """

    def init(key):
        params, mutable = model.init(key)
        return Variables({**params, "encoder": jax.tree.map(jnp.asarray, encoder)}, mutable)

    own = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0))).params["encoder"]
    expected, given = _shapes(own), _shapes(encoder)
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"encoder's parameter {name} must be {expected.get(name, 'absent')}, "
                f"got {given.get(name, 'none')}."
            )
    return model._replace(init=init)


def frozen_tables(factory: OptimizerFactory) -> OptimizerFactory:
    """An optimizer whose updates of embedding tables are 0, and which keeps no moments for them.

    The tables are those below 'embeddings', wherever that stands among the parameters; its
    normalisation is trained.
    """

    def label(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        return "frozen" if names[-2:-1] == ["embeddings"] and names[-1] in TABLES else "trained"

    def create(rate):
        parts = {"trained": factory(rate), "frozen": optax.set_to_zero()}
        labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
        return optax.partition(parts, labels)

    return create


def _shapes(params: PyTree) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(key.key for key in path): list(leaf.shape) for path, leaf in leaves}
