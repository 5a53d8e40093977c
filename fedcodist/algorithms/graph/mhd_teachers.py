"""MHD's teachers: stale checkpoints, exchanged at the beginning of a round and evaluated in every step.

Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR 2023,
https://arxiv.org/abs/2211.15774.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.graph import mhd_exchange
from fedcodist.algorithms.graph.mhd_exchange import ExchangeSchedule
from fedcodist.algorithms.graph.mhd_host_checkpoints import HostBanks
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.core.inputs import Round
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.models.multi_headed import HeadedOutputs

# (architecture, slot) -> a checkpoint
Checkpoint = Callable[[str, jax.Array], Variables]
# (entries [teachers, 2], batch, pupil's model, its variables) -> teachers' outputs [teachers, ...]
Teach = Callable[[jax.Array, Batch, Model, Variables], HeadedOutputs]


def exchanged(
    schedule: ExchangeSchedule | None,
    host_banks: HostBanks | None,
    state: Any,
    round: Round,
) -> tuple[jax.Array, dict[str, Variables], Checkpoint | None]:
    """Buffers and banks after the exchange at the beginning of a round, and how to read a checkpoint.

    Args:
      schedule: of the run; None if there are no teachers.
      host_banks: the banks if checkpoints are on the host, else None.
      state: MHDState after the previous round.
      round: as in `FederatedAlgorithm.round`.
    """
    if schedule is None:
        return state.buffers, state.banks, None
    models = {name: learner.variables for name, learner in state.learners.items()}
    if host_banks is not None:
        buffers = mhd_exchange.refresh_buffers(schedule, state.buffers, round.index)
        done = host_banks.put(round.key, round.index, models)
        return buffers, state.banks, functools.partial(host_banks.read, round.key, done)
    buffers, banks = mhd_exchange.refresh(schedule, state.buffers, state.banks, models, round.index)
    return buffers, banks, lambda name, slot: jax.tree.map(lambda leaf: leaf[slot], banks[name])


def teaching(
    groups: Mapping[str, PartyGroup],
    schedule: ExchangeSchedule | None,
    checkpoint: Checkpoint | None,
) -> Teach:
    """Returns (entries [teachers, 2], batch, model, variables) -> teachers' outputs [teachers, ...].

    Teachers are in evaluation mode. `model` and `variables` are the student's; its outputs have the same
    shape as a teacher's.
    """

    def teach(
        entries: jax.Array, batch: Batch, model: Model, variables: Variables
    ) -> HeadedOutputs:
        shapes = jax.eval_shape(lambda: model.apply(variables, batch)[0])
        zeros = lambda *lead: jax.tree.map(
            lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), shapes
        )
        if schedule is None or checkpoint is None:
            return zeros(0)

        def outputs_of(name: str) -> Callable[[jax.Array, Batch], HeadedOutputs]:
            if not schedule.num_slots[name]:  # this architecture never teaches
                return lambda slot, batch: zeros()
            return lambda slot, batch: groups[name].model.apply(checkpoint(name, slot), batch)[0]

        branches = [outputs_of(name) for name in groups]
        one_teacher = lambda entry: jax.lax.switch(entry[0], branches, entry[1], batch)
        return jax.lax.map(one_teacher, entries)

    return teach
