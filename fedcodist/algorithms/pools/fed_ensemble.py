"""Fed-ensemble: groups of clients train several models in turn; the models predict as an ensemble.

"Fed-ensemble: Improving Generalization through Model Ensembling in Federated Learning" (Shi, Lai,
Kontar, Chowdhury, 2021). https://arxiv.org/abs/2107.10663
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.cohorts import draw_cohort
from fedcodist.algorithms.pools.grouped_models import (
    MAIN,
    first_models,
    groups_of,
    stacked_models,
    train_groups,
)
from fedcodist.algorithms.pools.pool import Pool, check_fixed_cohort, check_pool
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round, Selection
from fedcodist.core.method import ClientModels, FederatedAlgorithm
from fedcodist.distillation.ensembles import ENSEMBLE, ensemble_predictor, equal_weights

PyTree = Any


def fed_ensemble(
    pool: Pool,
    columns: Mapping[str, Any],
    num_models: int = 5,
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """K models of one architecture rotate among K groups of clients.

    Every K rounds all clients of the pool are divided anew into K strata. In round t equally many
    clients are drawn from each stratum. Those of stratum s train model (s + t) mod K, which becomes the
    mean of their trained models. If all clients take part, each trains every model once in K rounds. The
    models are evaluated, the first of which is named `main`, and the mean of their logits as `ensemble`.
    (In the paper every client has its own random order of models. Here every stratum has one, so that
    all models have equally many clients.) FedSDD with one round kept and without distillation is the
    same, but with groups drawn anew in every round. K = 1 is FedAvg.

    Args:
      pool: the clients, the size of the cohort of all groups together, and the clients' method.
      columns: the federated data's columns, for counting bytes.
      num_models: K, which divides the cohort's size.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_ensemble, locals())
    pool = check_pool("pool", pool)
    check_integer("num_models", num_models, low=1)
    if pool.cohort_size % num_models:
        raise ValueError(
            f"num_models must divide the cohort's {pool.cohort_size} clients into groups of equal "
            f"size, got {num_models}."
        )
    check_fixed_cohort("pool", "fed_ensemble", pool)
    if pool.method.privacy is not None:
        raise ValueError(
            "pool.method must not be private: fed_ensemble draws clients from strata that change "
            "slowly, a sampling without an accountant."
        )
    size = pool.cohort_size // num_models
    groups = groups_of(pool, [size] * num_models)

    def select(round: jax.Array, key: jax.Array) -> Selection:
        # Every K rounds the strata are drawn anew.
        shuffle = keys.derive(key, "strata", round // num_models)
        strata = jnp.asarray(pool.clients)
        if num_models > 1:
            # `permuted_positions` does not make all subsets of a few clients equally likely.
            strata = jax.random.permutation(shuffle, strata)
        drawn = []
        for name, stratum in zip(groups, jnp.array_split(strata, num_models), strict=True):
            drawn.append(draw_cohort(stratum, size, name, round, key))
        # In every round each stratum trains the next model.
        turned = jnp.roll(jnp.stack(drawn), round % num_models, axis=0)
        return Selection(dict(zip(groups, turned, strict=True)), {})

    def round_(
        models: dict[str, PyTree], client_states: PyTree, round: Round, hyper: PyTree
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        # Every model becomes the mean of its clients' trained models.
        models, trained = train_groups(groups, models, client_states, round, hyper, execution)
        return models, trained.client_states, trained.metrics

    same = lambda hyper: dict.fromkeys(groups, hyper)
    algorithm = assemble(
        "fed_ensemble",
        groups,
        columns,
        pool.method.hyper,
        round_,
        hyper_of_methods=same,
        select=select,
    )
    # The ensemble predicts with the mean of all models' logits.
    members = lambda models: equal_weights(stacked_models(groups, models))
    ensemble = ensemble_predictor(pool.method.model, members)
    of_clients = ClientModels(
        pool.clients, {ENSEMBLE: ensemble}, lambda models, _: {ENSEMBLE: ensemble.variables(models)}
    )
    return algorithm._replace(
        init=functools.partial(first_models, groups),
        predictors={**algorithm.predictors, ENSEMBLE: ensemble},
        client_models={MAIN: of_clients},
    )
