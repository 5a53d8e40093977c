"""MergedCodist: every round merges clients' pseudo-gradients with distillation from the other models.

"Heterogeneous Federated Learning Using Knowledge Codistillation" (Lichtarge et al., 2023), algorithm 2.
https://arxiv.org/abs/2310.02549
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.codistillation import (
    CodistillationHyper,
    TeachingHyper,
    check_codistillation,
    codistill,
    loss_metrics,
)
from fedcodist.algorithms.pools.gradient_merging import merge_gradients
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import train_pools, update_servers
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_function, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices

PyTree = Any

_ROUNDS_LOOKED_AT = 10_000


class MergedHyper(NamedTuple):
    """All floats of MergedCodist; traced.

    Attributes:
      codistillation: methods' and teaching hyper-parameters.
      alpha: pool -> weight of the clients' pseudo-gradient, in [0, 1].
      skip: 1 leaves distillation out in rounds whose alphas are all 1, when its weight is 0; 0 always
        computes it.
    """

    codistillation: CodistillationHyper
    alpha: Mapping[str, Any]
    skip: Any = 0.0


def merged_codistillation(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    num_rounds: int,
    alpha: float | Mapping[str, float] = 0.7,
    alpha_schedule: Callable[[Any, jax.Array], Any] = lambda alpha, round: alpha,
    skip_at_alpha_one: bool = False,
    distillation: Distillation = Distillation(steps=32),
    teaching: Mapping[str, TeachingHyper] | None = None,
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Every round merges the clients' pseudo-gradient with a step towards the other models.

    The models *before* the round's update are both the frozen teachers and the students' starting
    points. Let g be a pool's pseudo-gradient, and d its student's parameters at the start minus those at
    the end. The server optimizer then gets alpha g + (1 - alpha) d ||g|| / ||d|| in place of g. Batch
    statistics are those of the clients' aggregate; the students' are discarded.

    Args:
      pools: name -> Pool, two or more, composed of any single-model methods.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`. They need a
        column `label` if any `teaching` has a `label_interpolation`.
      num_rounds: rounds T of the whole run, for the decay of distillation learning rates.
      alpha: weight of the pseudo-gradient in [0, 1], one for all pools or pool -> weight.
      alpha_schedule: (alpha, round from 0) -> alpha of that round, in [0, 1].
      skip_at_alpha_one: leave distillation out in rounds in which every alpha is 1.
      distillation: steps, batch size, optimizer, augmentation.
      teaching: pool -> TeachingHyper; the default for pools that are not given.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(merged_codistillation, locals())
    pools, codistillation = check_codistillation(
        pools, distillation, teaching, num_rounds, num_unlabelled
    )
    alphas = _checked_alphas(alpha, alpha_schedule, pools, num_rounds)
    _check_teachers(codistillation)
    hyper = MergedHyper(codistillation, alphas, float(skip_at_alpha_one))

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {UNLABELLED: unlabelled_indices(key, round, distillation, num_unlabelled)}

    def round_(
        state: dict[str, PyTree], client_states: PyTree, round: Round, hyper: MergedHyper
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        methods, teaching = hyper.codistillation
        # Algorithm 2, in every round: clients' pseudo-gradients g at the models theta^t.
        trained = train_pools(pools, state, client_states, round, methods, execution)
        before = {name: pool.method.variables(state[name]) for name, pool in pools.items()}

        def distilled_directions() -> tuple[dict[str, PyTree], dict[str, jax.Array]]:
            # Teachers and students start at theta^t too; d is theta^t minus the student.
            distilled = codistill(pools, before, round, teaching, distillation, num_rounds)
            directions = {
                name: jax.tree.map(jnp.subtract, before[name].params, student.params)
                for name, student in distilled.students.items()
            }
            return directions, loss_metrics(distilled, pools)

        def no_directions() -> tuple[dict[str, PyTree], dict[str, jax.Array]]:
            directions = {name: jax.tree.map(jnp.zeros_like, before[name].params) for name in pools}
            return directions, loss_metrics(None, pools)

        alpha_now = {
            name: alpha_schedule(value, round.index) for name, value in hyper.alpha.items()
        }
        all_one = jnp.all(jnp.stack([jnp.asarray(value) for value in alpha_now.values()]) == 1)
        is_skipped = jnp.logical_and(hyper.skip > 0, all_one)
        directions, losses = jax.lax.cond(is_skipped, no_directions, distilled_directions)

        # The server optimizer gets alpha g + (1 - alpha) d ||g|| / ||d|| in place of g.
        merged = {
            name: aggregate._replace(
                pseudo_gradient=merge_gradients(
                    aggregate.pseudo_gradient, directions[name], alpha_now[name]
                )
            )
            for name, aggregate in trained.aggregates.items()
        }
        state = update_servers(pools, state, merged, round.index, methods)
        return state, trained.client_states, trained.metrics | losses

    return assemble(
        "merged_codistillation",
        pools,
        columns,
        hyper,
        round_,
        select_examples,
        {UNLABELLED: num_unlabelled},
        hyper_of_methods=lambda hyper: hyper.codistillation.methods,
        num_rounds=num_rounds,
    )


def _checked_alphas(
    alpha: float | Mapping[str, float],
    alpha_schedule: Callable[[Any, jax.Array], Any],
    pools: Mapping[str, Pool],
    num_rounds: int,
) -> dict[str, Any]:
    """Pool -> alpha; raises ValueError or TypeError that names `alpha` or its schedule."""
    check_function("alpha_schedule", alpha_schedule, ("alpha", "round"), "alpha")
    alphas = dict(alpha) if isinstance(alpha, Mapping) else dict.fromkeys(pools, alpha)
    if set(alphas) != set(pools):
        raise ValueError(f"alpha must name every pool of {list(pools)}, got {list(alphas)}.")
    for name, value in alphas.items():
        check_number(f"alpha[{name!r}]" if isinstance(alpha, Mapping) else "alpha", value, 0, 1)
    for value in {float(value) for value in alphas.values()}:
        _check_schedule(alpha_schedule, value, num_rounds)
    return alphas


def _check_teachers(codistillation: CodistillationHyper) -> None:
    """Raises ValueError for a student that has no teacher but itself."""
    for name, hyper in codistillation.teaching.items():
        if hyper.interpolation == 1 and not hyper.label_interpolation:
            raise ValueError(
                f"teaching[{name!r}].interpolation must be below 1, got {hyper.interpolation}: a "
                "student that learns only from itself does not move, and its rounding error would be "
                "scaled up to the norm of the pseudo-gradient."
            )


def _check_schedule(
    alpha_schedule: Callable[[Any, Any], Any], alpha: float, num_rounds: int
) -> None:
    """Raises ValueError for a value outside [0, 1]. Of very many rounds only some are checked."""
    count = min(num_rounds, _ROUNDS_LOOKED_AT)
    for round in np.linspace(0, num_rounds - 1, count).astype(np.int32):
        value = float(alpha_schedule(alpha, round))
        if not -1e-6 <= value <= 1 + 1e-6:
            raise ValueError(
                f"alpha_schedule must give values between 0 and 1, got {value:g} in round {round}."
            )
