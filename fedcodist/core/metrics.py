"""Metrics as functions of outputs and batches: accuracy, precision, recall, F, average precision."""

from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp

from fedcodist.core.labels import class_labels
from fedcodist.core.shape_checks import WrongShape, described
from fedcodist.core.summed_metrics import SummedMetric

PyTree = Any
Batch = Mapping[str, jax.Array]
# A statistic to average: (outputs, batch) -> (values [batch], weights [batch]).
Statistic = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


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
