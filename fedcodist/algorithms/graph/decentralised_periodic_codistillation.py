"""PeriodicCodist without a server: every p rounds clients learn from their neighbours' models.

PeriodicCodist is algorithm 1 of Lichtarge et al., Heterogeneous Federated Learning Using Knowledge
Codistillation, 2023, https://arxiv.org/abs/2310.02549. There the models of a server teach each other.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import train_alone
from fedcodist.algorithms.graph.public_answers import (
    PublicAnswers,
    answered_indices,
    answers_communication,
    check_answers,
    is_due,
)
from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    check_groups,
    check_no_gap,
    check_widths,
    in_client_order,
)
from fedcodist.algorithms.parties.open_examples import view_of_round
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartiesResult,
    PartyResult,
    PartyUpdate,
    assemble,
    init_models,
    run_parties,
)
from fedcodist.algorithms.parties.shared_examples import (
    PUBLIC,
    inference,
    shared_examples,
    without_examples,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import TARGET, beside_targets
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_steps import Learner, StepTraining, check_step_training, start_learners
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model
from fedcodist.distillation.divergences import kl_divergence

PyTree = Any
Learners = dict[str, Learner]  # architecture -> leaves [group, ...]
# A client's learner, its target [examples, classes], and whether it has a teacher
Pupil = tuple[Learner, jax.Array, jax.Array]


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
    """Clients train alone; every `period` rounds each learns its neighbours' public predictions.

    A client's target is the mean of softmax(z / T) over its neighbours, computed by their models after
    the round's private training. All clients send predictions before any client learns. Each minimises
    KL(target || own prediction) with a fresh optimizer. Then its private optimizer starts afresh, as in
    PeriodicCodist.

    Args:
      groups: architecture -> its clients; models whose outputs are logits.
      answers: which public examples are predicted, and in which rounds.
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
    check_answers(answers)
    if answers.period > num_rounds:
        warnings.warn(
            f"answers.period={answers.period} is longer than the run of {num_rounds} rounds: nothing "
            "will be distilled.",
            stacklevel=2,
        )
    _check_floats(hyper)
    count = check_no_gap(groups)
    num_classes = _num_classes(groups)
    edges = graphs.adjacency(graph, count)
    graphs.check_neighbours(edges, name)
    edges = graphs.cut(edges, num_rounds)

    def init(key: jax.Array) -> Learners:
        return start_learners(training, init_models(groups, key, same_start))

    def round_(
        state: Learners, client_states: PyTree, round: Round, hyper: DecentralisedPeriodicHyper
    ) -> AfterRound:
        # Algorithm 1, in every round: each model is trained; here only by its client.
        rate = hyper.learning_rate
        trained = train_alone(groups, training, num_rounds, state, round, rate, execution)
        columns, preprocess = view_of_round(round, distillation.preprocess)
        of_answered = distillation._replace(preprocess=beside_targets(preprocess))

        def answer(
            model: Model, message: None, learner: Learner, data: ClientData, key: jax.Array
        ) -> PartyResult:
            examples, size = shared_examples(columns, data), answers.inference_batch_size
            logits = inference(model, learner.variables, examples, preprocess, size)
            return PartyResult(None, {}, reports=jax.nn.softmax(logits / hyper.temperature))

        def learn(
            model: Model, message: None, client: Pupil, data: ClientData, key: jax.Array
        ) -> PartyResult:
            learner, target, has_teacher = client
            examples = shared_examples(columns | {TARGET: target}, data)
            examples = without_examples(examples, has_teacher)
            student = _student(model, of_answered, training, learner, examples, key, hyper)
            keep = lambda new, old: jnp.where(has_teacher, new, old)
            return PartyResult(jax.tree.map(keep, student, learner), {})

        def run(update: PartyUpdate, states: Mapping[str, PyTree], purpose: str) -> PartiesResult:
            key = keys.derive(round.key, purpose, round.index)
            return run_parties(groups, update, None, states, round, key, execution)

        def codistill(learners: Learners) -> Learners:
            # Frozen copies of the models after this round's training are the teachers.
            predictions = in_client_order(groups, run(answer, learners, "answer").reports)
            edges_now = graphs.at_round(edges, round.index)
            targets = graphs.mean_over_neighbours(edges_now, predictions)
            has_teacher = jnp.any(edges_now, axis=1)
            # Students start from the same models.
            clients = {
                name: (learners[name], targets[group.clients], has_teacher[group.clients])
                for name, group in groups.items()
            }
            return run(learn, clients, "codistillation").states

        # Algorithm 1, every `period` (p) rounds: codistillation.
        is_codistilled = is_due(answers, round.index)
        learners = jax.lax.cond(is_codistilled, codistill, lambda same: same, trained.states)
        return learners, client_states, trained.metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, architecture: state[architecture].variables,
        answers_communication(groups, edges, num_rounds, answers, num_classes),
        lambda round, key: {PUBLIC: answered_indices(answers, round, key)[None]},
        {PUBLIC: answers.num_public},
        num_rounds=num_rounds,
    )


def _check_floats(hyper: DecentralisedPeriodicHyper) -> None:
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.distillation_learning_rate", hyper.distillation_learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)


def _num_classes(groups: Mapping[str, PartyGroup]) -> int:
    """The number of classes, which must be the same for all models."""
    first, group = next(iter(groups.items()))
    num_classes = group.model.num_classes
    check_widths(groups, num_classes, f"groups[{first!r}].model.num_classes")
    return num_classes


def _student(
    model: Model,
    distillation: LocalTraining,
    training: StepTraining,
    learner: Learner,
    examples: ClientData,
    key: jax.Array,
    hyper: DecentralisedPeriodicHyper,
) -> Learner:
    """The learner after it has minimised KL(target || own prediction) on the public examples."""
    divergence = kl_divergence("forward")
    variables = train_client(
        model,
        distillation,
        learner.variables,
        examples,
        key,
        hyper.distillation_learning_rate,
        loss_hook=lambda outputs, batch: divergence(checked_logits(outputs), batch[TARGET]),
    ).variables
    # The student replaces the model, and the private optimizer's moments start afresh.
    moments = training.optimizer(0.0).init(variables.params)
    return learner._replace(variables=variables, optimizer_state=moments)
