"""Metrics as sums over examples (accuracy, precision, recall, F score), also in groups."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.example_losses import WrongShape
from fedcodist.core.labels import class_labels

Batch = Mapping[str, jax.Array]
# What is averaged: (outputs, batch) -> (values [batch], weights [batch]).
Statistic = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


class Metric(NamedTuple):
    """A metric whose accumulator is a pytree that may be summed over batches and devices.

    Attributes:
      init: () -> accumulator of no examples.
      evaluate: (outputs, batch, mask [batch]) -> accumulator of one batch.
      merge: (accumulator, accumulator) -> accumulator.
      compute: accumulator -> scalar or array; NaN where there were no examples.
    """

    init: Callable[[], Any]
    evaluate: Callable[[Any, Batch, jax.Array], Any]
    merge: Callable[[Any, Any], Any]
    compute: Callable[[Any], jax.Array]


def accuracy(label: str = "label") -> Statistic:
    """Share of examples whose largest logit is their label's. For a single logit see `of_one_logit`."""

    def statistic(outputs, batch):
        is_right = predicted_label(outputs) == _labels(outputs, batch, label)
        correct = is_right.astype(jnp.float32)
        return correct, jnp.ones_like(correct)

    return statistic


def of_one_logit(statistic: Statistic, threshold: float = 0.0) -> Statistic:
    """A statistic of two classes, such as `accuracy()`, for a network with one output per example.

    Label 1 is predicted where the output, [batch, 1] or [batch], is above the threshold: 0 for a logit,
    0.5 for a probability.
    """

    def of_two(outputs, batch):
        logit = outputs.reshape(outputs.shape[:1]) - threshold
        return statistic(jnp.stack([jnp.zeros_like(logit), logit], axis=-1), batch)

    return of_two


def predicted_label(outputs: jax.Array) -> jax.Array:
    """The class of the largest logit of outputs [..., classes], int32 [...].

    Raises:
      ValueError: names the outputs, if there are fewer than two classes.
    """
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise WrongShape(
            "outputs must be logits [batch, classes] of at least two classes to tell a label, got "
            f"{list(outputs.shape)}: of one logit per example use "
            "fedcodist.core.metrics.of_one_logit(accuracy())."
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

    def statistic(outputs, batch):
        hit, predicted, _ = _of_class(outputs, batch, label, positive)
        return hit, predicted

    return statistic


def recall(positive: int = 1, label: str = "label") -> Statistic:
    """True positives over actual positives, TP / actual; NaN where there are none."""

    def statistic(outputs, batch):
        hit, _, actual = _of_class(outputs, batch, label, positive)
        return hit, actual

    return statistic


def f_score(positive: int = 1, label: str = "label") -> Statistic:
    """The harmonic mean of precision and recall of a class, F = 2 TP / (predicted + actual).

    0 where no example is predicted positive; NaN where none is positive either.
    """

    def statistic(outputs, batch):
        hit, predicted, actual = _of_class(outputs, batch, label, positive)
        return hit, predicted + actual

    return statistic


def mean(statistic: Statistic) -> Metric:
    """The weighted mean of a statistic over all examples."""

    def evaluate(outputs, batch, mask):
        values, weights = statistic(outputs, batch)
        weights = weights * mask
        return jnp.sum(values * weights), jnp.sum(weights)

    return Metric(lambda: (jnp.zeros(()), jnp.zeros(())), evaluate, _add, _ratio)


def grouped_mean(
    statistic: Statistic, group: Callable[[Batch], jax.Array], num_groups: int
) -> Metric:
    """The mean of a statistic within groups: per label, per client, per domain.

    Args:
      statistic: what is averaged.
      group: batch -> int [batch], each example's group in [0, num_groups).
      num_groups: number of groups; `compute` returns an array [num_groups].
    """

    def init():
        return jnp.zeros((num_groups,)), jnp.zeros((num_groups,))

    def evaluate(outputs, batch, mask):
        values, weights = statistic(outputs, batch)
        weights = weights * mask
        index = group(batch)
        total = jax.ops.segment_sum(values * weights, index, num_groups)
        return total, jax.ops.segment_sum(weights, index, num_groups)

    return Metric(init, evaluate, _add, _ratio)


def _of_class(outputs, batch, label, positive):
    """Whether each example is a true positive, is predicted positive, and is positive; floats."""
    if not 0 <= positive < outputs.shape[-1]:
        raise ValueError(
            f"positive must be one of the classes 0 to {outputs.shape[-1] - 1}, got {positive!r}."
        )
    predicted, labels = predicted_label(outputs), _labels(outputs, batch, label)
    hit = (predicted == labels) & (predicted == positive)
    return tuple(
        is_true.astype(jnp.float32) for is_true in (hit, predicted == positive, labels == positive)
    )


def _labels(outputs, batch, label):
    """As `class_labels`, but labels of the predictions' rank are not changed."""
    labels, rank = batch[label], outputs.ndim - 1
    return labels if labels.ndim == rank else class_labels(labels, outputs.shape[-1], rank, label)


def _add(left, right):
    return jax.tree.map(jnp.add, left, right)


def _ratio(accumulator):
    total, weight = accumulator
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), jnp.nan)
