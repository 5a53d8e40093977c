"""Recommendation on the device: articles as numbers become the tokens that networks read.

A table of titles is kept once; examples hold numbers of articles, 0 where there is none.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer


def sampled_candidates(titles: Any, negatives: int = 4) -> Preprocess:
    """Preprocessing for training: beside the article that was clicked, some of those that were not.

    Reads columns `clicked` int [B], `others` int [B, M] and `history` int [B, H]. Makes `candidates`
    int32 [B, 1 + negatives, T] and `history` int32 [B, H, T], tokens of titles, and `label` int32 [B],
    the place of the clicked one, which is random: no model gains by candidates' order.

    Args:
      titles: int [articles, T], of article 0 all padding.
      negatives: articles that were not clicked, drawn without replacement for each example and step;
        where there are fewer, each is drawn equally often, but for one time.

    Raises:
      ValueError, TypeError: a number of negatives below 1.
    """
    check_integer("negatives", negatives, low=1)

    def preprocess(batch, key, positions):
        each = jax.vmap(lambda position: keys.derive(key, "candidates", position))(positions)
        draw = lambda key, clicked, others: _draw(key, clicked, others, negatives)
        candidates, label = jax.vmap(draw)(each, batch["clicked"], batch["others"])
        rest = {name: column for name, column in batch.items() if name not in _NUMBERS}
        return rest | {
            "candidates": _tokens(titles, candidates),
            "history": _tokens(titles, batch["history"]),
            "label": label,
        }

    return preprocess


def all_candidates(titles: Any) -> Preprocess:
    """Preprocessing for evaluation: `candidates` int [B, C] and `history` int [B, H] become tokens of
    titles, int32 [B, C, T] and [B, H, T]; `label` [B, C] is as `fedcodist.text.ranking` reads it."""

    def preprocess(batch, key, positions):
        tokens = {name: _tokens(titles, batch[name]) for name in ("candidates", "history")}
        return {**batch, **tokens}

    return preprocess


_NUMBERS = ("clicked", "others", "history")


def _tokens(titles: Any, articles: jax.Array) -> jax.Array:
    return jnp.asarray(titles, jnp.int32)[articles]


def _draw(key, clicked, others, negatives):
    """Candidates of one example, int [1 + negatives], and the place of the clicked one."""
    is_there = others > 0
    draws = jax.random.uniform(keys.derive(key, "others"), others.shape)
    order = jnp.argsort(jnp.where(is_there, draws, 2))
    count = jnp.maximum(jnp.sum(is_there), 1)
    drawn = others[order[jnp.arange(negatives) % count]]
    label = jax.random.randint(keys.derive(key, "place"), (), 0, negatives + 1)
    return jnp.insert(drawn, label, clicked), label
