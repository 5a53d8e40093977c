"""MHD's public batches: which examples a client gets in a step, and the distillation term on them.

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
    """Returns the distillation term of a step on a public batch, for `train_steps`.

    Args:
      model: the client's model.
      columns: of the data set `public`.
      indices: the client's examples of the round, int32 [steps, batch].
      buffer: its checkpoint buffer, int32 [buffer, 2].
      teach: computes the checkpoints' outputs.
      distillation: how the client learns.
      weights: nu_emb and nu_aux.
    """

    def term(
        variables: Variables, step: jax.Array, index: jax.Array, key: jax.Array
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        # Every step has a new batch.
        input_key, positions = keys.derive(key, "input"), jnp.arange(distillation.batch_size)
        batch = batches.read(columns, indices[index], distillation.preprocess, input_key, positions)
        # Delta random checkpoints of the buffer teach: the phi_j of equation 1.
        drawn = jax.random.choice(
            keys.derive(key, "teachers"), len(buffer), (distillation.teachers,), replace=False
        )
        teachers = teach(buffer[drawn], batch, model, variables)
        return distillation_gradient(model, variables, batch, teachers, distillation, weights, key)

    return term
