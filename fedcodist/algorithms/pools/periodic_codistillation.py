"""PeriodicCodist: every p rounds the pools' models are replaced by students that learn from each other.

"Heterogeneous Federated Learning Using Knowledge Codistillation" (Lichtarge et al., 2023), algorithm 1.
https://arxiv.org/abs/2310.02549
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.codistillation import (
    CodistillationHyper,
    TeachingHyper,
    check_codistillation,
    codistill,
    loss_metrics,
)
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import set_models, train_pools, update_servers
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices

PyTree = Any


def periodic_codistillation(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    num_rounds: int,
    period: int = 200,
    distillation: Distillation = Distillation(steps=200),
    teaching: Mapping[str, TeachingHyper] | None = None,
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Every `period` rounds the pools' models are replaced by students of each other.

    Each round is one round of every pool's own method. After rounds period, 2 period, ... (counted
    from 1) frozen copies of the updated models teach students that start from the same values. The
    students replace the models, and the server optimizers' moments start afresh. Learning-rate
    schedules continue.

    Args:
      pools: name -> Pool, two or more, composed of any single-model methods.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`. They need a
        column `label` if any `teaching` has a `label_interpolation`.
      num_rounds: rounds T of the whole run, for the decay of distillation learning rates.
      period: rounds from one codistillation to the next.
      distillation: steps, batch size, optimizer, augmentation.
      teaching: pool -> TeachingHyper; the default for pools that are not given.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(periodic_codistillation, locals())
    pools, hyper = check_codistillation(pools, distillation, teaching, num_rounds, num_unlabelled)
    check_integer("period", period, low=1)
    if period > num_rounds:
        warnings.warn(
            f"period={period} is longer than the run of {num_rounds} rounds: nothing will be distilled.",
            stacklevel=2,
        )

    def is_due(round: jax.Array) -> jax.Array:
        return (round + 1) % period == 0

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        size = (distillation.steps, distillation.batch_size)
        places = jax.lax.cond(
            is_due(round),
            lambda: unlabelled_indices(key, round // period, distillation, num_unlabelled),
            lambda: jnp.full(size, -1, jnp.int32),
        )
        return {UNLABELLED: places}

    def round_(
        state: dict[str, PyTree], client_states: PyTree, round: Round, hyper: CodistillationHyper
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        # Algorithm 1, in every round t: one round of each model's own method.
        trained = train_pools(pools, state, client_states, round, hyper.methods, execution)
        state = update_servers(pools, state, trained.aggregates, round.index, hyper.methods)

        def replace_models(
            state: dict[str, PyTree],
        ) -> tuple[dict[str, PyTree], dict[str, jax.Array]]:
            # If p divides t: frozen copies of the updated models teach students with the same start,
            updated = {name: pool.method.variables(state[name]) for name, pool in pools.items()}
            distilled = codistill(pools, updated, round, hyper.teaching, distillation, num_rounds)
            # the students replace the models, and the server optimizers start afresh.
            state = set_models(pools, state, distilled.students, reset_optimizer=True)
            return state, loss_metrics(distilled, pools)

        def keep_models(state: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, jax.Array]]:
            return state, loss_metrics(None, pools)

        state, losses = jax.lax.cond(is_due(round.index), replace_models, keep_models, state)
        return state, trained.client_states, trained.metrics | losses

    return assemble(
        "periodic_codistillation",
        pools,
        columns,
        hyper,
        round_,
        select_examples,
        {UNLABELLED: num_unlabelled},
        num_rounds=num_rounds,
    )
