"""Schedules: hyper-parameters that change over the rounds."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_function, check_integer, check_number
from fedcodist.core.hyper_shapes import hyper_shape
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.shape_checks import check_same
from fedcodist.core.user_functions import traced

PyTree = Any
Schedule = Callable[[Any, jax.Array], jax.Array]  # (initial value, round) -> value


def scheduled(
    algorithm: FederatedAlgorithm, schedules: Mapping[str, Schedule]
) -> FederatedAlgorithm:
    """The algorithm with hyper-parameters that change over the rounds, such as clients' learning rates.

    A round gets the values of its index; nothing is compiled anew. Models that clients fine-tune for an
    evaluation are trained with the initial values. A method with a schedule of its own, such as the
    `schedule` of `fed_avg`'s server, applies it to the value that it gets here.

    Args:
      algorithm: of pools, of parties or on a graph.
      schedules: name of a hyper-parameter -> function (its value in `algorithm.hyper`, round from 0) ->
        its value in that round. The name of a field, such as "client_learning_rate", stands for this
        field in all pools, and "small.client_learning_rate" for that of the pool "small".

    Raises:
      ValueError: a name is of no hyper-parameter, or two names are of the same one.
      ValueError, TypeError: a schedule is no function of these arguments, cannot be traced, or returns
        something else than a value as it gets.
    """
    check_arguments(scheduled, locals())
    for name, schedule in schedules.items():
        check_function(f"schedules[{name!r}]", schedule, ("value", "round"), "value")
    leaves = jax.tree_util.tree_leaves_with_path(algorithm.hyper)
    paths = [_fields(path) for path, _ in leaves]
    of_paths = [[name for name in schedules if _is_of(path, name)] for path, _ in leaves]
    for name in schedules:
        if not any(name in names for names in of_paths):
            allowed = {".".join(path[-1 - name.count(".") :]) for path in paths}
            raise ValueError(
                f"schedules must be of hyper-parameters of {algorithm.name}, which has "
                f"{sorted(allowed)}, got {name!r}."
            )
    if twice := [names for names in of_paths if len(names) > 1]:
        raise ValueError(f"schedules must not have two for one hyper-parameter, got {twice[0]}.")
    for (_, leaf), names in zip(leaves, of_paths, strict=True):
        for name in names:
            _check_value(f"schedules[{name!r}]", schedules[name], leaf)

    def at(hyper: PyTree, round: jax.Array) -> PyTree:
        values, structure = jax.tree.flatten(hyper)
        of_round = [
            schedules[names[0]](value, round) if names else value
            for names, value in zip(of_paths, values, strict=True)
        ]
        return jax.tree.unflatten(structure, of_round)

    def round_(state: PyTree, client_states: PyTree, round: Round, hyper: PyTree) -> Any:
        return algorithm.round(state, client_states, round, at(hyper, round.index))

    return algorithm._replace(round=round_)


def constant(value: Any, round: jax.Array) -> Any:
    """The same value in every round."""
    return value


def linear_decay(num_rounds: int) -> Schedule:
    """value (1 - t / T) for rounds t = 0 .. T - 1, and 0 from then on."""
    check_integer("num_rounds", num_rounds, low=1)
    return lambda value, round: value * jnp.maximum(1 - round / num_rounds, 0)


def exponential_decay(factor: float) -> Schedule:
    """value factor^t in round t; the factor is above 0 and at most 1, such as 0.99."""
    check_number("factor", factor, above=0, high=1)
    return lambda value, round: value * factor**round


def _check_value(where: str, schedule: Schedule, value: Any) -> None:
    """Raises ValueError or TypeError unless the schedule returns a value like this one."""
    shape = hyper_shape(value)
    returned = traced(where, schedule, shape, jax.ShapeDtypeStruct((), jnp.int32))
    check_same(f"{where} must return a value as it gets", shape, returned)


def _fields(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names on the way to a leaf: fields of tuples, and keys; places in a list are left out."""
    names = [getattr(step, "name", getattr(step, "key", None)) for step in path]
    return tuple(str(name) for name in names if name is not None)


def _is_of(path: tuple[Any, ...], name: str) -> bool:
    """Whether the path ends with the name, a field or a path of several with dots.

    A field may hold a mapping, such as pool -> number. Its name then stands for all values.
    """
    names, fields = tuple(name.split(".")), _fields(path)
    is_key = bool(path) and hasattr(path[-1], "key")
    ends = [fields, fields[:-1]] if is_key else [fields]
    return any(end[-len(names) :] == names for end in ends)
