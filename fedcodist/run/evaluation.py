"""Evaluation of one model on one split, whose examples the devices share."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import batches
from fedcodist.core.batches import Preprocess
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.example_losses import checked_loss, checked_statistic
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.method import Predictor
from fedcodist.core.metrics import label_column
from fedcodist.core.model import Model
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.used_arguments import used_arguments
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.metric_sums import Metric, added, grouped_mean, grouped_sums, mean, summed

PyTree = Any
_CLIENT = "client of the split"  # a further column of evaluated batches
# (the loss and metrics of a batch's examples by name, the batch, its mask)
_ComputedBatch = tuple[dict[str, Any], dict[str, jax.Array], jax.Array]


class EvaluationSplit(NamedTuple):
    """Examples on which predictors are evaluated, and their clients.

    Attributes:
      columns: name -> [examples, ...].
      client: int32 [examples], the index of each example's client within the split.
      num_clients: a dummy of shape [clients], so that the number of clients is part of the shape.
    """

    columns: Mapping[str, Any]
    client: Any
    num_clients: Any


def evaluation_split(data: FederatedData) -> EvaluationSplit:
    """Makes the EvaluationSplit of federated data."""
    client = np.repeat(np.arange(data.num_clients, dtype=np.int32), data.client_sizes)
    return EvaluationSplit(dict(data.columns), client, np.zeros(data.num_clients, np.int8))


def evaluate(
    predictor: Predictor,
    variables: PyTree,
    split: EvaluationSplit,
    batch_size: int,
    preprocess: Preprocess,
    axis_name: str | None,
) -> dict[str, jax.Array]:
    """Computes all metrics of one predictor on one split, also per client, and accuracies per label.

    Args:
      predictor: the model or ensemble to evaluate.
      variables: of one model, or of one ensemble.
      split: the examples.
      batch_size: per device and step.
      preprocess: (batch, key, positions) -> batch for evaluation; must not be random.
      axis_name: mesh axis whose devices share the examples, or None.

    Returns:
      metric -> scalar; also `<accuracy>_per_label` [classes] if there are labels (all NaN if an example
      has a label beyond the classes), and `<metric>_per_client` [clients] if there are several clients.
    """
    model = predictor.model
    statistics = _statistics(model)
    count = split.client.shape[0]
    devices, device = this_device(axis_name)
    batch_size = min(batch_size, -(-count // devices))
    steps = -(-count // (batch_size * devices))

    def batch_at(index: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        _, indices, is_real = batches.places(index * devices + device, batch_size, count)
        batch = batches.read(split.columns, indices, preprocess, jax.random.key(0), indices)
        return batch | {_CLIENT: split.client[indices]}, is_real.astype(jnp.float32)

    def computed_at(index: jax.Array) -> _ComputedBatch:
        batch, mask = batch_at(index)
        outputs = predictor.predict(variables, batch)
        computed = {name: statistic(outputs, batch) for name, statistic in statistics.items()}
        return computed, batch, mask

    summed_metrics = _summed_metrics(model)
    shapes_of_sums = _shapes_of_sums(summed_metrics, computed_at)
    metrics = _overall_metrics(statistics, summed_metrics, shapes_of_sums)
    clients = split.num_clients.shape[0]
    num_labels = max(model.num_classes, 2)  # a single logit has two labels
    batch_shapes = jax.eval_shape(batch_at, jnp.zeros((), jnp.int32))[0]
    label_columns = _label_columns(
        model, batch_shapes, functools.partial(predictor.predict, variables)
    )
    client_of = lambda batch: batch[_CLIENT]
    for name in model.metrics:
        if name in summed_metrics:
            if clients > 1:
                metrics[f"{name}_per_client"] = grouped_sums(
                    summed_metrics[name], shapes_of_sums[name], client_of, clients
                )
            continue
        if name in label_columns:
            metrics[f"{name}_per_label"] = _mean_per_label(name, label_columns[name], num_labels)
        if clients > 1:
            metrics[f"{name}_per_client"] = grouped_mean(_computed(name), client_of, clients)

    return _accumulated(metrics, computed_at, steps, axis_name)


def evaluate_client(
    predictor: Predictor,
    variables: PyTree,
    data: ClientData,
    batch_size: int,
    preprocess: Preprocess,
) -> dict[str, jax.Array]:
    """All metrics of one model on one client's own examples: metric -> scalar or array.

    Args:
      predictor: the model; its `variables` is not used.
      variables: the model's.
      data: the client's examples. Without any, means are NaN.
      batch_size: examples per step.
      preprocess: as in `evaluate`.
    """
    statistics = _statistics(predictor.model)
    batch_size = min(batch_size, data.capacity)

    def computed_at(index: jax.Array) -> _ComputedBatch:
        positions, indices, is_real = batches.places(index, batch_size, data.size)
        rows = data.start + indices
        batch = batches.read(data.columns, rows, preprocess, jax.random.key(0), positions)
        outputs = predictor.predict(variables, batch)
        computed = {name: statistic(outputs, batch) for name, statistic in statistics.items()}
        return computed, batch, is_real.astype(jnp.float32)

    summed_metrics = _summed_metrics(predictor.model)
    shapes_of_sums = _shapes_of_sums(summed_metrics, computed_at)
    metrics = _overall_metrics(statistics, summed_metrics, shapes_of_sums)
    return _accumulated(metrics, computed_at, steps=-(-data.bound // batch_size))


def _accumulated(
    metrics: Mapping[str, Any],
    computed_at: Callable[[jax.Array], _ComputedBatch],
    steps: int | jax.Array,
    axis_name: str | None = None,
) -> dict[str, jax.Array]:
    """The values of metrics over all batches.

    Args:
      metrics: name -> metric of computed statistics.
      computed_at: batch index -> (statistics by name, the batch, its mask).
      steps: number of batches, on each device.
      axis_name: mesh axis whose devices share the batches, or None.
    """

    def step(index: jax.Array, accumulators: dict[str, PyTree]) -> dict[str, PyTree]:
        computed, batch, mask = computed_at(index)
        return {
            name: added(accumulators[name], metric.evaluate(computed, batch, mask))
            for name, metric in metrics.items()
        }

    accumulators = {name: metric.init() for name, metric in metrics.items()}
    accumulators = jax.lax.fori_loop(0, steps, step, accumulators)
    accumulators = sum_over_devices(accumulators, axis_name)
    return {name: metric.compute(accumulators[name]) for name, metric in metrics.items()}


def _statistics(model: Model) -> dict[str, Callable[[Any, Any], Any]]:
    """The loss and the metrics of a model: name -> (outputs, batch) -> values of its examples."""
    return {
        "loss": lambda outputs, batch: _with_ones(checked_loss(model.loss, outputs, batch)),
        **{
            name: functools.partial(checked_statistic, name, statistic)
            for name, statistic in model.metrics.items()
        },
    }


def _computed(name: str) -> Callable[[Any, Any], Any]:
    """Reads a statistic that `computed_at` has computed once for all metrics that use it."""
    return lambda computed, batch: computed[name]


def _summed_metrics(model: Model) -> dict[str, SummedMetric]:
    return {
        name: SummedMetric(_computed(name), metric.compute)
        for name, metric in model.metrics.items()
        if isinstance(metric, SummedMetric)
    }


def _shapes_of_sums(
    summed_metrics: Mapping[str, SummedMetric], computed_at: Callable[[jax.Array], _ComputedBatch]
) -> dict[str, Any]:
    """The shapes of what summed metrics sum, by name; {} without such metrics."""
    if not summed_metrics:
        return {}
    return jax.eval_shape(computed_at, jnp.zeros((), jnp.int32))[0]


def _overall_metrics(
    statistics: Mapping[str, Any],
    summed_metrics: Mapping[str, SummedMetric],
    shapes_of_sums: Mapping[str, Any],
) -> dict[str, Any]:
    """The metrics over all examples, by name."""
    means = {name: mean(_computed(name)) for name in statistics if name not in summed_metrics}
    return means | {
        name: summed(metric, shapes_of_sums[name]) for name, metric in summed_metrics.items()
    }


def _with_ones(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    return values, jnp.ones_like(values)


def _label_columns(
    model: Model, batch: Mapping[str, Any], predict: Callable[[Any], Any]
) -> dict[str, str]:
    """The columns by whose labels accuracies are grouped: metric -> column.

    The library's accuracies know their column. Another accuracy is grouped by `label` if it reads that
    column and the network has several outputs. With one output, labels may be any numbers, such as ages.

    Args:
      model: the model whose metrics are grouped.
      batch: shapes of a batch after preprocessing.
      predict: batch -> outputs.
    """
    columns = {}
    statistics = _statistics(model)
    for name, metric in model.metrics.items():
        # Only accuracies: precision among the examples of one label would lack false positives.
        if not name.startswith("accuracy") or isinstance(metric, SummedMetric):
            continue
        column = label_column(metric)
        is_ours = column is not None
        column = column or "label"
        if not _has_labels(batch.get(column), model.num_classes, is_ours):
            continue
        if is_ours or (
            model.num_classes > 1
            and _reads(column, statistics[name], jax.eval_shape(predict, batch), batch)
        ):
            columns[name] = column
    return columns


def _has_labels(label: Any, num_classes: int, is_ours: bool) -> bool:
    """Whether every example has one label, in a form that `class_labels` accepts.

    Only the library's own accuracy refuses vectors that are not one-hot, such as several labels.
    """
    if label is None or label.ndim not in (1, 2):
        return False
    is_whole = label.dtype == bool or jnp.issubdtype(label.dtype, jnp.integer)
    if label.ndim == 1 or label.shape[1] == 1:
        return is_whole
    return is_ours and label.shape[1] == num_classes


def _reads(
    column: str, statistic: Callable[[Any, Any], Any], outputs: Any, batch: Mapping[str, Any]
) -> bool:
    """Whether a statistic depends on a column of the batch; outputs and batch are shapes."""
    others = {name: values for name, values in batch.items() if name != column}

    def computed(values: Any, outputs: Any, others: Mapping[str, Any]) -> Any:
        return statistic(outputs, {**others, column: values})

    return used_arguments(jax.make_jaxpr(computed)(batch[column], outputs, others))[0]


def _mean_per_label(name: str, column: str, num_labels: int) -> Metric:
    """The mean of a computed statistic for each label; NaN for all if some examples have another label.

    An accuracy of the user's own may read labels for which the network has no output, such as grades.
    """

    def label_or_other(batch: Mapping[str, jax.Array]) -> jax.Array:
        # uint8 cannot hold 256, the group of others if there are 256 labels.
        labels = class_labels(batch[column], num_labels, name=column).astype(jnp.int32)
        return jnp.where((labels >= 0) & (labels < num_labels), labels, num_labels)

    groups = grouped_mean(_computed(name), label_or_other, num_labels + 1)

    def compute(sums: tuple[jax.Array, jax.Array]) -> jax.Array:
        _, weights = sums
        return jnp.where(weights[-1] > 0, jnp.nan, groups.compute(sums)[:-1])

    return groups._replace(compute=compute)
