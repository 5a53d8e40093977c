"""Local training by steps without communication: the baseline of decentralised methods.

It is "Separate" in table 1 of Zhmoginov et al., Decentralized Learning with Multi-Headed
Distillation, CVPR 2023, https://arxiv.org/abs/2211.15774.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartiesResult,
    PartyResult,
    assemble,
    init_models,
    party_metrics,
    run_parties,
)
from fedcodist.algorithms.parties.shared_examples import shared_examples
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_steps import (
    CLIENT_STEPS,
    Learner,
    StepTraining,
    check_step_training,
    start_learners,
    train_steps,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model

PyTree = Any


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
    """Each client trains its own model for `training.steps` steps per round; optimizers continue.

    A client's batches are the same as in `multi_headed_distillation`, so that both methods are compared
    on the same private batches. `local_only` counts epochs, and has early stopping.

    Args:
      groups: architecture -> its clients.
      num_rounds: of the whole run, with `training.steps` steps each.
      training: optimizer, batches, schedule of the learning rate.
      num_shared: number of examples of the data set `shared`, on which all train in place of their own
        examples. With the union of all clients' examples this is an upper bound for collaboration.
      hyper: the learning rate.
      execution: how clients of one architecture are executed.
      name: the name in tables.
      same_start: whether clients of one architecture start from the same values.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(local_only_steps, locals())
    groups = check_groups(groups)
    check_step_training(training, num_rounds)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    if num_shared is not None:
        check_integer("num_shared", num_shared, low=1)

    def init(key: jax.Array) -> dict[str, Learner]:
        return start_learners(training, init_models(groups, key, same_start))

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {} if num_shared is None else {SHARED: jnp.arange(num_shared)[None]}

    def round_(
        state: dict[str, Learner], client_states: PyTree, round: Round, hyper: LocalOnlyStepsHyper
    ) -> AfterRound:
        # Each client's steps on its own or on the shared examples. There is no exchange.
        shared = None if num_shared is None else round.inputs.examples[SHARED].columns
        trained = train_alone(
            groups, training, num_rounds, state, round, hyper.learning_rate, execution, shared
        )
        return trained.states, client_states, trained.metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, architecture: state[architecture].variables,
        same_for_all(groups, Communication(down=0, up=0)),
        select_examples,
        {} if num_shared is None else {SHARED: num_shared},
        num_rounds=num_rounds,
    )


def train_alone(
    groups: Mapping[str, PartyGroup],
    training: StepTraining,
    num_rounds: int,
    learners: Mapping[str, Learner],
    round: Round,
    learning_rate: Any,
    execution: Execution,
    shared: Mapping[str, jax.Array] | None = None,
) -> PartiesResult:
    """One round of every client's local steps, before any exchange; `states` are the trained learners.

    Args:
      groups, training, num_rounds, execution: as in `local_only_steps`.
      learners: architecture -> learners before the round, leaves [group, ...].
      round: as in `FederatedAlgorithm.round`.
      learning_rate: before the schedule, may be traced.
      shared: columns on which all train in place of their own examples.
    """

    def update(
        model: Model, message: None, learner: Learner, data: ClientData, key: jax.Array
    ) -> PartyResult:
        if shared is not None:
            data = shared_examples(shared, data)
        learner, losses = train_steps(
            model, training, learner, data, key, round.index, num_rounds, learning_rate
        )
        num_examples = training.steps * training.batch_size
        metrics = party_metrics(learner.variables, training.steps, num_examples, **losses)
        return PartyResult(learner, metrics)

    key = keys.derive(round.key, CLIENT_STEPS)
    return run_parties(groups, update, None, learners, round, key, execution)
