"""FedSDD for several architectures: each has several models, and only its main model is distilled.

"FedSDD: Scalable and Diversity-enhanced Distillation for Model Aggregation in Federated Learning" (Kwan,
Song, 2023), appendix A.5. https://arxiv.org/abs/2312.17029
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.fed_sdd import FedSDDTeaching, check_teaching, taught_servers
from fedcodist.algorithms.pools.grouped_models import (
    MAIN,
    drawn_groups,
    first_models,
    group_sizes_of,
    groups_of,
    stacked_models,
    train_groups,
)
from fedcodist.algorithms.pools.model_buffer import ensemble_of, first_buffer, with_newest
from fedcodist.algorithms.pools.pool import (
    Pool,
    check_class_counts,
    check_fixed_cohorts,
    check_no_methods,
    check_pools,
)
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round, Selection
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Variables
from fedcodist.distillation.ensembles import (
    ENSEMBLE,
    Ensemble,
    ensembles_predictor,
    mean_logits_of_all,
)
from fedcodist.distillation.settings import Distillation, check_distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices

PyTree = Any


class FedSDDPoolsHyper(NamedTuple):
    """Floats of FedSDD of several architectures; traced.

    Attributes:
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and students.
      methods: pool -> the hyper-parameters of its clients' method; `fed_sdd_pools` puts them here.
    """

    learning_rate: Any = 0.1
    temperature: Any = 4.0
    methods: Mapping[str, PyTree] = {}


class FedSDDPoolsState(NamedTuple):
    """Everything that the server keeps.

    Attributes:
      models: name -> the method's server state; a pool's main model has the pool's name.
      buffers: pool -> aggregated models of the last rounds, leaves [rounds kept, models, ...].
      weights: float [rounds kept], 1 if buffers already have a round's models at this place, else 0.
    """

    models: dict[str, PyTree]
    buffers: dict[str, Variables]
    weights: jax.Array


def fed_sdd_pools(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    num_models: int = 4,
    rounds_kept: int = 1,
    distillation: Distillation = Distillation(5000, 256, optax.sgd, mixup_beta=0),
    teaching: FedSDDTeaching = FedSDDTeaching(),
    hyper: FedSDDPoolsHyper = FedSDDPoolsHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """FedSDD with one architecture per pool: each pool has K models and distils its main model.

    In every pool a round is that of `fed_sdd`: its cohort is divided into K groups, each of which trains
    a model, and the aggregates enter the pool's buffer. All main models have the same teacher: the
    unweighted mean of the logits of all models in all buffers, over all architectures. (That this is one
    ensemble is our reading of the appendix, and not verified.)

    Args:
      pools: name -> Pool, one architecture each.
      num_models, rounds_kept: K in every pool, whose groups are as even as possible, and R.
      columns, num_unlabelled, distillation, teaching, hyper, execution: as in `fed_sdd`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_sdd_pools, locals())
    pools = check_fixed_cohorts("fed_sdd_pools", check_pools(pools))
    check_class_counts(pools)
    sizes = {name: _sizes_of(name, pool, num_models) for name, pool in pools.items()}
    check_integer("rounds_kept", rounds_kept, low=1)
    check_distillation(distillation, num_unlabelled)
    check_teaching(teaching, distillation, hyper)
    check_no_methods("methods", hyper.methods)
    groups = {name: _named_groups(name, pool, sizes[name]) for name, pool in pools.items()}
    all_groups = {
        group: pool
        for pools_of_groups in groups.values()
        for group, pool in pools_of_groups.items()
    }
    _check_group_names(groups)
    students = list(all_groups) if teaching.distilled == "all" else list(pools)
    models = {name: pool.method.model for name, pool in pools.items()}

    def select(round: jax.Array, key: jax.Array) -> Selection:
        clients: dict[str, jax.Array] = {}
        for name, pool in pools.items():
            drawn = drawn_groups(pool, sizes[name], round, key, name)
            clients |= dict(zip(groups[name], drawn, strict=True))
        examples = {}
        if distillation.steps:
            examples[UNLABELLED] = unlabelled_indices(key, round, distillation, num_unlabelled)
        return Selection(clients, examples)

    def round_(
        state: FedSDDPoolsState, client_states: PyTree, round: Round, hyper: FedSDDPoolsHyper
    ) -> tuple[FedSDDPoolsState, PyTree, dict[str, jax.Array]]:
        # Algorithm 1 in every pool: each group trains its model, and aggregates enter the buffer.
        new_states: dict[str, PyTree] = {}
        metrics: dict[str, jax.Array] = {}
        servers, buffers = dict(state.models), {}
        for name, pools_of_groups in groups.items():
            trained_models, trained = train_groups(
                pools_of_groups,
                {group: state.models[group] for group in pools_of_groups},
                {group: client_states[group] for group in pools_of_groups},
                round,
                hyper.methods[name],
                execution,
                stream=name,
            )
            servers, metrics = servers | trained_models, metrics | trained.metrics
            new_states |= trained.client_states
            newest = stacked_models(pools_of_groups, trained_models)
            buffers[name], weights = with_newest(
                state.buffers[name], state.weights, newest, round.index
            )
        state = FedSDDPoolsState(servers, buffers, weights)
        if distillation.steps:

            def teach(servers: dict[str, PyTree]) -> dict[str, PyTree]:
                # Appendix A.5: every architecture's main model learns from the same ensemble.
                teacher = mean_logits_of_all(models, buffer_ensembles(state))
                learners = {name: all_groups[name].method for name in students}
                return servers | taught_servers(
                    learners, servers, teacher, round, hyper, distillation, teaching
                )

            is_due = round.index >= teaching.warm_up
            servers = jax.lax.cond(is_due, teach, lambda servers: servers, servers)
        return state._replace(models=servers), new_states, metrics

    algorithm = assemble(
        "fed_sdd_pools",
        all_groups,
        columns,
        hyper._replace(methods={name: pool.method.hyper for name, pool in pools.items()}),
        round_,
        data_set_sizes={UNLABELLED: num_unlabelled} if distillation.steps else {},
        servers=lambda state: state.models,
        hyper_of_methods=lambda hyper: {
            group: hyper.methods[name]
            for name, pools_of_groups in groups.items()
            for group in pools_of_groups
        },
        drawn=pools,
        select=select,
    )
    return algorithm._replace(
        init=functools.partial(first_state, groups, rounds_kept),
        predictors={
            **algorithm.predictors,
            ENSEMBLE: ensembles_predictor(models, buffer_ensembles),
        },
        # Clients predict with their architecture's main model, whichever model they train.
        client_models={name: algorithm.client_models[name] for name in pools},
        restart=lambda state: started(groups, rounds_kept, state.models),  # it is filled by round
    )


def first_state(
    groups: Mapping[str, Mapping[str, Pool]], rounds_kept: int, key: jax.Array
) -> FedSDDPoolsState:
    """The state before the first round: buffers hold the initial models."""
    servers: dict[str, PyTree] = {}
    for pools_of_groups in groups.values():
        servers |= first_models(pools_of_groups, key)
    return started(groups, rounds_kept, servers)


def started(
    groups: Mapping[str, Mapping[str, Pool]], rounds_kept: int, servers: dict[str, PyTree]
) -> FedSDDPoolsState:
    """The state whose buffers hold the servers' models alone."""
    first = {
        name: first_buffer(stacked_models(pools_of_groups, servers), rounds_kept)
        for name, pools_of_groups in groups.items()
    }
    buffers = {name: buffer for name, (buffer, _) in first.items()}
    _, weights = next(iter(first.values()))
    return FedSDDPoolsState(servers, buffers, weights)


def buffer_ensembles(state: FedSDDPoolsState) -> dict[str, Ensemble]:
    """Pool -> the ensemble of all aggregated models in its buffer."""
    return {name: ensemble_of(buffer, state.weights) for name, buffer in state.buffers.items()}


def _named_groups(pool_name: str, pool: Pool, sizes: list[int]) -> dict[str, Pool]:
    """A pool for each model: `<pool>` for the main model, `<pool>_model_1`, ..."""
    return {
        pool_name if name == MAIN else f"{pool_name}_{name}": group
        for name, group in groups_of(pool, sizes, f"pools[{pool_name!r}]").items()
    }


def _sizes_of(name: str, pool: Pool, num_models: int) -> list[int]:
    check_integer("num_models", num_models, low=1)
    if num_models > pool.cohort_size:
        raise ValueError(
            f"num_models must be at most pools[{name!r}].cohort_size={pool.cohort_size}, so that no "
            f"group is empty, got {num_models}."
        )
    return group_sizes_of(pool.cohort_size, num_models, None)


def _check_group_names(groups: Mapping[str, Mapping[str, Pool]]) -> None:
    names = [ENSEMBLE, *(group for pools_of_groups in groups.values() for group in pools_of_groups)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"pools must have names that tell their models and the {ENSEMBLE!r} apart, got "
            f"{sorted(names)}."
        )
