"""Sums per label of a network's outputs during training, as a part of its mutable state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, TrainedClient, train_client
from fedcodist.core.model import Batch, Model, Variables

PyTree = Any
OWN, SUMS, COUNTS = "own", "sums", "counts"


class LabelSums(NamedTuple):
    """For each label, the sum of its examples' logits [labels, classes] and their number [labels]."""

    logits: jax.Array
    counts: jax.Array


def train_summing_outputs(
    model: Model,
    training: LocalTraining,
    variables: Variables,
    data: ClientData,
    key: jax.Array,
    learning_rate: Any,
    loss_hook: Callable[[Any, Batch], jax.Array],
) -> tuple[TrainedClient, LabelSums]:
    """`train_client` that also returns the sums of training outputs per label."""
    start = with_sums(model, variables)
    trained = train_client(
        summing_outputs(model), training, start, data, key, learning_rate, loss_hook=loss_hook
    )
    variables_of_model, sums = without_sums(trained.variables)
    return trained._replace(variables=variables_of_model), sums


def summing_outputs(model: Model) -> Model:
    """The model with sums of its training outputs in its mutable state.

    An example counts once in each epoch, with the logits before the step that trains on it. Padding does
    not count. Batches must have 'label'.
    """

    def init(key: jax.Array) -> Variables:
        return with_sums(model, model.init(key))

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        mask: jax.Array | None = None,
        **arguments: Any,
    ) -> tuple[Any, PyTree]:
        mutable = variables.mutable
        variables_of_model = Variables(variables.params, mutable[OWN])
        outputs, changed = model.apply(
            variables_of_model, batch, train=train, mask=mask, **arguments
        )
        if not train:
            return outputs, mutable
        logits = jax.lax.stop_gradient(checked_logits(outputs)).astype(mutable[SUMS].dtype)
        labels = class_labels(batch["label"], model.num_classes)
        is_of_label = jax.nn.one_hot(labels, model.num_classes, dtype=logits.dtype)
        if mask is not None:
            is_of_label *= mask[:, None]
        sums = mutable[SUMS] + jnp.matmul(is_of_label.T, logits, precision="highest")
        counts = mutable[COUNTS] + jnp.sum(is_of_label, axis=0)
        return outputs, {OWN: changed, SUMS: sums, COUNTS: counts}

    return model._replace(init=init, apply=apply)


def with_sums(model: Model, variables: Variables) -> Variables:
    """The variables of `summing_outputs(model)`, with sums of 0."""
    classes = model.num_classes
    sums, counts = jnp.zeros((classes, classes)), jnp.zeros(classes)
    return Variables(variables.params, {OWN: variables.mutable, SUMS: sums, COUNTS: counts})


def without_sums(variables: Variables) -> tuple[Variables, LabelSums]:
    """The model's own variables, and the sums."""
    mutable = variables.mutable
    return Variables(variables.params, mutable[OWN]), LabelSums(mutable[SUMS], mutable[COUNTS])
