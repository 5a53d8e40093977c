"""PeriodicCodist without a server: client models of one round teach their neighbours."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import local_round
from fedcodist.algorithms.parties.party import (
    PARTIES,
    PUBLIC,
    PartyGroup,
    check_groups,
    check_no_gap,
    check_widths,
    everybody,
    for_each_party,
    inference,
    init_models,
    party_names,
    party_predictors,
    shared_examples,
    without_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
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


class DecentralisedPeriodicHyper(NamedTuple):
    """Learning rates of private training and of distillation, and the teachers' temperature; traced."""

    learning_rate: Any = 0.03
    distillation_learning_rate: Any = 1e-3
    temperature: Any = 1.0


def decentralised_periodic_codistillation(
    groups: Mapping[str, PartyGroup],
    num_public: int,
    num_rounds: int,
    graph: Any,
    training: StepTraining = StepTraining(),
    distillation: LocalTraining = LocalTraining(
        lambda rate: optax.adam(rate, eps=1e-5), batch_size=128
    ),
    examples: int = 4096,
    period: int = 1,
    hyper: DecentralisedPeriodicHyper = DecentralisedPeriodicHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "decentralised_periodic_codistillation",
    same_start: bool = False,
) -> FederatedAlgorithm:
    """Clients train apart; every `period` rounds each learns its neighbours' view of public examples.

    A client's target is the mean of its neighbours' softmax(z / T), of their models after the round's
    private training; all answer before anyone learns. It minimises KL(target || own) with a fresh
    optimizer, and the private one starts afresh, as in PeriodicCodist.

    Args:
      groups: architecture -> its clients; models whose outputs are logits.
      num_public: rows of the data set `public`.
      num_rounds: of the whole run.
      graph: see `fedcodist.algorithms.graph.graphs`; an edge from i to j makes j a teacher of i.
      training: private steps of a round.
      distillation: optimizer, batch size, passes over the answered examples, preprocessing.
      examples: public ones of each codistillation, from an endless reshuffled stream.
      period: rounds from one codistillation to the next.
      hyper: learning rates and T.
      inference_batch_size: examples per step while clients answer.
      execution, name, same_start: as in `local_only_steps`.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(decentralised_periodic_codistillation, locals())
    groups = check_groups(groups)
    check_step_training(training, num_rounds)
    check_training("distillation", distillation)
    for argument, value in (
        ("num_public", num_public),
        ("period", period),
        ("inference_batch_size", inference_batch_size),
    ):
        check_integer(argument, value, low=1)
    check_integer("examples", examples, low=1, high=LARGEST_BATCH)
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("distillation_learning_rate", hyper.distillation_learning_rate, low=0)
    check_number("temperature", hyper.temperature, above=0)
    count = check_no_gap(groups)
    first, group = next(iter(groups.items()))
    classes = group.model.num_classes
    check_widths(groups, classes, f"groups[{first!r}].model.num_classes")
    edges = graphs.adjacency(graph, count)
    graphs.check_neighbours(edges, name)
    edges = graphs.cut(edges, num_rounds)
    divergence = kl_divergence("forward")

    def is_due(round):
        return (round + 1) % period == 0

    def select(round, key):
        start = jnp.asarray(round // period, jnp.uint32) * examples
        indices = jax.lax.cond(
            is_due(round),
            lambda: stream_positions(keys.derive(key, "public"), start, examples, num_public),
            lambda: jnp.full(examples, -1, jnp.int32),
        )
        return everybody(groups, {PUBLIC: indices[None]})

    train = local_round(groups, num_rounds, training, execution)

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name

        def answer(model, message, learner, data, key):
            asked = shared_examples(columns, data)
            logits = inference(
                model, learner.variables, asked, distillation.preprocess, inference_batch_size
            )
            return ClientResult(
                {}, {}, jnp.ones(()), jax.nn.softmax(logits / hyper.temperature), {}
            )

        def learn(model, message, own, data, key):
            learner, target, has_teacher = own
            taught = train_client(
                model,
                distillation,
                learner.variables,
                without_examples(shared_examples(columns | {"target": target}, data), has_teacher),
                key,
                hyper.distillation_learning_rate,
                loss_hook=lambda outputs, batch: divergence(logits_of(outputs), batch["target"]),
            )
            fresh = training.optimizer(0.0).init(taught.variables.params)
            after = learner._replace(variables=taught.variables, optimizer_state=fresh)
            after = jax.tree.map(lambda new, old: jnp.where(has_teacher, new, old), after, learner)
            return ClientResult({}, {}, jnp.ones(()), after, {})

        def codistill(learners):
            run = lambda update, own, purpose: for_each_party(
                groups,
                update,
                None,
                own,
                inputs.cohorts[PARTIES],
                keys.derive(key, purpose, round.index),
                execution,
                axis_name,
            )
            answers = run(answer, learners, "answer").own
            said = jnp.zeros((count, examples, classes))
            for name, group in groups.items():
                said = said.at[group.clients].set(answers[name])
            now = graphs.at_round(edges, round.index)
            teachers = jnp.sum(now, axis=1)
            shares = now / jnp.maximum(teachers, 1)[:, None]
            targets = jnp.tensordot(shares.astype(said.dtype), said, axes=1)
            own = {
                name: (learners[name], targets[group.clients], teachers[group.clients] > 0)
                for name, group in groups.items()
            }
            return run(learn, own, "codistillation").own

        result = train(state, round, hyper.learning_rate)
        public = inputs.examples[PUBLIC]
        columns = {column: values[public.indices[0]] for column, values in public.columns.items()}
        learners = jax.lax.cond(is_due(round.index), codistill, lambda same: same, result.own)
        return learners, client_states, result.metrics

    # Answers, and which examples they are of, on the edges of the rounds in which clients teach.
    scalar = np.dtype(np.float32).itemsize
    times = num_rounds // period
    size, indices = examples * classes * scalar, examples * scalar * times
    teaching = edges[period - 1 :: period].sum(axis=0) if edges.ndim == 3 else edges * times
    taught, asked = (teaching.sum(axis=axis) for axis in (1, 0))
    names = party_names(groups)

    def mean_over_rounds(total):
        return -(-int(total) // num_rounds)

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=lambda key: start_learners(training, init_models(groups, key, same_start)),
        client_states={},
        select=select,
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state[name].variables),
        communication={
            party: Communication(
                down=mean_over_rounds(taught[client] * size + indices),
                up=mean_over_rounds(asked[client] * size),
            )
            for name, group in groups.items()
            for client, party in zip(group.clients, names[name], strict=True)
        },
        num_clients=count,
        data_set_sizes={PUBLIC: num_public},
    )
