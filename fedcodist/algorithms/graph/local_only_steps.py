"""Clients who train by steps and never meet: what decentralised methods are compared with."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.algorithms.parties.party import (
    PARTIES,
    PartiesResult,
    PartyGroup,
    check_groups,
    everybody,
    for_each_party,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
    shared_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.local_steps import (
    CLIENT_STEPS,
    Learner,
    StepTraining,
    check_step_training,
    start_learners,
    train_steps,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import is_finite


class LocalOnlyStepsHyper(NamedTuple):
    """The learning rate before its decay, traced."""

    learning_rate: Any = 0.03


def local_only_steps(
    groups: Mapping[str, PartyGroup],
    num_rounds: int,
    training: StepTraining = StepTraining(),
    num_shared: int | None = None,
    hyper: LocalOnlyStepsHyper = LocalOnlyStepsHyper(),
    execution: Execution = Execution(),
    name: str = "local_only_steps",
    same_start: bool = False,
) -> FederatedAlgorithm:
    """Each client trains its own model by `training.steps` steps a round; optimizers go on over rounds.

    Batches are those that a client has in `multi_headed_distillation`, so that the two are compared on
    the same private examples. `local_only` is the same by epochs, with early stopping.

    Args:
      groups: architecture -> its clients.
      num_rounds: of the whole run, of `training.steps` steps each.
      training: optimizer, batches, schedule of the learning rate.
      num_shared: rows of the data set `shared`, on which all train in place of their own examples: the
        union of all clients', the bound of what they could learn together.
      hyper: the learning rate.
      execution: how clients of one architecture are executed.
      name: the name in tables.
      same_start: whether clients of one architecture start from the same values.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(local_only_steps, locals())
    groups = check_groups(groups)
    check_step_training(training, num_rounds)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    if num_shared is not None:
        check_integer("num_shared", num_shared, low=1)

    def select(round, key):
        shared = {} if num_shared is None else {SHARED: jnp.arange(num_shared)[None]}
        return everybody(groups, shared)

    train = local_round(groups, num_rounds, training, execution)

    def round_(state, client_states, round, hyper):
        shared = None if num_shared is None else round.inputs.examples[SHARED].columns
        result = train(state, round, hyper.learning_rate, shared)
        return result.own, client_states, result.metrics

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=lambda key: start_learners(training, init_models(groups, key, same_start)),
        client_states={},
        select=select,
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state[name].variables),
        communication=same_for_all(groups, Communication(down=0, up=0)),
        num_clients=num_clients(groups),
        data_set_sizes={} if num_shared is None else {SHARED: num_shared},
    )


def local_round(
    groups: Mapping[str, PartyGroup], num_rounds: int, training: StepTraining, execution: Execution
) -> Callable[..., PartiesResult]:
    """Returns `train`, one round of every client's own steps before any exchange.

    `train(learners, round, learning_rate, shared=None)` takes the round as an algorithm gets it;
    `shared` are columns on which all train in place of their own
    examples. Its result's `own` are the learners after the round.
    """

    def train(
        learners: Mapping[str, Learner],
        round: Round,
        learning_rate: Any,
        shared: Mapping[str, jax.Array] | None = None,
    ) -> PartiesResult:
        def update(model, message, learner, data, key):
            if shared is not None:
                data = shared_examples(shared, data)
            learner, metrics = train_steps(
                model, training, learner, data, key, round.index, num_rounds, learning_rate
            )
            metrics |= {
                "num_steps": jnp.asarray(training.steps),
                "client_examples": jnp.asarray(training.steps * training.batch_size),
                "finite": is_finite(learner.variables),
            }
            return ClientResult({}, {}, jnp.ones(()), learner, metrics)

        cohort, key = round.inputs.cohorts[PARTIES], keys.derive(round.key, CLIENT_STEPS)
        return for_each_party(
            groups, update, None, learners, cohort, key, execution, round.axis_name
        )

    return train
