"""Tracing of an algorithm's functions: arrays of strong types, and functions that are traced once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


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
