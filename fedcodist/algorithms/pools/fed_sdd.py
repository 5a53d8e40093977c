"""FedSDD: the aggregated models of several groups and rounds, as an ensemble, teach the main model.

"FedSDD: Scalable and Diversity-enhanced Distillation for Model Aggregation in Federated Learning" (Kwan,
Song, 2023). https://arxiv.org/abs/2312.17029
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.pools.assemble import assemble
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
from fedcodist.algorithms.pools.pool import Pool, check_fixed_cohort, check_no_methods, check_pool
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round, Selection
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.distillation.cached_teacher import cached_answers
from fedcodist.distillation.divergences import softened, softened_target
from fedcodist.distillation.ensembles import ENSEMBLE, Ensemble, ensemble_predictor, mean_logits
from fedcodist.distillation.loop import Teacher, distill
from fedcodist.distillation.settings import Distillation, check_distillation, divergence_of
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices

PyTree = Any


class FedSDDTeaching(NamedTuple):
    """How the ensemble teaches.

    Attributes:
      scaled: whether the divergence is multiplied by T squared (Hinton et al.; the paper does not say).
      distilled: 'main', or 'all' models with the same teacher (the paper's "basic" distillation).
      warm_up: rounds at the start without distillation.
      cached: evaluate the teacher once per round on all unlabelled data that are on the device; if data
        are streamed these are the round's. Not allowed if the distillation augments its images.
    """

    scaled: bool = True
    distilled: str = "main"
    warm_up: int = 0
    cached: bool = False


class FedSDDHyper(NamedTuple):
    """Floats of FedSDD; traced.

    Attributes:
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and student.
      method: hyper-parameters of the clients' method, the same for all models; `fed_sdd` puts the
        method's own here.
    """

    learning_rate: Any = 0.1
    temperature: Any = 4.0
    method: PyTree = None


class FedSDDState(NamedTuple):
    """Everything that the server keeps.

    Attributes:
      models: name -> the method's server state, the main model first.
      buffer: aggregated models of the last rounds, before any distillation; leaves
        [rounds kept, models, ...]. Round t's are at t modulo the rounds kept.
      weights: float [rounds kept], 1 if the buffer already has a round's models at this place, else 0.
    """

    models: dict[str, PyTree]
    buffer: Variables
    weights: jax.Array


def fed_sdd(
    pool: Pool,
    columns: Mapping[str, Any],
    num_unlabelled: int,
    num_models: int = 4,
    rounds_kept: int = 1,
    group_sizes: Sequence[int] | None = None,
    distillation: Distillation = Distillation(5000, 256, optax.sgd, mixup_beta=0),
    teaching: FedSDDTeaching = FedSDDTeaching(),
    hyper: FedSDDHyper = FedSDDHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """K models of one architecture, each trained by a group of every round's clients.

    In each round the cohort is drawn and divided anew into K groups. Each group trains and aggregates
    its model. The aggregates, before any distillation, enter a buffer of the last R rounds. The teacher
    is the mean of the logits of these K R models. Only the main model is distilled from it; the others
    continue from their aggregates. `client_ensembles.with_client_ensembles` also evaluates ensembles of
    clients' models, as in the paper's Table 5.

    Args:
      pool: the clients, the size of the cohort of all groups together, and the clients' method (FedAvg,
        FedProx, SCAFFOLD, ...). Every group uses this method's server optimizer. Client states
        (SCAFFOLD's variates) are kept per client and model.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`.
      num_models: K.
      rounds_kept: R.
      group_sizes: clients of each group; by default as even as possible, with the first ones larger.
      distillation: steps, batch size, optimizer, augmentation; 0 steps: no distillation.
      teaching, hyper, execution: which models learn, the floats of distillation, how clients run.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_sdd, locals())
    pool = check_fixed_cohort("pool", "fed_sdd", check_pool("pool", pool))
    sizes = group_sizes_of(pool.cohort_size, num_models, group_sizes)
    check_integer("rounds_kept", rounds_kept, low=1)
    check_distillation(distillation, num_unlabelled)
    check_teaching(teaching, distillation, hyper)
    check_no_methods("method", hyper.method)
    method, groups = pool.method, groups_of(pool, sizes)
    students = list(groups) if teaching.distilled == "all" else [MAIN]

    def init(key: jax.Array) -> FedSDDState:
        # Each model starts from other values: "a distinct set of weights".
        return started(first_models(groups, key))

    def started(models: dict[str, PyTree]) -> FedSDDState:
        return FedSDDState(models, *first_buffer(stacked_models(groups, models), rounds_kept))

    def select(round: jax.Array, key: jax.Array) -> Selection:
        # Algorithm 1: clients are sampled, shuffled and divided into K groups.
        clients = drawn_groups(pool, sizes, round, key)
        examples = {}
        if distillation.steps:
            examples[UNLABELLED] = unlabelled_indices(key, round, distillation, num_unlabelled)
        return Selection(dict(zip(groups, clients, strict=True)), examples)

    def round_(
        state: FedSDDState, client_states: PyTree, round: Round, hyper: FedSDDHyper
    ) -> tuple[FedSDDState, PyTree, dict[str, jax.Array]]:
        # Algorithm 1 and equation 2: each group trains its model, w_{t,k} is the mean of its clients'.
        models, trained = train_groups(
            groups, state.models, client_states, round, hyper.method, execution
        )
        # These models, before distillation, replace those of round t - R in the buffer.
        newest = stacked_models(groups, models)
        buffer, weights = with_newest(state.buffer, state.weights, newest, round.index)
        state = FedSDDState(models, buffer, weights)
        if distillation.steps:

            def teach(models: dict[str, PyTree]) -> dict[str, PyTree]:
                # Equations 4 and 5: S steps from w_{t,0} towards the mean of K R models' logits.
                teacher = mean_logits(method.model, buffer_ensemble(state))
                learners = dict.fromkeys(students, method)
                taught = taught_servers(
                    learners, models, teacher, round, hyper, distillation, teaching
                )
                # Where k > 0, w*_{t,k} is w_{t,k}.
                return models | taught

            models = jax.lax.cond(round.index >= teaching.warm_up, teach, lambda same: same, models)
        return state._replace(models=models), trained.client_states, trained.metrics

    algorithm = assemble(
        "fed_sdd",
        groups,
        columns,
        hyper._replace(method=method.hyper),
        round_,
        data_set_sizes={UNLABELLED: num_unlabelled} if distillation.steps else {},
        servers=lambda state: state.models,
        hyper_of_methods=lambda hyper: dict.fromkeys(groups, hyper.method),
        drawn={MAIN: pool},
        select=select,
    )
    ensemble = ensemble_predictor(method.model, buffer_ensemble)
    return algorithm._replace(
        init=init,
        predictors={**algorithm.predictors, ENSEMBLE: ensemble},
        # Clients predict with the main model, whichever model they train.
        client_models={MAIN: algorithm.client_models[MAIN]},
        restart=lambda state: started(state.models),  # the buffer is filled by round
    )


def buffer_ensemble(state: FedSDDState) -> Ensemble:
    """The ensemble of all aggregated models in the buffer."""
    return ensemble_of(state.buffer, state.weights)


def taught_servers(
    learners: Mapping[str, FederatedMethod],
    servers: Mapping[str, PyTree],
    teacher: Teacher,
    round: Round,
    hyper: Any,
    distillation: Distillation,
    teaching: FedSDDTeaching,
) -> dict[str, PyTree]:
    """The learners' servers after their models have learned from the teacher.

    Args:
      learners: name -> the method of the model that learns.
      servers: name -> the method's server state, of these models and possibly of others.
      teacher: an ensemble's mean logits.
      round, hyper, distillation, teaching: as in `fed_sdd`.
    """
    starts = {name: method.variables(servers[name]) for name, method in learners.items()}
    networks = {name: method.model for name, method in learners.items()}
    taught = distilled_students(networks, starts, teacher, round, hyper, distillation, teaching)
    return {
        name: method.set_model(servers[name], taught[name], False)
        for name, method in learners.items()
    }


def distilled_students(
    models: Mapping[str, Model],
    starts: Mapping[str, Variables],
    teacher: Teacher,
    round: Round,
    hyper: Any,
    distillation: Distillation,
    teaching: FedSDDTeaching,
) -> dict[str, Variables]:
    """The students after distillation from an ensemble's mean logits (equations 4 and 5)."""
    unlabelled = round.inputs.examples[UNLABELLED]
    if teaching.cached:
        unlabelled, teacher, distillation = cached_answers(
            teacher, unlabelled, distillation, round.axis_name
        )
    divergence = divergence_of(distillation)
    return distill(
        models=models,
        students=starts,
        teachers={ENSEMBLE: teacher},
        targets=lambda _, outputs: softened_target(outputs[ENSEMBLE], hyper.temperature),
        unlabelled=unlabelled,
        key=keys.derive(round.key, "distillation", round.index),
        learning_rates=dict.fromkeys(starts, hyper.learning_rate),
        settings=distillation,
        axis_name=round.axis_name,
        divergence=softened(divergence, hyper.temperature, teaching.scaled),
    ).students


def check_teaching(teaching: FedSDDTeaching, distillation: Distillation, hyper: Any) -> None:
    """Raises ValueError that names what is not allowed in `teaching` or in `hyper`."""
    check_integer("teaching.warm_up", teaching.warm_up, low=0)
    if teaching.distilled not in ("main", "all"):
        raise ValueError(f"teaching.distilled must be 'main' or 'all', got {teaching.distilled!r}.")
    if teaching.cached and distillation.mixup_beta > 0:
        raise ValueError(
            "teaching.cached needs distillation.mixup_beta=0: mixed images differ every time."
        )
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
