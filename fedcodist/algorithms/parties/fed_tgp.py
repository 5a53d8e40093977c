"""FedTGP: FedProto with global prototypes that the server trains to be separated by a margin.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, https://arxiv.org/abs/2401.03230.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    check_groups,
    in_client_order,
    same_for_all,
)
from fedcodist.algorithms.parties.nearest_prototype import (
    PREDICT_BY,
    PROTOTYPE_PREDICTS,
    prototype_predictors,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.prototypes import (
    ClassSums,
    Prototypes,
    check_prototype_groups,
    class_sums,
    no_prototypes,
    prototype_bytes,
    prototype_loss,
    prototypes_of,
)
from fedcodist.algorithms.parties.training_on_prototypes import (
    ServerTraining,
    as_examples,
    check_server_training,
    on_prototypes,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import (
    LocalTraining,
    check_plain_gradients,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.models.headed import apply_head

PyTree = Any
SERVER = "server"
LARGEST, NEAREST = MARGINS = ("largest", "nearest")


class FedTGPState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], the server's network and its prototypes."""

    models: dict[str, Variables]
    generator: PyTree
    prototypes: Prototypes


class FedTGPHyper(NamedTuple):
    """Floats of FedTGP; traced.

    Attributes:
      learning_rate: of local training.
      weight: lambda, of the distance to the prototypes.
      server_learning_rate: of the server's network.
      margin_threshold: tau, the largest margin.
    """

    learning_rate: Any = 0.01
    weight: Any = 10.0
    server_learning_rate: Any = 0.01
    margin_threshold: Any = 100.0


def fed_tgp(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(batch_size=10),
    server_training: ServerTraining = ServerTraining(batch_size=10, epochs=100),
    margin: str = LARGEST,
    predict_by: str = "head",
    hyper: FedTGPHyper = FedTGPHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "fed_tgp",
) -> FederatedAlgorithm:
    """Local training pulls embeddings towards prototypes that the server's network generates.

    A party's loss is CE + lambda MSE(embedding, the global prototype of the example's label), and CE
    alone in the first round. After training it sends its mean embedding of each class, in inference
    mode. The server's network generates the global prototypes from one vector per class, with two layers
    and a ReLU between them. It is trained so that each party's prototype is nearest to the global one of
    its class, by a margin delta. The loss is the cross-entropy of minus the distances, where delta is
    added to the true class's distance. delta is min(a distance between classes' mean prototypes, tau).
    All classes get prototypes, also those that no party has. Optimizers are fresh in every round. The
    paper's sums over prototypes are means over batches here, as in the authors' code.

    Args:
      groups: architecture -> its parties, of `headed` models with embeddings of one width.
      num_classes: labels, and outputs of every model.
      training: on private examples. Defaults are those of the authors' command for CIFAR-10.
      server_training: of the server's network on parties' prototypes.
      margin: which distance between classes: the 'largest' of all, the equation on the authors' slides,
        or the largest that a class has to its 'nearest' class, as in their code.
      predict_by: a party predicts with its 'head', or with the nearest global 'prototype', as in the
        authors' code.
      hyper: learning rates, lambda and tau.
      inference_batch_size: examples per step, at most, when prototypes are computed.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_tgp, locals())
    groups = check_groups(groups)
    width = check_prototype_groups(groups, num_classes)
    check_training("training", training)
    check_plain_gradients("fed_tgp", training)
    check_server_training(server_training)
    check_choice("margin", margin, MARGINS)
    check_choice("predict_by", predict_by, PREDICT_BY)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    for field, value in hyper._asdict().items():
        check_number(f"hyper.{field}", value, low=0)
    generator = generator_of(num_classes, width)

    def init(key: jax.Array) -> FedTGPState:
        start = generator.init(keys.derive(key, "init", SERVER)).params
        return FedTGPState(init_models(groups, key), start, no_prototypes(num_classes, width))

    def round_(
        state: FedTGPState, client_states: PyTree, round: Round, hyper: FedTGPHyper
    ) -> AfterRound:
        def update(
            model: Model,
            prototypes: Prototypes,
            variables: Variables,
            data: ClientData,
            key: jax.Array,
        ) -> PartyResult:
            # A client's loss: that of labels, plus lambda times the distance to global prototypes.
            loss = prototype_loss(model, prototypes, hyper.weight, num_classes)
            trained = train_client(
                model, training, variables, data, key, hyper.learning_rate, loss_hook=loss
            )
            # It sends its prototypes, the mean embeddings of its classes.
            preprocess, size = training.preprocess, inference_batch_size
            sums = class_sums(model, trained.variables, data, num_classes, preprocess, size)
            metrics = training_metrics(trained)
            return PartyResult(trained.variables, metrics, reports=prototypes_of(sums))

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(groups, update, state.prototypes, state.models, round, key, execution)
        of_parties = in_client_order(groups, result.reports)
        # delta(t): the margin, from the mean prototypes Q of classes, at most tau.
        delta = jnp.minimum(margin_between(of_parties, margin), hyper.margin_threshold)
        # The server minimises L_P, the contrastive loss with the margin.
        learned = train_client(
            generator,
            on_prototypes(server_training),
            Variables(state.generator, {}),
            as_examples(of_parties),
            keys.derive(round.key, "client_update", round.index, SERVER),
            hyper.server_learning_rate,
            loss_hook=lambda distances, batch: contrastive_loss(distances, batch["label"], delta),
        ).variables.params
        # The global prototypes of the next round.
        prototypes = Prototypes(generated(learned), jnp.ones_like(state.prototypes.has_class))
        return FedTGPState(result.states, learned, prototypes), client_states, result.metrics

    models = lambda state, name: state.models[name]
    nearest = prototype_predictors(groups, models, lambda state: state.prototypes)
    up = prototype_bytes(num_classes, width)
    vectors = tree_bytes(jax.ShapeDtypeStruct((num_classes, width), jnp.float32))
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        models,
        same_for_all(groups, Communication(down=vectors, up=up)),
        other_predictors=nearest if predict_by == PROTOTYPE_PREDICTS else {},
        server=lambda state: state.generator,
    )


def margin_between(prototypes: Prototypes, margin: str) -> jax.Array:
    """The distance between classes' mean prototypes, a scalar; 0 if there are fewer than two classes.

    Args:
      prototypes: of all parties, [parties, classes, ...].
      margin: 'largest' is the largest distance; 'nearest' the largest of classes' smallest distances.
    """
    sums = ClassSums(jnp.sum(prototypes.vectors, axis=0), jnp.sum(prototypes.has_class, axis=0))
    means = prototypes_of(sums)
    distances = euclidean(means.vectors, means.vectors)
    is_there = means.has_class > 0
    is_pair = is_there[:, None] & is_there & ~jnp.eye(len(is_there), dtype=bool)
    if margin == NEAREST:
        smallest = jnp.min(jnp.where(is_pair, distances, jnp.inf), axis=1)
        return jnp.max(jnp.where(jnp.any(is_pair, axis=1), smallest, 0))
    return jnp.max(jnp.where(is_pair, distances, 0))


def contrastive_loss(distances: jax.Array, labels: jax.Array, margin: jax.Array) -> jax.Array:
    """Cross-entropy [batch] with logits -(distance + margin for the true class), [batch, classes]."""
    right = jax.nn.one_hot(labels, distances.shape[-1], dtype=distances.dtype)
    logits = -(distances + margin * right)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def generator_of(num_classes: int, width: int) -> Model:
    """The server's network as a model: a batch's `embedding` -> distances to all global prototypes.

    Its parameters are a vector per class, drawn from a normal distribution, and two layers of the
    embeddings' width; `generated` computes prototypes from them.
    """

    def init(key: jax.Array) -> Variables:
        draw = lambda part: keys.derive(key, part)
        layer = lambda part: {
            "kernel": jax.nn.initializers.lecun_normal()(draw(part), (width, width)),
            "bias": jnp.zeros(width),
        }
        vectors = jax.random.normal(draw("vectors"), (num_classes, width))
        params = {"vectors": vectors, "hidden": layer("hidden"), "output": layer("output")}
        return Variables(params, {})

    def apply(variables: Variables, batch: Batch, **_: Any) -> tuple[jax.Array, PyTree]:
        return euclidean(batch["embedding"], generated(variables.params)), variables.mutable

    loss = lambda distances, batch: contrastive_loss(distances, batch["label"], jnp.zeros(()))
    return Model(init, apply, loss, {}, num_classes)


def generated(generator: PyTree) -> jax.Array:
    """The global prototypes [classes, width] that the server's network makes."""
    hidden = jax.nn.relu(apply_head(generator["hidden"], generator["vectors"]))
    return apply_head(generator["output"], hidden)


def euclidean(ones: jax.Array, others: jax.Array) -> jax.Array:
    """Distances [ones, others] of vectors; where a distance is 0, its gradient is 0 too."""
    squared = jnp.sum((ones[:, None] - others) ** 2, axis=-1)
    is_zero = squared == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squared)))
