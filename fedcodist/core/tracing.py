"""Tracing of an algorithm's functions: arrays of strong types, and functions that are traced once."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

PyTree = Any
Notes = TypeVar("Notes")
_NOTES_OF_ROUNDS: Any = weakref.WeakKeyDictionary()  # an algorithm's round -> kind -> notes


def strongly_typed(tree: PyTree) -> PyTree:
    """The same arrays with strong types.

    A weakly typed array, such as `jnp.full(shape, 0.5)`, becomes strongly typed in a program, and
    the program then compiles again for it.
    """

    def strong(leaf: Any) -> jax.Array:
        is_key = jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf, jnp.result_type(leaf))

    return jax.tree.map(strong, tree)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which JAX traces once for all calls with the same shapes.

    Tracing large networks takes seconds. The compiled program is the same.
    """
    return jax.jit(function, inline=True)


def remembered_by_round(round_: Callable[..., Any], kind: str, notes: Notes) -> Notes:
    """The notes that checks took while an algorithm's round was traced.

    JAX traces a round once (`traced_once`), so a later check takes no notes. It gets those of the first.

    Args:
      round_: the algorithm's.
      kind: what the notes are about.
      notes: those taken now, a collection; empty if JAX had traced the round before.
    """
    remembered = _NOTES_OF_ROUNDS.setdefault(round_, {})
    if notes:
        remembered[kind] = notes
    return remembered.get(kind, notes)
