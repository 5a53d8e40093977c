"""Models that score candidates, such as news: their loss, and how well they rank clicked ones.

In training the label is int [batch], the position of the only clicked candidate. In evaluation it is int
[batch, candidates]: 1 for clicked candidates, 0 for others, -1 for padding. `check_experiment` checks
that the data have no other values.

Candidates with equal scores count as randomly ordered: every metric is its mean over all their orders.
So a model that gives all candidates the same score gains nothing from the order of the data.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedcodist.core.labels import is_clicked
from fedcodist.core.metrics import Batch, Statistic


def ranking_metrics() -> dict[str, Statistic]:
    """AUC, MRR, nDCG@5 and nDCG@10, averaged over impressions, for a Model's `metrics`.

    They read labels [batch, candidates]. Impressions in which all candidates or none were clicked have
    no weight. They are NaN if a score is NaN.
    """
    return {
        "auc": _mean_over_impressions(auc),
        "mrr": _mean_over_impressions(reciprocal_rank),
        "ndcg_5": _mean_over_impressions(lambda scores, labels: ndcg(scores, labels, 5)),
        "ndcg_10": _mean_over_impressions(lambda scores, labels: ndcg(scores, labels, 10)),
    }


def ranking_loss(scores: jax.Array, batch: Batch) -> jax.Array:
    """Cross-entropy of the softmax over candidates, [batch]; the mean over clicks if there are several.

    Args:
      scores: [batch, candidates].
      batch: 'label' of either kind. Impressions without a click have loss 0.
    """
    labels = batch["label"]
    if labels.ndim == 1:
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    log_total = jax.nn.logsumexp(scores, axis=-1, where=labels >= 0)
    clicked = is_clicked(labels)
    count = jnp.sum(clicked, axis=-1)
    mean_score = jnp.sum(jnp.where(clicked, scores, 0), axis=-1) / jnp.maximum(count, 1)
    return jnp.where(count > 0, log_total - mean_score, 0)


def auc(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Area under the ROC curve of each impression, [batch].

    The share of pairs (clicked, not clicked) with the clicked one first; pairs of equal scores count
    half: (sum of the clicked ones' average ranks - P (P + 1) / 2) / (P N).

    Args:
      scores: float [batch, candidates].
      labels: int [batch, candidates], 1, 0 or -1.

    Returns:
      float [batch]; 0 where all candidates or none were clicked.
    """
    first, last = _places(scores, labels)
    clicked, others = _counts(labels)
    # Places count from 0, the best candidate; ranks from 1, the worst one.
    rank = (clicked + others)[:, None] - (first + last - 1) / 2
    ranks = jnp.sum(rank * is_clicked(labels), axis=-1)
    return (ranks - clicked * (clicked + 1) / 2) / jnp.maximum(clicked * others, 1)


def reciprocal_rank(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of 1 / rank over an impression's clicks, as in MIND's evaluation; arguments as `auc`."""
    gains = _discounted(scores, labels, lambda place: 1 / (place + 1))
    return gains / jnp.maximum(_counts(labels)[0], 1)


def ndcg(scores: jax.Array, labels: jax.Array, k: int) -> jax.Array:
    """Normalised discounted cumulative gain of the first k, discount 1 / log2(1 + rank); as `auc`."""

    def discount(place: jax.Array) -> jax.Array:
        return jnp.where(place < k, 1 / jnp.log2(place + 2), 0)

    ideal = _discounted(labels.astype(scores.dtype), labels, discount)
    return _discounted(scores, labels, discount) / jnp.where(ideal > 0, ideal, 1)


def _mean_over_impressions(metric: Callable[[jax.Array, jax.Array], jax.Array]) -> Statistic:
    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        labels = batch["label"]
        clicked, others = _counts(labels)
        is_undefined = jnp.any(jnp.isnan(outputs) & (labels >= 0), axis=-1)
        values = jnp.where(is_undefined, jnp.nan, metric(outputs, labels))
        return values, ((clicked > 0) & (others > 0)).astype(jnp.float32)

    return statistic


def _counts(labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of candidates that were clicked and that were not, float [batch] each."""
    count = lambda which: jnp.sum(which, axis=-1).astype(jnp.float32)
    return count(is_clicked(labels)), count(labels == 0)


def _discounted(
    scores: jax.Array, labels: jax.Array, discount: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The sum over clicks of the mean discount of the places shared by candidates of equal scores."""
    first, last = _places(scores, labels)
    discounts = discount(jnp.arange(scores.shape[-1]).astype(scores.dtype))
    cumulative = jnp.pad(jnp.cumsum(discounts), (1, 0))
    mean = (cumulative[last] - cumulative[first]) / jnp.maximum(last - first, 1)
    return jnp.sum(jnp.where(is_clicked(labels), mean, 0), axis=-1)


def _places(scores: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[first, last) of the places, from 0 for the best, that candidates with the same score share."""
    is_real = labels >= 0
    falling = jnp.where(is_real, -scores, jnp.inf)  # padding after all others

    def of_example(falling: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        ordered = jnp.sort(falling)
        # A score of minus infinity is sorted among the padding, but shares no place with it.
        find = lambda side: jnp.minimum(jnp.searchsorted(ordered, falling, side=side), count)
        return find("left"), find("right")

    return jax.vmap(of_example)(falling, jnp.sum(is_real, axis=-1))
