"""Metrics accumulated over the batches and devices of an evaluation, in all and in groups."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.metrics import Statistic
from fedcodist.core.summed_metrics import SummedMetric

PyTree = Any
Batch = Mapping[str, jax.Array]


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
        # Without a dtype, sums of int32 are int64 in 64-bit mode.
        total = lambda leaf: _real(leaf, mask).sum(0, dtype=_summed_dtype(leaf))
        return jax.tree.map(total, metric.sums(outputs, batch))

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


def _ratio(accumulator: tuple[jax.Array, jax.Array]) -> jax.Array:
    total, weight = accumulator
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), jnp.nan)
