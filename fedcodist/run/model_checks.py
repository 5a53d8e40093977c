"""Checks of an experiment's models with its data, by shape, before anything compiles."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.method import Predictor
from fedcodist.core.model import Variables
from fedcodist.core.padding_checks import PaddedBatches, not_a_multiple_text, padding_message
from fedcodist.core.shape_checks import WrongShape
from fedcodist.core.user_functions import error_place
from fedcodist.run.client_splits import all_splits
from fedcodist.run.evaluated_models import evaluated_models
from fedcodist.run.evaluation import EvaluationSplit, evaluate
from fedcodist.run.metrics_lines import check_metric_name
from fedcodist.run.sources import ResidentData, StreamedData

PyTree = Any


def check_models(
    experiment: Any, padded: Sequence[PaddedBatches], input_types: Mapping[str, set[Any]]
) -> None:
    """Checks by shape that an experiment's models fit its data.

    Args:
      experiment: an `Experiment`.
      padded, input_types: the result of `check_algorithm` for it.

    Raises:
      ValueError, TypeError: a loss or metric is not one number per example; the message names the model
        and the split. Or a network's batch statistics, or an output that the loss reads, would count
        padding; it names the padded batches.
    """
    models = evaluated_models(experiment.algorithm)
    for name, (predictor, _) in models.items():
        for metric in predictor.model.metrics:
            check_metric_name(f"metrics[{metric!r}] of model {name!r}", metric)
    _check_evaluation(experiment, models)
    _warn_of_other_images(experiment)
    _warn_of_other_types(experiment, {p.model.inputs for p, _ in models.values()}, input_types)
    _check_statistics(experiment.data, padded)


def _check_evaluation(experiment: Any, models: Mapping[str, tuple[Predictor, Variables]]) -> None:
    """Evaluates every model on every split, by shape."""
    seen = set()
    for split, data in all_splits(experiment).items():
        columns = {name: _shape(column) for name, column in data.columns.items()}
        examples = EvaluationSplit(
            columns,
            jax.ShapeDtypeStruct((data.num_examples,), jnp.int32),
            jax.ShapeDtypeStruct((data.num_clients,), jnp.int8),
        )
        kinds = tuple((name, column.shape[1:], column.dtype) for name, column in columns.items())
        for name, (predictor, variables) in models.items():
            # Splits that differ only in length need no other check.
            if (name, kinds) in seen:
                continue
            seen.add((name, kinds))

            def measured(
                variables: Variables, examples: EvaluationSplit, predictor: Predictor = predictor
            ) -> dict[str, jax.Array]:
                return evaluate(
                    predictor,
                    variables,
                    examples,
                    experiment.evaluation_batch_size,
                    experiment.evaluation_preprocess,
                    None,
                )

            try:
                jax.eval_shape(measured, variables, examples)
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                why = _why(error, columns, experiment.data.columns)
                raise kind(f"model {name!r} on split {split!r}: {why}") from error


def _warn_of_other_images(experiment: Any) -> None:
    """Warns if a split has images of another shape than the clients', such as transposed ones."""

    def shapes(columns: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        batch = _preprocessed(experiment, columns)
        return {name: column.shape[1:] for name, column in batch.items() if column.ndim == 4}

    clients = {name: _shape(column) for name, column in experiment.data.columns.items()}
    for split, data in all_splits(experiment).items():
        columns = {name: _shape(column) for name, column in data.columns.items()}
        if all(clients[n].shape[1:] == c.shape[1:] for n, c in columns.items() if n in clients):
            continue
        try:
            expected = shapes({name: clients[name] for name in columns if name in clients})
        except Exception:  # the preprocessing of evaluation need not read the clients' examples
            continue
        for name, shape in shapes(columns).items():
            if shape != expected.get(name, shape):
                warnings.warn(
                    f"split {split!r} has {name}s {list(shape)}, those of the clients are "
                    f"{list(expected[name])}.",
                    stacklevel=2,
                )


def _why(error: Exception, columns: Mapping[str, Any], clients: Mapping[str, Any]) -> str:
    """One line about why a model cannot be evaluated on a split, and in which loss or metric."""
    place = error_place(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in columns:
        return f"evaluation_preprocess must keep column {error}{place}."
    if isinstance(error, KeyError):
        return f"there is no column {error}, only {sorted(columns)}{place}."
    for name, column in columns.items():
        if name not in clients or isinstance(error, WrongShape):
            continue
        expected, given = (
            f"{array.dtype}{list(array.shape[1:])}" for array in (clients[name], column)
        )
        if clients[name].shape[1:] != column.shape[1:]:
            return f"column {name!r} must be {expected} of an example, as the clients' is, got {given}."
    return f"{(str(error).splitlines() or [type(error).__name__])[0]}{place}"


def _warn_of_other_types(
    experiment: Any, inputs: set[tuple[str, ...]], trained: Mapping[str, set[Any]]
) -> None:
    """Warns if networks get an input as integers in evaluation and as floats in training, or reversed.

    Training includes a distillation.
    """
    kind = lambda dtype: "floats" if jnp.issubdtype(dtype, jnp.floating) else "integers"
    for split, data in all_splits(experiment).items():
        batch = _preprocessed(experiment, data.columns)
        for column in sorted(batch.keys() & {column for columns in inputs for column in columns}):
            kinds = {kind(dtype) for dtype in trained.get(column, ())}
            if kinds and kind(batch[column].dtype) not in kinds:
                in_training = ", ".join(sorted(str(dtype) for dtype in trained[column]))
                warnings.warn(
                    f"column {column!r} reaches networks as {batch[column].dtype} on split {split!r}, "
                    f"and as {in_training} in training: evaluation_preprocess should scale it as the "
                    "preprocessing of training does.",
                    stacklevel=2,
                )
                return
    for column, dtypes in trained.items():
        if len({kind(dtype) for dtype in dtypes}) > 1:
            warnings.warn(
                f"column {column!r} reaches networks in training as "
                f"{' and as '.join(sorted(str(dtype) for dtype in dtypes))}: all preprocessings should "
                "scale it in the same way, that of a distillation too.",
                stacklevel=2,
            )


def _preprocessed(experiment: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of one example after the preprocessing of evaluation."""
    dtype = lambda column: jax.dtypes.canonicalize_dtype(column.dtype)
    one = {n: jax.ShapeDtypeStruct((1, *c.shape[1:]), dtype(c)) for n, c in columns.items()}
    position = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.eval_shape(experiment.evaluation_preprocess, one, keys.key_shape(), position)


def _check_statistics(data: ResidentData | StreamedData, padded: Sequence[PaddedBatches]) -> None:
    """Raises ValueError if clients' batches are padded, where a network would count padding."""
    sizes = np.asarray(data.sizes)
    for batches in padded:
        clients = np.arange(len(sizes)) if batches.clients is None else batches.clients
        # Whether all clients train on the same data set, such as a public one.
        is_shared = batches.num_examples == batches.capacity and not batches.left_out
        if isinstance(data, StreamedData):  # a cohort's columns are as long as it needs
            is_shared &= batches.capacity != data.capacity
        counts = np.minimum(sizes[clients], batches.capacity)
        counts = counts - np.minimum(batches.left_out, counts // 2)
        if is_shared:
            counts = np.full_like(counts, batches.capacity)
        for client, count in zip(clients, counts, strict=True):
            if count % batches.batch_size:
                verb = "trains on" if batches.left_out else "has"
                who = "Clients train on" if is_shared else f"Client {client} {verb}"
                why = not_a_multiple_text(f"{who} {count}", batches.batch_size)
                raise ValueError(padding_message(why, batches.counted_in))


def _shape(column: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(column), jax.dtypes.canonicalize_dtype(column.dtype))
