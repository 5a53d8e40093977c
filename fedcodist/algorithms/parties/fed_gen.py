"""FedGen: the server trains a generator of embeddings on the parties' heads, which learn from it.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", 2021,
https://arxiv.org/abs/2105.10056.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.head_generator import (
    Generator,
    check_generator,
    generated_loss,
    init_generator,
    train_generator,
    with_generated_loss,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.algorithms.parties.shared_heads import (
    check_shared_heads,
    head_bytes,
    with_first_head,
    with_same_head,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.label_counts import label_counts
from fedcodist.core.local_training import (
    LocalTraining,
    batch_size_for,
    check_plain_gradients,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import lasting_state
from fedcodist.models.headed import split_head

PyTree = Any
# The generator's parameters, and p(y)
FromServer = tuple[PyTree, jax.Array]
SERVER = "server"  # the metrics of the generator's training


class FedGenState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], and the server's state.

    Attributes:
      models: all heads are equal after every round.
      generator: its parameters.
      optimizer_state: of the generator's optimizer, which continues over rounds.
      label_shares: p(y), the share of each label [classes] in parties' training; equal at first.
    """

    models: dict[str, Variables]
    generator: PyTree
    optimizer_state: PyTree
    label_shares: jax.Array


class FedGenHyper(NamedTuple):
    """Floats of FedGen; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      generator_learning_rate: of the server's generator.
      generated_weight: of the loss on generated embeddings in local training; 1 in the paper.
      diversity_weight: of the generator's diversity loss.
    """

    learning_rate: Any = 0.01
    generator_learning_rate: Any = 3e-4
    generated_weight: Any = 1.0
    diversity_weight: Any = 1.0


def fed_gen(
    groups: Mapping[str, PartyGroup],
    training: LocalTraining = LocalTraining(batch_size=32),
    generator: Generator = Generator(),
    weighted: bool = False,
    warm_up: int = 0,
    hyper: FedGenHyper = FedGenHyper(),
    execution: Execution = Execution(),
    name: str = "fed_gen",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """In a round parties train with generated embeddings, heads are averaged, and the generator learns.

    This is the paper's variant that shares only the last layer (Section 3.3), so parties may have any
    networks before it. In every step of local training labels are drawn from p(y), and the generator
    makes embeddings for them. The head learns these and the batch (Equation 5). The server trains the
    generator so that the mean of the heads' logits predicts the label (Equation 4). Heads are linear, so
    this mean equals the mean head's logits, and the server does not need individual heads.

    The authors' code draws noise from a uniform distribution and has batch normalisation in the hidden
    layer. It weights each head's own cross-entropy by its party's share of the label. Its loss weights
    of 10 decay over rounds. It has one more loss, between outputs on the batch and outputs on generated
    embeddings. HtFLlib has no diversity loss, and a fresh generator optimizer in each round.

    Args:
      groups: architecture -> its parties, with models made by `headed` whose heads have one shape.
      training: of the whole network, on private examples.
      generator: the server's, and how it is trained and used.
      weighted: whether the mean of heads is weighted by parties' numbers of examples, as in both codes,
        or unweighted, as in the paper.
      warm_up: rounds without generated embeddings; the authors' code has 1.
      hyper: learning rates and weights.
      execution, name: as in `fed_md`.
      reduce: how the parties' messages are averaged; by default their weighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_gen, locals())
    groups = check_groups(groups, (SERVER,))
    reduce = checked_mean(reduce)
    width, classes = check_shared_heads(groups)
    check_training("training", training)
    check_plain_gradients("fed_gen", training)
    check_generator(generator)
    check_integer("warm_up", warm_up, low=0)
    for field, value in hyper._asdict().items():
        check_number(f"hyper.{field}", value, low=0)

    def init(key: jax.Array) -> FedGenState:
        params = init_generator(generator, width, classes, keys.derive(key, "init", "generator"))
        optimizer_state = lasting_state("generator.optimizer", generator.optimizer, params)
        # Algorithm 1, line 1: p(y) is uniform.
        shares = jnp.full(classes, 1 / classes)
        models = with_first_head(groups, init_models(groups, key))
        return FedGenState(models, params, optimizer_state, shares)

    def round_(
        state: FedGenState, client_states: PyTree, round: Round, hyper: FedGenHyper
    ) -> AfterRound:
        generated_weight = jnp.where(round.index < warm_up, 0.0, hyper.generated_weight)

        # Algorithm 1, lines 4-12: every user trains, with generated embeddings.
        def update(
            model: Model, server: FromServer, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            size = generator.generated or batch_size_for(training.batch_size, data.capacity)
            params, shares = server

            def of_generated(head: PyTree, key: jax.Array) -> jax.Array:
                return generated_loss(generator, params, head, shares, size, key)

            # Equation 5: cross-entropy on the batch, and on generated embeddings.
            def loss(outputs: tuple[Any, jax.Array], batch: Batch) -> jax.Array:
                of_batch, generated = outputs
                return checked_loss(model.loss, of_batch, batch) + generated_weight * generated

            learner, rate = with_generated_loss(model, of_generated), hyper.learning_rate
            trained = train_client(learner, training, variables, data, key, rate, loss_hook=loss)
            metrics = training_metrics(trained)
            # Line 11: the user sends its head and its label counter.
            _, head = split_head(trained.variables.params)
            weight = jnp.maximum(data.size, 1) if weighted else 1
            counts = label_counts(data, classes, training.preprocess)
            # Counts must not be weighted, so they are divided by the weight here.
            sends = (head, counts / weight)
            return PartyResult(trained.variables, metrics, sends=sends, weight=weight)

        key = keys.derive(round.key, "client_update", round.index)
        message = (state.generator, state.label_shares)
        result = run_parties(groups, update, message, state.models, round, key, execution, reduce)
        # Line 13: the server updates the head and p(y).
        head, counts = result.combined
        shares = shares_of(counts)
        # Line 14: the generator learns, Equation 4.
        key = keys.derive(round.key, "generator", round.index)
        start = (state.generator, state.optimizer_state)
        after, losses = train_generator(generator, start, head, shares, hyper, key)
        # Line 5: users begin the next round with the shared head.
        models = with_same_head(result.states, head)
        metrics = result.metrics | {f"{SERVER}/generator_loss": jnp.mean(losses)}
        return FedGenState(models, *after, shares), client_states, metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name],
        same_for_all(groups, _communication(groups, generator, width, classes)),
        server=lambda state: state.generator,
    )


def shares_of(counts: jax.Array) -> jax.Array:
    """Counts [classes] as shares that sum to 1; equal shares if no count is above 0."""
    counts = jnp.maximum(counts, 0)  # a reduction with noise can make counts negative
    total = jnp.sum(counts)
    return jnp.where(total > 0, counts / jnp.where(total > 0, total, 1), 1 / counts.size)


def _communication(
    groups: Mapping[str, PartyGroup], generator: Generator, width: int, classes: int
) -> Communication:
    """Bytes of head and label counts (up), and of head, generator and label shares (down)."""
    of_key = lambda key: init_generator(generator, width, classes, key)
    shapes = jax.eval_shape(of_key, keys.key_shape())
    up = head_bytes(groups) + classes * np.dtype(np.float32).itemsize
    return Communication(down=up + tree_bytes(shapes), up=up)
