"""Checks by shape, before anything compiles: an algorithm's functions fit each other and the data."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.checks import check_names
from fedcodist.core.hyper_shapes import hyper_shapes, without_value
from fedcodist.core.input_types import InputTypes, noted_inputs
from fedcodist.core.inputs import Inputs, Round, Selection
from fedcodist.core.padding_checks import PaddedBatches, collected_padding
from fedcodist.core.shape_checks import check_same, check_variables, kind_of, shape_of
from fedcodist.core.tracing import remembered_by_round, strongly_typed, traced_once
from fedcodist.core.user_functions import WrongResult, traced
from fedcodist.run.metrics_lines import WHAT_IS_MEASURED
from fedcodist.run.selection_checks import check_selection

PyTree = Any


def check_algorithm(algorithm: Any, data: Any) -> tuple[list[PaddedBatches], InputTypes]:
    """Checks by shape that an algorithm's functions fit together and fit the data.

    Args:
      algorithm: a FederatedAlgorithm.
      data: ResidentData or StreamedData.

    Returns:
      The batches of a round that may be padded although the network's batch statistics count padding,
      and column -> the types in which networks got it in training.

    Raises:
      ValueError, TypeError: names the function, what it returns and what it must return.
    """
    _check_names_of_models(algorithm)
    key = keys.key_shape()
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    state = traced("algorithm.init", lambda key: strongly_typed(algorithm.init(key)), key)
    _check_no_keys("algorithm.init must return", state)
    selection = check_selection(algorithm, data)
    _check_no_keys(
        "algorithm.client_states must hold",
        {pool: states.first for pool, states in algorithm.client_states.items()},
    )
    client_states = {
        pool: _client_states(algorithm, pool, selection) for pool in algorithm.client_states
    }
    hyper = hyper_shapes(algorithm.hyper)
    inputs = data.shapes(selection)
    arguments = (state, client_states, Round(integer, key, inputs), hyper)
    with collected_padding() as padded, noted_inputs() as input_types:
        new_state, new_client_states, metrics = _round(algorithm, selection, arguments)
    check_same("algorithm.round must return a state as algorithm.init makes it", state, new_state)
    check_same(
        "algorithm.round must return client states as it gets them",
        client_states,
        new_client_states,
    )
    _check_metrics(algorithm, metrics)
    for name, predictor in algorithm.predictors.items():
        where = f"algorithm.predictors[{name!r}].variables"
        check_variables(where, traced(where, predictor.variables, state))
    return (
        remembered_by_round(algorithm.round, "padded batches", padded),
        remembered_by_round(algorithm.round, "input types", input_types),
    )


def _check_names_of_models(algorithm: Any) -> None:
    """Raises ValueError if two models have one name, and so one place in the results, or a bad name."""
    models = [
        (model, f"algorithm.predictors[{name!r}]")
        for name, predictor in algorithm.predictors.items()
        for model in predictor.members or (name,)
    ] + [
        (model, f"algorithm.personal_models[{pool!r}]")
        for pool, personal in algorithm.personal_models.items()
        for model in personal
    ]
    where_of: dict[str, str] = {}
    for model, where in models:
        check_names(where, [model])
        if model in where_of:
            raise ValueError(
                f"{where} must have a name of its own for every model, got {model!r}, which is also a "
                f"model of {where_of[model]}."
            )
        where_of[model] = where


def _check_no_keys(must: str, tree: PyTree) -> None:
    """Raises TypeError for a typed key, which a checkpoint cannot hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise TypeError(
                f"{must} arrays that a checkpoint can hold, got a key at "
                f"{jax.tree_util.keystr(path)}: keep jax.random.key_data of it, and make it a key again "
                "with jax.random.wrap_key_data."
            )


def _round(algorithm: Any, selection: Selection, arguments: tuple[Any, ...]) -> Any:
    try:
        result = jax.eval_shape(traced_once(algorithm.round), *arguments)
        return _as_round_result(result)
    except Exception:  # traced again, for a message that names the function
        return traced(
            "algorithm.round",
            lambda *parts: _as_round_result(algorithm.round(*parts)),
            *arguments,
            hint=f": {_columns(arguments[2].inputs)} before preprocessing, and algorithm.select names "
            f"clients of {sorted(selection.clients)} and the data sets {sorted(selection.examples)}",
            about_none=without_value(algorithm.hyper),
        )


def _columns(inputs: Inputs) -> str:
    """The columns that a round can read."""
    of_clients = sorted({name for cohort in inputs.cohorts.values() for name in cohort.columns})
    of_sets = [
        f"{name!r} has {sorted(examples.columns)}" for name, examples in inputs.examples.items()
    ]
    return " and ".join([f"clients' examples have the columns {of_clients}", *of_sets])


def _as_round_result(result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 3:
        raise WrongResult(
            f"must return three results, (state, client_states, metrics), got {kind_of(result)}."
        )
    if not isinstance(result[2], Mapping):
        raise WrongResult(f"must return metrics as a mapping of names, got {kind_of(result[2])}.")
    _check_metric_names(result[2])
    return result


def _check_metric_names(metrics: Mapping[Any, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(name, str) or not all(name.partition("/")):
            raise WrongResult(f"must name its metrics '<pool>/<metric>', got {name!r}.")
        if name.partition("/")[2] in WHAT_IS_MEASURED:
            raise WrongResult(
                f"must not name a metric {name.partition('/')[2]!r}, which metrics lines use as a key "
                f"of their own, got {name!r}."
            )
        if isinstance(value, str | bytes) or (
            not hasattr(value, "dtype") and not np.isscalar(value)
        ):
            raise WrongResult(f"must return metrics that are arrays, {name!r} is {kind_of(value)}.")


def _check_metrics(algorithm: Any, metrics: Mapping[str, Any]) -> None:
    for pool in algorithm.communication:
        if f"{pool}/finite" not in metrics:
            raise ValueError(
                f"algorithm.round must return the metric '{pool}/finite', whether what the clients of "
                f"{pool!r} sent is finite: every key of algorithm.communication needs one, got "
                f"{sorted(metrics)}."
            )
        for name in (f"{pool}/finite", f"{pool}/finite_model"):
            is_finite = metrics.get(name)
            if is_finite is not None and (is_finite.shape, is_finite.dtype) != ((), jnp.bool_):
                raise ValueError(
                    f"algorithm.round must return {name!r} as one bool, got {shape_of(is_finite)}."
                )
    for name, value in metrics.items():
        if not jnp.issubdtype(value.dtype, jnp.number) and value.dtype != jnp.bool_:
            raise TypeError(
                f"algorithm.round must return metrics of numbers, {name!r} is {value.dtype}."
            )


def _client_states(algorithm: Any, pool: str, selection: Selection) -> PyTree:
    (cohort,) = selection.clients[pool].shape

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        return jax.ShapeDtypeStruct((cohort, *np.shape(leaf)), dtype)

    return jax.tree.map(stacked, algorithm.client_states[pool].first)
