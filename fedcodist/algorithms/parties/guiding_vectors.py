"""FedL2G's guiding vectors, one per label: the guided loss, and gradients for them on held-out data."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import batches, keys
from fedcodist.core.example_losses import Loss, checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.shuffling import permuted_positions

PyTree = Any


class LabelSlopes(NamedTuple):
    """Gradients for the vectors [labels, width], and which labels have one [labels]; or sums of both."""

    slopes: jax.Array
    has_label: jax.Array


def study_and_quiz(
    data: ClientData, quiz_size: int, key: jax.Array
) -> tuple[ClientData, ClientData]:
    """Splits a party's examples at random into (study, quiz); at most half of them are quiz examples."""
    held_out = jnp.minimum(quiz_size, data.size // 2)
    order = data.start + permuted_positions(key, jnp.arange(data.capacity), data.size)
    columns = lambda rows: {name: column[rows] for name, column in data.columns.items()}
    places = jnp.minimum(held_out + jnp.arange(data.capacity), data.capacity - 1)
    # Without ragged sizes the bound is the size of every party.
    bound = data.bound if data.ragged else jnp.maximum(data.bound - held_out, 0)
    study = dataclasses.replace(
        data,
        columns=columns(order[places]),
        start=jnp.int32(0),
        size=data.size - held_out,
        bound=bound,
    )
    count = min(quiz_size, data.capacity)
    quiz = ClientData(
        columns(order[:count]),
        start=jnp.int32(0),
        size=held_out,
        bound=held_out,
        capacity=count,
        ragged=data.ragged,
    )
    return study, quiz


def guided_loss(model: Model, vectors: jax.Array, read_outputs: Any, weight: Any) -> Any:
    """(outputs, batch) -> CE + weight MSE(output, v_y) per example, a mean over the output's entries."""

    def loss(outputs: Any, batch: Batch) -> jax.Array:
        labels = class_labels(batch["label"], len(vectors))
        distance = jnp.mean((read_outputs(outputs) - vectors[labels]) ** 2, axis=-1)
        return checked_loss(model.loss, outputs, batch) + weight * distance

    return loss


def guiding_gradients(
    model: Model,
    variables: Variables,
    vectors: jax.Array,
    study: ClientData,
    quiz: ClientData,
    training: LocalTraining,
    read_outputs: Any,
    weight: Any,
    learning_rate: Any,
    key: jax.Array,
) -> LabelSlopes:
    """The gradient, with respect to the vectors, of the quiz loss after one guided study step.

    With u the quiz loss's gradient after the step, this is the gradient of -rate <u, g>. The study
    loss's gradient g is the only term that depends on the vectors.
    """
    studied, study_mask = _all_of(study, training, keys.derive(key, "study_input"))
    asked, quiz_mask = _all_of(quiz, training, keys.derive(key, "quiz_input"))

    def mean_loss(
        params: PyTree, batch: Batch, mask: jax.Array, loss: Loss, purpose: str
    ) -> jax.Array:
        outputs, _ = model.apply(
            Variables(params, variables.mutable),
            batch,
            train=True,
            key=keys.derive(key, purpose),
            mask=mask,
        )
        per_example = checked_loss(loss, outputs, batch)
        return jnp.sum(per_example * mask) / jnp.maximum(jnp.sum(mask), 1)

    def study_loss(params: PyTree, vectors: jax.Array) -> jax.Array:
        loss = guided_loss(model, vectors, read_outputs, weight)
        return mean_loss(params, studied, study_mask, loss, "study_dropout")

    params = variables.params
    step = jax.grad(study_loss)(params, vectors)
    stepped = jax.tree.map(lambda p, g: p - learning_rate * g, params, step)
    towards = jax.grad(mean_loss)(stepped, asked, quiz_mask, model.loss, "quiz_dropout")

    def along(vectors: jax.Array) -> jax.Array:
        return optax.tree.vdot(towards, jax.grad(study_loss)(params, vectors))

    slopes = -learning_rate * jax.grad(along)(vectors)
    labels = class_labels(studied["label"], len(vectors))
    is_there = jax.nn.one_hot(labels, len(vectors)) * study_mask[:, None]
    has_label = (jnp.sum(is_there, axis=0) > 0) & (quiz.size > 0)
    # Without a quiz, batch normalisation of padding alone may give NaN.
    slopes = jnp.where(has_label[:, None], slopes, 0)
    return LabelSlopes(slopes, has_label.astype(vectors.dtype))


def _all_of(data: ClientData, training: LocalTraining, key: jax.Array) -> tuple[Any, jax.Array]:
    """All examples as one batch, and its mask."""
    places = batches.places(0, data.capacity, data.size)
    rows = data.start + places.indices
    batch = batches.read(data.columns, rows, training.preprocess, key, places.positions)
    return batch, places.is_real.astype(jnp.float32)
