"""MergedCodist's combination of a pseudo-gradient with a distillation direction."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def merge_gradients(pseudo_gradient: PyTree, direction: PyTree, alpha: jax.Array | float) -> PyTree:
    """Returns alpha g + (1 - alpha) d ||g|| / ||d|| (Knowledge Codistillation, algorithm 2).

    The direction is rescaled to the pseudo-gradient's norm, so the server optimizer gets values of the
    size for which it is tuned. Norms are over the whole tree. If d is 0 the result is alpha g.

    Args:
      pseudo_gradient: g, the clients' aggregate.
      direction: d, parameters before distillation minus parameters after it.
      alpha: weight of the clients' part, in [0, 1].

    Raises:
      ValueError: the pseudo-gradient does not have the parameters' structure, such as FetchSGD's table.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (pseudo_gradient, direction)]
    if structures[0] != structures[1]:
        raise ValueError(
            "pseudo_gradient must be like the parameters to be merged with a direction."
        )
    gradient_norm = optax.tree.norm(pseudo_gradient)
    direction_norm = optax.tree.norm(direction)
    tiny = jnp.finfo(direction_norm.dtype).tiny
    present = direction_norm > tiny
    scale = jnp.where(present, gradient_norm / jnp.where(present, direction_norm, 1), 0)

    def merge(gradient: jax.Array, towards: jax.Array) -> jax.Array:
        share = jnp.asarray(alpha, gradient.dtype)
        return share * gradient + (1 - share) * scale.astype(gradient.dtype) * towards

    return jax.tree.map(merge, pseudo_gradient, direction)
