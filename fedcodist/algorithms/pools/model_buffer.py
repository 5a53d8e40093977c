"""FedSDD's buffer: the aggregated models of the last R rounds, which are the members of an ensemble.

A buffer has leaves [rounds kept, models, ...]. Its weights, float [rounds kept], are 1 where it already
has a round's models.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.model import Variables
from fedcodist.distillation.ensembles import Ensemble

PyTree = Any


def first_buffer(models: Variables, rounds_kept: int) -> tuple[Variables, jax.Array]:
    """(buffer, weights) of the initial models, leaves [models, ...], alone."""
    room = lambda leaf: jnp.zeros((rounds_kept, *leaf.shape), leaf.dtype).at[0].set(leaf)
    return jax.tree.map(room, models), jnp.zeros(rounds_kept).at[0].set(1)


def with_newest(
    buffer: Variables, weights: jax.Array, newest: Variables, round: jax.Array
) -> tuple[Variables, jax.Array]:
    """(buffer, weights) with a round's models, leaves [models, ...], in place of the oldest."""
    put = lambda kept, new: kept.at[round % len(weights)].set(new)
    return jax.tree.map(put, buffer, newest), put(weights, 1)


def ensemble_of(buffer: Variables, weights: jax.Array) -> Ensemble:
    """The ensemble of all models in the buffer; before round 1 the initial ones."""
    count = jax.tree.leaves(buffer.params)[0].shape[1]
    members = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), buffer)
    return Ensemble(members, jnp.repeat(jnp.asarray(weights), count))
