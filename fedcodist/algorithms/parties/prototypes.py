"""Prototypes, the mean embeddings of classes: shared by FedProto, FedGH and FedTGP.

Parties have their own networks, made by `headed`, with embeddings of the same width. A party without
examples of a class has no prototype of this class.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.parties.groups import PartyGroup, check_widths, party_names
from fedcodist.algorithms.parties.own_examples import label_sums
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import LayerOutputs, logits_of
from fedcodist.core.local_training import LocalTraining, check_training
from fedcodist.core.method import Predictor
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.models.headed import check_heads, embedding_of

PyTree = Any
HEAD_PREDICTS, PROTOTYPE_PREDICTS = PREDICT_BY = ("head", "prototype")


class ClassSums(NamedTuple):
    """Sums of embeddings per class [classes, width], and numbers of examples [classes].

    The sum of several parties' ClassSums is a ClassSums again.
    """

    totals: jax.Array
    counts: jax.Array


class Prototypes(NamedTuple):
    """One vector per class [..., classes, width], and whether the class has one, 1 or 0 [..., classes].

    The vector of a class without a prototype is 0.
    """

    vectors: jax.Array
    has_class: jax.Array


class ServerTraining(NamedTuple):
    """How a server trains on prototypes: learning rate -> optimizer, prototypes per step, passes."""

    optimizer: OptimizerFactory = optax.sgd
    batch_size: int = 1
    epochs: int = 1


def check_prototype_groups(groups: Mapping[str, PartyGroup], num_classes: int) -> int:
    """Returns the width of the embeddings.

    Args:
      groups: checked groups.
      num_classes: labels, and outputs of every model.

    Raises:
      ValueError: names the argument, if a model has no head or heads have several shapes.
    """
    width, _ = check_heads("groups", {name: group.model for name, group in groups.items()})
    check_widths(groups, num_classes)
    return width


def check_server_training(training: ServerTraining) -> None:
    """Raises ValueError or TypeError that names the field of `server_training`."""
    check_training("server_training", on_prototypes(training))


def no_prototypes(num_classes: int, width: int) -> Prototypes:
    """The prototypes before the first round: none."""
    return Prototypes(jnp.zeros((num_classes, width)), jnp.zeros(num_classes))


def pulled(
    model: Model, prototypes: Prototypes, weight: Any, num_classes: int
) -> Callable[[Any, Batch], jax.Array]:
    """A party's loss per example: the model's loss plus weight times MSE(embedding, prototype).

    MSE is the mean over coordinates of (embedding - prototype of the example's label)^2. It is 0 for
    labels without a prototype.
    """

    def loss(outputs: LayerOutputs, batch: Batch) -> jax.Array:
        labels = class_labels(batch["label"], num_classes)
        gap = embedding_of(outputs) - prototypes.vectors[labels]
        distance = prototypes.has_class[labels] * jnp.mean(gap**2, axis=-1)
        return checked_loss(model.loss, outputs, batch) + weight * distance

    return loss


def class_sums(
    model: Model,
    variables: Variables,
    data: ClientData,
    num_classes: int,
    training: LocalTraining,
    batch_size: int,
) -> ClassSums:
    """The sums of a party's embeddings of its own examples, in evaluation mode.

    Args:
      model, variables: the party's model.
      data: its examples.
      num_classes: labels.
      training: whose preprocessing is used, with one fixed key.
      batch_size: examples per step, at most.
    """
    return ClassSums(
        *label_sums(model, variables, data, num_classes, training, batch_size, embedding_of)
    )


def prototypes_of(sums: ClassSums) -> Prototypes:
    """The means from sums. For sums over several parties, means are weighted by examples."""
    vectors = sums.totals / jnp.maximum(sums.counts, 1)[..., None]
    return Prototypes(vectors, (sums.counts > 0.5).astype(vectors.dtype))


def prototype_bytes(num_classes: int, width: int) -> int:
    """Bytes of prototypes, or of sums: per class a vector, and whether it exists or how many it sums."""
    return num_classes * (width + 1) * np.dtype(np.float32).itemsize


def as_examples(prototypes: Prototypes) -> ClientData:
    """Parties' prototypes [parties, classes, ...] in the form of one client's examples, for a server.

    Columns are `embedding` and `label`. Existing prototypes come first, in the order of parties and
    classes; only they count as examples.
    """
    parties, classes, width = prototypes.vectors.shape
    has_class = prototypes.has_class.reshape(-1) > 0
    order = jnp.argsort(~has_class, stable=True)
    columns = {
        "embedding": prototypes.vectors.reshape(-1, width)[order],
        "label": jnp.tile(jnp.arange(classes), parties)[order],
    }
    size = jnp.sum(has_class, dtype=jnp.int32)
    return ClientData(columns, jnp.int32(0), size, size, parties * classes, ragged=False)


def on_prototypes(training: ServerTraining) -> LocalTraining:
    """The server's training as LocalTraining of a client whose examples are prototypes."""
    return LocalTraining(training.optimizer, training.batch_size, training.epochs)


def prototype_predictors(
    groups: Mapping[str, PartyGroup],
    models: Callable[[PyTree, str], Variables],
    prototypes: Callable[[PyTree], Prototypes],
) -> dict[str, Predictor]:
    """Predictors of parties that predict with the nearest prototype in place of their head.

    The logits are minus the squared distances. A class without a prototype is farther than all others.
    While there are no prototypes at all, the head predicts.

    Args:
      groups: architecture -> its parties.
      models: (algorithm state, architecture) -> Variables, leaves [group, ...].
      prototypes: algorithm state -> global prototypes.
    """
    names = party_names(groups)

    def predictor(name: str, model: Model) -> Predictor:
        def variables(state: PyTree) -> Variables:
            params, mutable = models(state, name)
            count = len(names[name])
            each = lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape))
            return Variables(params, (mutable, jax.tree.map(each, prototypes(state))))

        def predict(values: Variables, batch: Batch) -> LayerOutputs:
            mutable, nearest_of = values.mutable
            outputs = model.apply(Variables(values.params, mutable), batch)[0]
            embedding = embedding_of(outputs)
            by_prototype = nearness(embedding, nearest_of)
            is_any = jnp.any(nearest_of.has_class > 0)
            logits = jnp.where(is_any, by_prototype, logits_of(outputs))
            return LayerOutputs(logits, outputs.hidden)

        clients = tuple(groups[name].clients.tolist())
        return Predictor(model, variables, predict, names[name], clients)

    return {name: predictor(name, group.model) for name, group in groups.items()}


def nearness(embedding: jax.Array, prototypes: Prototypes) -> jax.Array:
    """Minus the squared distances [batch, classes] of embeddings [batch, width] to prototypes.

    For a class without a prototype it is one less than the smallest of the others.
    """
    gap = embedding[:, None] - prototypes.vectors
    near = -jnp.sum(gap**2, axis=-1)
    has_class = prototypes.has_class > 0
    farthest = jnp.min(jnp.where(has_class, near, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(has_class, near, farthest - 1)
