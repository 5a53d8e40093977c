"""Metrics as sums over examples (accuracy, precision, recall, F, average precision), also in groups."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from fedcodist.core.labels import class_labels
from fedcodist.core.shape_checks import WrongShape, described
from fedcodist.core.summed_metrics import SummedMetric

PyTree = Any
Batch = Mapping[str, jax.Array]
# A statistic to average: (outputs, batch) -> (values [batch], weights [batch]).
Statistic = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


class Metric(NamedTuple):
    """A metric whose accumulator is a pytree. Accumulators of batches and devices are added.

    Attributes:
      init: () -> accumulator of no examples.
      evaluate: (outputs, batch, mask [batch]) -> accumulator of one batch.
      compute: accumulator -> scalar or array; NaN where there were no examples.
    """

    init: Callable[[], Any]
    evaluate: Callable[[Any, Batch, jax.Array], Any]
    compute: Callable[[Any], jax.Array]


def accuracy(label: str = "label") -> Statistic:
    """Share of examples whose largest logit is their label's. For a single logit see `of_one_logit`."""

    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        is_right = predicted_label(outputs) == _labels(outputs, batch, label)
        correct = is_right.astype(jnp.float32)
        return correct, jnp.ones_like(correct)

    return with_label_column(statistic, label)


@overload
def of_one_logit(statistic: SummedMetric, threshold: float = 0.0) -> SummedMetric: ...


@overload
def of_one_logit(statistic: Statistic, threshold: float = 0.0) -> Statistic: ...


def of_one_logit(statistic: Any, threshold: float = 0.0) -> Any:
    """Makes a statistic of two classes, such as `accuracy()`, accept one output per example.

    A `SummedMetric` becomes another one. Label 1 is predicted if the output, [batch, 1] or [batch], is
    above the threshold: 0 for a logit, 0.5 for a probability.

    Raises:
      ValueError: names the threshold, if it is not 0 for a `SummedMetric`: `average_precision()` ranks
        by the logarithm of the odds, which a probability is not.
    """
    if isinstance(statistic, SummedMetric):
        if threshold != 0:
            raise ValueError(
                f"threshold must be 0 for a SummedMetric, whose outputs are logits, got {threshold!r}."
            )
        return statistic._replace(sums=of_one_logit(statistic.sums, threshold))

    def of_two(outputs: jax.Array, batch: Batch) -> Any:
        logit = outputs.reshape(outputs.shape[:1]) - threshold
        return statistic(jnp.stack([jnp.zeros_like(logit), logit], axis=-1), batch)

    return with_label_column(of_two, label_column(statistic))


def label_column(statistic: Any) -> str | None:
    """The column of labels that an accuracy of this module reads; None for other functions."""
    return getattr(statistic, "label_column", None)


def with_label_column(statistic: Statistic, column: str | None) -> Statistic:
    """Notes the column of labels of an accuracy, for its values per label; None notes nothing."""
    if column is not None:
        vars(statistic)["label_column"] = column
    return statistic


def predicted_label(outputs: jax.Array) -> jax.Array:
    """The class of the largest logit of outputs [..., classes], int32 [...].

    Raises:
      ValueError: names the outputs, if they are no array, or if there are fewer than two classes.
    """
    if not hasattr(outputs, "ndim"):
        raise WrongShape(
            "outputs must be logits [batch, classes] to tell a label, got "
            f"{described(outputs)}: for a network that returns more than logits give metrics= that read "
            "them."
        )
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise WrongShape(
            "outputs must be logits [batch, classes] of at least two classes to tell a label, got "
            f"{list(outputs.shape)}: of one logit per example use "
            "fedcodist.core.metrics.of_one_logit(accuracy()); for regression give metrics=, such as "
            "an absolute error."
        )
    return jnp.argmax(outputs, axis=-1)


def precision(positive: int = 1, label: str = "label") -> Statistic:
    """True positives over predicted positives, TP / predicted; NaN where none is predicted.

    Precision, `recall` and `f_score` are ratios of counts. They are computed as weighted means, whose
    numerators and denominators are summed over batches and devices.

    Args:
      positive: the class that counts as positive.
      label: the column of labels.
    """

    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        hit, predicted, _ = _of_class(outputs, batch, label, positive)
        return hit, predicted

    return statistic


def recall(positive: int = 1, label: str = "label") -> Statistic:
    """True positives over actual positives, TP / actual; NaN where there are none."""

    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        hit, _, actual = _of_class(outputs, batch, label, positive)
        return hit, actual

    return statistic


def f_score(positive: int = 1, label: str = "label") -> Statistic:
    """The harmonic mean of precision and recall of a class, F = 2 TP / (predicted + actual).

    It is 0 if no example is predicted positive, and NaN if in addition no example is positive.
    """

    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        hit, predicted, actual = _of_class(outputs, batch, label, positive)
        return hit, predicted + actual

    return statistic


def top_k(k: int, label: str = "label") -> Statistic:
    """Share of examples whose label is among the k largest logits; among ties lower classes win."""

    def statistic(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if not 0 < k <= outputs.shape[-1]:
            raise ValueError(f"k must be from 1 to the {outputs.shape[-1]} classes, got {k!r}.")
        # Not -0.0, which `top_k` takes for smaller than 0.0.
        _, largest = jax.lax.top_k(jnp.where(outputs == 0, 0, outputs), k)
        is_among = jnp.any(largest == _labels(outputs, batch, label)[..., None], axis=-1)
        hit = is_among.astype(jnp.float32)
        return hit, jnp.ones_like(hit)

    return with_label_column(statistic, label)


def macro_f_score(label: str = "label") -> SummedMetric:
    """The mean of all classes' F scores, each class counting alike, as scikit-learn's "macro".

    Classes that are neither predicted nor among the labels are left out; NaN without examples.
    """

    def sums(outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        if outputs.ndim != 2:
            raise WrongShape(f"outputs must be [batch, classes], got {list(outputs.shape)}")
        classes = jnp.arange(outputs.shape[-1])
        predicted = predicted_label(outputs)[..., None] == classes
        actual = _labels(outputs, batch, label)[..., None] == classes
        return {"hits": predicted & actual, "predicted": predicted, "actual": actual}

    def compute(total: dict[str, jax.Array]) -> jax.Array:
        counted = total["predicted"] + total["actual"]
        scores = 2 * total["hits"] / jnp.maximum(counted, 1)
        classes = jnp.sum(counted > 0)
        return jnp.where(classes > 0, jnp.sum(scores) / jnp.maximum(classes, 1), jnp.nan)

    return SummedMetric(sums, compute)


def average_precision(positive: int = 1, label: str = "label", bins: int = 4096) -> SummedMetric:
    """The area under the curve of precision by recall, as scikit-learn's `average_precision_score`.

    It needs no threshold, so it can compare models whose F scores depend on how confident they are.
    Examples are ranked by the logarithm of the odds of the class, in bins: of width 0.004 at even odds,
    and 0.06 at 16. Examples of one bin count as equally ranked. The area is NaN without positive
    examples, and if a logit is NaN.

    Args:
      positive: the class that counts as positive.
      label: the column of labels.
      bins: number of bins; sums hold two numbers for each.
    """

    def sums(outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        _check_class(outputs, positive)
        others = jnp.delete(outputs, positive, axis=-1)
        odds = outputs[..., positive] - jax.nn.logsumexp(others, axis=-1)
        # A quarter keeps bins narrow where models are confident.
        place = jnp.clip(jnp.floor(jax.nn.sigmoid(odds / 4) * bins), 0, bins - 1)
        ranked = place[..., None] == jnp.arange(bins)
        is_positive = _labels(outputs, batch, label) == positive
        undefined = jnp.isnan(odds)
        return {
            "all": ranked,
            "positive": ranked & is_positive[..., None],
            "undefined": undefined,
        }

    def compute(total: dict[str, jax.Array]) -> jax.Array:
        # Above a bin's lower bound: the bins from the best one down to it.
        ranked, hits = (jnp.cumsum(total[name][::-1]) for name in ("all", "positive"))
        precisions = hits / jnp.maximum(ranked, 1)
        positives = hits[-1]
        area = jnp.sum(precisions * total["positive"][::-1]) / jnp.maximum(positives, 1)
        return jnp.where((positives > 0) & (total["undefined"] == 0), area, jnp.nan)

    return SummedMetric(sums, compute)


def mean(statistic: Statistic) -> Metric:
    """The weighted mean of a statistic over all examples."""

    def evaluate(outputs: Any, batch: Batch, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, weights = statistic(outputs, batch)
        weights = weights * mask
        return jnp.sum(_weighted(values, weights)), jnp.sum(weights)

    return Metric(lambda: (jnp.zeros(()), jnp.zeros(())), evaluate, _ratio)


def grouped_mean(
    statistic: Statistic, group: Callable[[Batch], jax.Array], num_groups: int
) -> Metric:
    """The mean of a statistic within groups: per label, per client, per domain.

    Args:
      statistic: the statistic to average.
      group: batch -> int [batch], each example's group in [0, num_groups).
      num_groups: number of groups; `compute` returns an array [num_groups].
    """

    def init() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((num_groups,)), jnp.zeros((num_groups,))

    def evaluate(outputs: Any, batch: Batch, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, weights = statistic(outputs, batch)
        weights = weights * mask
        index = group(batch)
        total = jax.ops.segment_sum(_weighted(values, weights), index, num_groups)
        return total, jax.ops.segment_sum(weights, index, num_groups)

    return Metric(init, evaluate, _ratio)


def summed(metric: SummedMetric, like: Any) -> Metric:
    """A SummedMetric over all examples.

    Args:
      metric: the sums, and the function computed from them.
      like: shapes of `metric.sums` of a batch, leaves [batch, ...].
    """

    def init() -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], _summed_dtype(leaf)), like)

    def evaluate(outputs: Any, batch: Batch, mask: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: _real(leaf, mask).sum(0), metric.sums(outputs, batch))

    return Metric(init, evaluate, metric.compute)


def grouped_sums(
    metric: SummedMetric, like: Any, group: Callable[[Batch], jax.Array], num_groups: int
) -> Metric:
    """A SummedMetric within groups; `compute` returns an array [num_groups]. See `grouped_mean`."""

    def init() -> PyTree:
        zeros = lambda leaf: jnp.zeros((num_groups, *leaf.shape[1:]), _summed_dtype(leaf))
        return jax.tree.map(zeros, like)

    def evaluate(outputs: Any, batch: Batch, mask: jax.Array) -> PyTree:
        index = group(batch)
        total = lambda leaf: jax.ops.segment_sum(_real(leaf, mask), index, num_groups)
        return jax.tree.map(total, metric.sums(outputs, batch))

    return Metric(init, evaluate, jax.vmap(metric.compute))


def added(accumulator: PyTree, other: PyTree) -> PyTree:
    """The accumulator of the examples of both."""
    return jax.tree.map(jnp.add, accumulator, other)


def _weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Values times weights; 0 where the weight is 0, even if the value is NaN."""
    return jnp.where(weights != 0, values * weights, 0)


def _real(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Values [batch, ...] to be summed: 0 in place of padding, even if that holds NaN."""
    is_real = (mask > 0).reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.where(is_real, values.astype(_summed_dtype(values)), 0)


def _summed_dtype(values: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """int32 for integers and bools, so that counts are exact; at least float32 for sums of floats."""
    is_whole = values.dtype == bool or jnp.issubdtype(values.dtype, jnp.integer)
    return jnp.int32 if is_whole else jnp.promote_types(values.dtype, jnp.float32)


def _of_class(outputs: jax.Array, batch: Batch, label: str, positive: int) -> tuple[jax.Array, ...]:
    """Whether each example is a true positive, is predicted positive, and is positive; floats."""
    _check_class(outputs, positive)
    predicted, labels = predicted_label(outputs), _labels(outputs, batch, label)
    hit = (predicted == labels) & (predicted == positive)
    return tuple(
        is_true.astype(jnp.float32) for is_true in (hit, predicted == positive, labels == positive)
    )


def _check_class(outputs: jax.Array, positive: int) -> None:
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise WrongShape(
            f"outputs must have at least two classes, got {list(outputs.shape)}: see `of_one_logit`"
        )
    if not 0 <= positive < outputs.shape[-1]:
        raise ValueError(
            f"positive must be one of the classes 0 to {outputs.shape[-1] - 1}, got {positive!r}."
        )


def _labels(outputs: jax.Array, batch: Batch, label: str) -> jax.Array:
    """As `class_labels`, but labels of the predictions' rank are not changed."""
    labels, rank = batch[label], outputs.ndim - 1
    return labels if labels.ndim == rank else class_labels(labels, outputs.shape[-1], rank, label)


def _ratio(accumulator: tuple[jax.Array, jax.Array]) -> jax.Array:
    total, weight = accumulator
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), jnp.nan)
