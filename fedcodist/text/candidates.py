"""Recommendation on the device: numbers of articles become titles in tokens.

The table of titles is stored once. Examples hold numbers of articles, 0 for none.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer
from fedcodist.core.metrics import Batch

_NUMBERS = ("clicked", "others", "history")


def sampled_candidates(titles: Any, negatives: int = 4) -> Preprocess:
    """Preprocessing for training: the clicked article, with some of those that were not clicked.

    Reads columns `clicked` int [B], `others` int [B, M] and `history` int [B, H]. Makes `candidates`
    int32 [B, 1 + negatives, T] and `history` int32 [B, H, T], titles in tokens, and `label` int32 [B],
    the place of the clicked article. The place is random, so the order of candidates gives nothing away.

    Args:
      titles: int [articles, T], of article 0 all padding.
      negatives: articles that were not clicked, drawn without replacement for each example and step.
        Where there are fewer, the numbers of times that they are drawn differ by at most one.

    Raises:
      ValueError, TypeError: `negatives` below 1.
    """
    check_integer("negatives", negatives, low=1)

    def preprocess(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        draw_keys = jax.vmap(lambda position: keys.derive(key, "candidates", position))(positions)
        draw = lambda key, clicked, others: _draw(key, clicked, others, negatives)
        candidates, label = jax.vmap(draw)(draw_keys, batch["clicked"], batch["others"])
        rest = {name: column for name, column in batch.items() if name not in _NUMBERS}
        return rest | {
            "candidates": _tokens(titles, candidates),
            "history": _tokens(titles, batch["history"]),
            "label": label,
        }

    return preprocess


def all_candidates(titles: Any) -> Preprocess:
    """Preprocessing for evaluation: numbers of articles become titles in tokens.

    `candidates` int [B, C] and `history` int [B, H] become int32 [B, C, T] and [B, H, T]. `label` [B, C]
    is left as `fedcodist.text.ranking` reads it.
    """

    def preprocess(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        tokens = {name: _tokens(titles, batch[name]) for name in ("candidates", "history")}
        return {**batch, **tokens}

    return preprocess


def _tokens(titles: Any, articles: jax.Array) -> jax.Array:
    return jnp.asarray(titles, jnp.int32)[articles]


def _draw(
    key: jax.Array, clicked: jax.Array, others: jax.Array, negatives: int
) -> tuple[jax.Array, jax.Array]:
    """Candidates of one example, int [1 + negatives], and the place of the clicked one."""
    is_there = others > 0
    draws = jax.random.uniform(keys.derive(key, "others"), others.shape)
    order = jnp.argsort(jnp.where(is_there, draws, 2))
    count = jnp.maximum(jnp.sum(is_there), 1)
    drawn = others[order[jnp.arange(negatives) % count]]
    label = jax.random.randint(keys.derive(key, "place"), (), 0, negatives + 1)
    return jnp.insert(drawn, label, clicked), label
