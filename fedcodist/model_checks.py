"""What an experiment's models are checked for with its data, by shape: nothing compiles."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist import padded_statistics
from fedcodist.evaluation import EvaluationSplit, evaluate
from fedcodist.federated_algorithm import FederatedAlgorithm, KeptModel, Predictor, single_model
from fedcodist.model import Variables
from fedcodist.sources import ResidentData, StreamedData

PyTree = Any


def check_models(experiment: Any) -> None:
    """Raises one line for models that are wrong for an experiment's data.

    That is a loss or a metric that is not one number per example of a split, or a network whose batch
    statistics would count what only fills up a client's last batch.

    Args:
      experiment: an `Experiment`.
    """
    algorithm = experiment.algorithm
    state = jax.eval_shape(algorithm.init, jax.eval_shape(lambda: jax.random.key(0)))
    predictors = dict(_predictors(algorithm, state))
    _check_evaluation(experiment, predictors)
    if any(jax.tree.leaves(variables.mutable) for _, variables in predictors.values()):
        _check_statistics(experiment, state)


def _predictors(
    algorithm: FederatedAlgorithm, state: PyTree
) -> Iterator[tuple[str, tuple[Predictor, Variables]]]:
    """Name -> predictor and the shapes of one model's Variables, clients' kept models too."""
    for name, predictor in algorithm.predictors.items():
        variables = jax.eval_shape(predictor.variables, state)
        if predictor.members:
            variables = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), variables
            )
        yield name, (predictor, variables)
    for pool, models in algorithm.kept_models.items():
        row = algorithm.rows[pool].first
        for name, kept in models.items():
            yield name, (_predictor_of(kept), jax.eval_shape(kept.variables, state, row))


def _predictor_of(kept: KeptModel) -> Predictor:
    return single_model(kept.model, lambda state: state)


def _check_evaluation(
    experiment: Any, predictors: Mapping[str, tuple[Predictor, Variables]]
) -> None:
    """Evaluates every model on every split, by shape."""
    seen = set()
    for split, data in {**experiment.splits, **experiment.final_splits}.items():
        columns = {name: _shape(column) for name, column in data.columns.items()}
        examples = EvaluationSplit(
            columns,
            jax.ShapeDtypeStruct((data.num_examples,), jnp.int32),
            jax.ShapeDtypeStruct((data.num_clients,), jnp.int8),
        )
        kinds = tuple((name, column.shape[1:], column.dtype) for name, column in columns.items())
        for name, (predictor, variables) in predictors.items():
            # Splits of the same columns, whatever their lengths, are one to a model's shapes.
            if (name, kinds) in seen:
                continue
            seen.add((name, kinds))

            def measured(variables, examples, predictor=predictor):
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
                first_line = (str(error).splitlines() or [""])[0]
                kind = TypeError if isinstance(error, TypeError) else ValueError
                missing = "there is no column " if isinstance(error, KeyError) else ""
                raise kind(f"model {name!r} on split {split!r}: {missing}{first_line}") from error


def _check_statistics(experiment: Any, state: PyTree) -> None:
    """Traces one round and asks whose batches are filled up."""
    algorithm: FederatedAlgorithm = experiment.algorithm
    columns, starts, sizes = _clients(experiment.data)

    def round_(state, columns, data_sets, key):
        selection = algorithm.select(jnp.asarray(0), key)
        data = ResidentData(
            columns, jnp.asarray(starts), jnp.asarray(sizes), data_sets, sizes.max()
        )
        rows = {
            pool: jax.tree.map(
                lambda leaf, n=len(selection.clients[pool]): jnp.broadcast_to(
                    leaf, (n, *jnp.shape(leaf))
                ),
                kept.first,
            )
            for pool, kept in algorithm.rows.items()
        }
        inputs = data.read(selection)
        return algorithm.round(
            state, rows, inputs, jnp.asarray(0), key, algorithm.hyper, axis_name=None
        )

    data_sets = {
        name: {column: _shape(values) for column, values in each.items()}
        for name, each in experiment.data.data_sets.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    with padded_statistics.collected() as found:
        jax.eval_shape(round_, state, columns, data_sets, key)
    for filled in found:
        clients = np.arange(len(sizes)) if filled.clients is None else filled.clients
        own = np.minimum(sizes[clients], filled.capacity)
        if filled.is_shared:
            own = np.full_like(own, filled.capacity)
        for client, size in zip(clients, own, strict=True):
            if size % filled.batch_size:
                who = "clients train on" if filled.is_shared else f"client {client} has"
                why = padded_statistics.no_multiple(f"{who} {size}", filled.batch_size)
                raise ValueError(padded_statistics.counted(why))


def _clients(data: ResidentData | StreamedData) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Shapes of the clients' columns, and where each one's examples begin and how many there are."""
    columns: Mapping[str, Any]
    if isinstance(data, StreamedData):
        columns, sizes = data.federated.columns, data.federated.client_sizes
        starts = data.federated.offsets[:-1]
    else:
        columns, starts, sizes = data.columns, data.starts, data.sizes
    shapes = {name: _shape(column) for name, column in columns.items()}
    return shapes, np.asarray(starts, np.int32), np.asarray(sizes, np.int32)


def _shape(column: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(column), jax.dtypes.canonicalize_dtype(column.dtype))
