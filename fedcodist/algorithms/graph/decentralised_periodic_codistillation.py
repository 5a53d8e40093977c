"""PeriodicCodist without a server: client models of one round teach their neighbours.

PeriodicCodist is algorithm 1 of Lichtarge et al., Heterogeneous Federated Learning Using Knowledge
Codistillation, 2023, https://arxiv.org/abs/2310.02549. There a server's two models teach each other.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import train_alone
from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    check_groups,
    check_no_gap,
    check_widths,
    party_names,
)
from fedcodist.algorithms.parties.party import PartyResult, assemble, init_models, run_parties
from fedcodist.algorithms.parties.shared_examples import (
    PUBLIC,
    inference,
    shared_examples,
    without_examples,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import LARGEST_BATCH, check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_steps import StepTraining, check_step_training, start_learners
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.shuffling import stream_positions
from fedcodist.distillation.loop import kl_divergence


class PublicAnswers(NamedTuple):
    """Which public examples clients answer, and when.

    Attributes:
      num_public: number of examples of the data set `public`.
      examples: public ones of each codistillation, from an endless reshuffled stream.
      period: rounds from one codistillation to the next.
      inference_batch_size: examples per step while clients answer.
    """

    num_public: int
    examples: int = 4096
    period: int = 1
    inference_batch_size: int = 500


class DecentralisedPeriodicHyper(NamedTuple):
    """Learning rates of private training and of distillation, and the teachers' temperature; traced."""

    learning_rate: Any = 0.03
    distillation_learning_rate: Any = 1e-3
    temperature: Any = 1.0


def decentralised_periodic_codistillation(
    groups: Mapping[str, PartyGroup],
    answers: PublicAnswers,
    num_rounds: int,
    graph: Any,
    training: StepTraining = StepTraining(),
    distillation: LocalTraining = LocalTraining(
        lambda rate: optax.adam(rate, eps=1e-5), batch_size=128
    ),
    hyper: DecentralisedPeriodicHyper = DecentralisedPeriodicHyper(),
    execution: Execution = Execution(),
    name: str = "decentralised_periodic_codistillation",
    same_start: bool = False,
) -> FederatedAlgorithm:
    """Clients train apart; every `period` rounds each learns its neighbours' view of public examples.

    A client's target is the mean of its neighbours' softmax(z / T), of their models after the round's
    private training; all answer before anyone learns. It minimises KL(target || its own) with a fresh
    optimizer, and the private one starts afresh, as in PeriodicCodist.

    Args:
      groups: architecture -> its clients; models whose outputs are logits.
      answers: which public examples clients answer, and every how many rounds.
      num_rounds: of the whole run.
      graph: see `fedcodist.algorithms.graph.graphs`; an edge from i to j makes j a teacher of i.
      training: private steps of a round.
      distillation: optimizer, batch size, passes over the answered examples, preprocessing.
      hyper: learning rates and T.
      execution, name, same_start: as in `local_only_steps`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(decentralised_periodic_codistillation, locals())
    groups = check_groups(groups)
    check_step_training(training, num_rounds)
    check_training("distillation", distillation)
    _check_numbers(answers, hyper)
    count = check_no_gap(groups)
    num_classes = _num_classes(groups)
    edges = graphs.adjacency(graph, count)
    graphs.check_neighbours(edges, name)
    edges = graphs.cut(edges, num_rounds)

    def init(key):
        return start_learners(training, init_models(groups, key, same_start))

    def round_(state, client_states, round, hyper):
        # Algorithm 1, in every round: each model is trained, here by its client alone.
        trained = train_alone(
            groups, training, num_rounds, state, round, hyper.learning_rate, execution
        )
        public = round.inputs.examples[PUBLIC]
        columns = {column: values[public.indices[0]] for column, values in public.columns.items()}

        def answer(model, message, learner, data, key):
            logits = inference(
                model,
                learner.variables,
                shared_examples(columns, data),
                distillation.preprocess,
                answers.inference_batch_size,
            )
            return PartyResult(None, {}, reports=jax.nn.softmax(logits / hyper.temperature))

        def learn(model, message, client, data, key):
            learner, target, has_teacher = client
            examples = shared_examples(columns | {"target": target}, data)
            examples = without_examples(examples, has_teacher)
            student = _student(model, distillation, training, learner, examples, key, hyper)
            keep = lambda new, old: jnp.where(has_teacher, new, old)
            return PartyResult(jax.tree.map(keep, student, learner), {})

        def run(update, states, purpose):
            key = keys.derive(round.key, purpose, round.index)
            return run_parties(groups, update, None, states, round, key, execution)

        def codistill(learners):
            # Frozen copies of the models after this round's training answer.
            said = run(answer, learners, "answer").reports
            table = jnp.zeros((count, answers.examples, num_classes))
            for name, group in groups.items():
                table = table.at[group.clients].set(said[name])
            edges_now = graphs.at_round(edges, round.index)
            targets = graphs.mean_over_neighbours(edges_now, table)
            has_teacher = jnp.any(edges_now, axis=1)
            # Students start from the same values, each taught by others.
            clients = {
                name: (learners[name], targets[group.clients], has_teacher[group.clients])
                for name, group in groups.items()
            }
            return run(learn, clients, "codistillation").states

        # Algorithm 1, every `period` (p) rounds: codistillation.
        is_due = _is_due(round.index, answers)
        learners = jax.lax.cond(is_due, codistill, lambda same: same, trained.states)
        return learners, client_states, trained.metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, architecture: state[architecture].variables,
        _communication(groups, edges, num_rounds, answers, num_classes),
        lambda round, key: {PUBLIC: _public_indices(answers, round, key)[None]},
        {PUBLIC: answers.num_public},
    )


def _check_numbers(answers, hyper):
    for field in ("num_public", "period", "inference_batch_size"):
        check_integer(field, getattr(answers, field), low=1)
    check_integer("examples", answers.examples, low=1, high=LARGEST_BATCH)
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("distillation_learning_rate", hyper.distillation_learning_rate, low=0)
    check_number("temperature", hyper.temperature, above=0)


def _num_classes(groups):
    """How many classes the models have, which must all have as many."""
    first, group = next(iter(groups.items()))
    num_classes = group.model.num_classes
    check_widths(groups, num_classes, f"groups[{first!r}].model.num_classes")
    return num_classes


def _public_indices(answers, round, key):
    """Indices of the public examples that clients answer in a round, int32 [examples]; else -1."""
    first = jnp.asarray(round // answers.period, jnp.uint32) * answers.examples
    draw = keys.derive(key, "public")
    return jax.lax.cond(
        _is_due(round, answers),
        lambda: stream_positions(draw, first, answers.examples, answers.num_public),
        lambda: jnp.full(answers.examples, -1, jnp.int32),
    )


def _is_due(round, answers):
    """Whether clients teach each other at the end of a round: rounds p, 2 p, ... counted from 1."""
    return (round + 1) % answers.period == 0


def _student(model, distillation, training, learner, examples, key, hyper):
    """The learner after it minimised KL(target || its own) on answered examples."""
    divergence = kl_divergence("forward")
    variables = train_client(
        model,
        distillation,
        learner.variables,
        examples,
        key,
        hyper.distillation_learning_rate,
        loss_hook=lambda outputs, batch: divergence(logits_of(outputs), batch["target"]),
    ).variables
    # The student replaces the model, and the private optimizer's moments start afresh.
    moments = training.optimizer(0.0).init(variables.params)
    return learner._replace(variables=variables, optimizer_state=moments)


def _communication(groups, edges, num_rounds, answers, num_classes):
    """Answers on the edges of the rounds in which clients teach, and which examples they are of.

    A mean over the run's rounds, rounded up.
    """
    times, number = num_rounds // answers.period, np.dtype(np.float32).itemsize
    of_answers, indices = answers.examples * num_classes * number, answers.examples * number * times
    teaching = edges * times
    if edges.ndim == 3:
        teaching = edges[answers.period - 1 :: answers.period].sum(axis=0)
    num_received, num_sent = (teaching.sum(axis=axis) for axis in (1, 0))

    def of_client(client):
        down = int(num_received[client] * of_answers + indices)
        up = int(num_sent[client] * of_answers)
        return Communication(down=-(-down // num_rounds), up=-(-up // num_rounds))

    return {
        party: of_client(client)
        for name, names in party_names(groups).items()
        for client, party in zip(groups[name].clients, names, strict=True)
    }
