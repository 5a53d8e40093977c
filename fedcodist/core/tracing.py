"""How an algorithm's functions are traced: to arrays of lasting types, and once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def strongly_typed(tree: PyTree) -> PyTree:
    """The same arrays, of types that JAX does not let others change.

    A program compiles again for an array that was weakly typed, as `jnp.full(shape, 0.5)` is, and is
    not any more.
    """

    def strong(leaf):
        is_key = jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf, jnp.result_type(leaf))

    return jax.tree.map(strong, tree)


def traced_once(round_: Callable[..., Any]) -> Callable[..., Any]:
    """An algorithm's round, which JAX traces once for all that call it with the same shapes.

    Of large networks that takes seconds. What is compiled is the same.
    """
    return jax.jit(round_, inline=True)
