"""Checks of the clients and examples that an algorithm selects, before anything compiles."""

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.inputs import Selection
from fedcodist.core.shape_checks import kind_of, shape_of
from fedcodist.core.user_functions import traced

# How many rounds a user's rows of other data sets are looked at.
_ROUNDS_WITH_ROWS = 16


def check_selection(algorithm: Any, data: Any) -> Selection:
    """The shapes of `algorithm.select`. Raises ValueError or TypeError if they do not fit the data."""
    key = keys.key_shape()
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    selection = traced("algorithm.select", algorithm.select, integer, key)
    parts: list[Any] = [getattr(selection, name, None) for name in ("clients", "examples")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise TypeError(
            "algorithm.select must return a Selection of clients and examples, both mappings, got "
            f"{kind_of(selection)}."
        )
    for kind, names, allowed in (
        ("clients", parts[0], "[cohort]"),
        ("examples", parts[1], "[..., batch]"),
    ):
        for name, places in names.items():
            fits = places.ndim == 1 or (places.ndim > 1 and kind == "examples")
            if not fits or not jnp.issubdtype(places.dtype, jnp.integer):
                raise TypeError(
                    f"algorithm.select must return {kind}[{name!r}] as integers {allowed}, got "
                    f"{shape_of(places)}."
                )
    if missing := sorted(set(selection.examples) - set(data.data_sets)):
        raise ValueError(
            f"data must have the data set {missing[0]!r}, which {algorithm.name} reads, it has "
            f"{sorted(data.data_sets)}."
        )
    if missing := sorted(set(algorithm.client_states) - set(selection.clients)):
        raise ValueError(
            f"algorithm.select must return the clients of every pool of algorithm.client_states, "
            f"{missing[0]!r} is missing."
        )
    return selection


def check_selected(algorithm: Any, data: Any, rounds: int, seed: int) -> None:
    """Checks what a user's function selects for the first seed: clients, and rows of some rounds.

    Raises:
      ValueError: names the pool and the round, if a client is not of the pool, or is named twice; names
        the data set and the round, if it has no such row.
    """
    select, *closed_over = _with_closed_over(algorithm.select)
    if not _is_of_the_library(select):
        _check_clients(algorithm, rounds, seed)
    if not all(map(_is_of_the_library, (select, *closed_over))):  # a user's `select_examples`
        _check_rows(algorithm, data, rounds, seed)


def _is_of_the_library(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("fedcodist.")


def _with_closed_over(function: Any) -> list[Any]:
    """A function, and those over which it and these are closed; each once."""
    found = [function]
    for one in found:
        for cell in getattr(one, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                value = cell.cell_contents
                found += [value] if inspect.isfunction(value) and value not in found else []
    return found


def _check_clients(algorithm: Any, rounds: int, seed: int) -> None:
    clients_of = lambda round: algorithm.select(round, jax.random.key(seed)).clients
    # One round at a time, since what a selection computes may be large.
    selected = jax.jit(functools.partial(jax.lax.map, clients_of))(jnp.arange(max(rounds, 1)))
    for name, of_rounds in selected.items():
        states = algorithm.client_states.get(name)
        of_pool = np.arange(algorithm.num_clients) if states is None else states.clients
        for round, clients in enumerate(np.asarray(of_rounds)):
            found, counts = np.unique(clients, return_counts=True)
            outside = found[~np.isin(found, of_pool)]
            wrong = outside if len(outside) else found[counts > 1]
            if len(wrong):
                is_other = len(outside) and 0 <= wrong[0] < algorithm.num_clients
                why = ", which is not of this pool" if is_other else " twice"
                raise ValueError(
                    f"algorithm.select must return clients[{name!r}] from 0 to "
                    f"{algorithm.num_clients - 1}, none twice, got {wrong[0]} in round {round}"
                    f"{why if is_other or not len(outside) else ''}."
                )


def _check_rows(algorithm: Any, data: Any, rounds: int, seed: int) -> None:
    """Looks at the first, the last and a few other rounds, since all rows of a run may be many."""

    def ends_of(round: jax.Array) -> dict[str, jax.Array]:
        examples = algorithm.select(round, jax.random.key(seed)).examples
        read = {name: rows for name, rows in examples.items() if rows.size}
        return {name: jnp.stack([rows.min(), rows.max()]) for name, rows in read.items()}

    some = np.unique(np.linspace(0, max(rounds, 1) - 1, _ROUNDS_WITH_ROWS).astype(int))
    ends = jax.jit(lambda indices: jax.lax.map(ends_of, indices))(jnp.asarray(some))
    for name, of_rounds in ends.items():
        count = min(map(len, data.data_sets[name].values()))
        for round, (lowest, highest) in zip(some, np.asarray(of_rounds), strict=True):
            if lowest < -1 or highest >= count:
                raise ValueError(
                    f"algorithm.select must return examples[{name!r}] from 0 to {count - 1}, or -1 in "
                    f"rounds that read none, got {lowest if lowest < -1 else highest} in round {round}."
                )
