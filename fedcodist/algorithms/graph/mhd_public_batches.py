"""MHD's public batches: which a client has in a step, and what it learns from its teachers on them.

Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR 2023,
https://arxiv.org/abs/2211.15774.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.graph.mhd_losses import HeadDistillation, distillation_gradient
from fedcodist.algorithms.graph.mhd_teachers import Teach
from fedcodist.core import batches, keys
from fedcodist.core.local_steps import FurtherTerm
from fedcodist.core.model import Model, Variables
from fedcodist.core.shuffling import stream_positions

PyTree = Any


def public_indices(
    key: jax.Array, round: jax.Array, shape: tuple[int, int, int], num_public: int
) -> jax.Array:
    """Indices of each client's public examples of a round, int32 [clients, steps, batch]."""
    clients, steps, batch_size = shape

    def indices(client: jax.Array) -> jax.Array:
        return stream_positions(
            keys.derive(key, "public", client),
            jnp.asarray(round, jnp.uint32) * (steps * batch_size),
            steps * batch_size,
            num_public,
        )

    return jax.vmap(indices)(jnp.arange(clients)).reshape(shape)


def public_term(
    model: Model,
    columns: Mapping[str, jax.Array],
    indices: jax.Array,
    buffer: jax.Array,
    teach: Teach,
    distillation: HeadDistillation,
    weights: tuple[Any, Any],
) -> FurtherTerm:
    """Returns a step's second half, on a public batch, as `train_steps` wants it.

    Args:
      model: the client's.
      columns: of the data set `public`.
      indices: the client's examples of the round, int32 [steps, batch].
      buffer: its checkpoints, int32 [buffer, 2].
      teach: what checkpoints answer.
      distillation: how the client learns.
      weights: nu_emb and nu_aux.
    """

    def term(
        variables: Variables, step: jax.Array, index: jax.Array, key: jax.Array
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        # A new batch in every step.
        input_key, positions = keys.derive(key, "input"), jnp.arange(distillation.batch_size)
        batch = batches.read(columns, indices[index], distillation.preprocess, input_key, positions)
        # Delta random checkpoints of the buffer teach: the phi_j of equation 1.
        drawn = jax.random.choice(
            keys.derive(key, "teachers"), len(buffer), (distillation.teachers,), replace=False
        )
        teachers = teach(buffer[drawn], batch, model, variables)
        return distillation_gradient(model, variables, batch, teachers, distillation, weights, key)

    return term
