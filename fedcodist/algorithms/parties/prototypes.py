"""Prototypes, the mean embeddings of classes: shared by FedProto, FedGH and FedTGP.

Parties have their own networks, made by `headed`, with embeddings of the same width. A party without
examples of a class has no prototype of this class.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import PartyGroup, check_widths
from fedcodist.algorithms.parties.own_examples import label_sums
from fedcodist.core.batches import Preprocess
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.models.headed import check_heads, embedding_of


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


def class_sums(
    model: Model,
    variables: Variables,
    data: ClientData,
    num_classes: int,
    preprocess: Preprocess,
    batch_size: int,
) -> ClassSums:
    """The sums of a party's embeddings of its own examples, in evaluation mode.

    Args:
      model, variables: the party's model.
      data: its examples.
      num_classes: labels.
      preprocess: that of training; it gets one fixed key.
      batch_size: examples per step, at most.
    """
    return ClassSums(
        *label_sums(model, variables, data, num_classes, preprocess, batch_size, embedding_of)
    )


def prototypes_of(sums: ClassSums) -> Prototypes:
    """The means from sums. For sums over several parties, means are weighted by examples."""
    vectors = sums.totals / jnp.maximum(sums.counts, 1)[..., None]
    return Prototypes(vectors, (sums.counts > 0.5).astype(vectors.dtype))


def prototype_loss(
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


def no_prototypes(num_classes: int, width: int) -> Prototypes:
    """The prototypes before the first round: none."""
    return Prototypes(jnp.zeros((num_classes, width)), jnp.zeros(num_classes))


def prototype_bytes(num_classes: int, width: int) -> int:
    """Bytes of prototypes, or of sums: per class a vector, and whether it exists or how many it sums."""
    return num_classes * (width + 1) * np.dtype(np.float32).itemsize


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
