"""Local training: epochs of mini-batch descent on one client, with hooks for a method's terms."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import batches, keys
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import LARGEST_INTEGER, MOST_EPOCHS, check_integer
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.input_types import note_inputs
from fedcodist.core.inputs import ClientData
from fedcodist.core.model import Batch, Model, Variables, applied
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory
from fedcodist.core.padding_checks import check_filled_batches
from fedcodist.core.shape_checks import check_same_shapes
from fedcodist.core.shuffling import permuted_positions

PyTree = Any
_LARGEST_PADDED_BATCH = 4096
# (params, mutable, batch, mask, key) -> (loss, mutable state after the batch)
BatchLoss = Callable[[PyTree, PyTree, Batch, jax.Array, jax.Array], tuple[jax.Array, PyTree]]
# (parameters, mutable state, optimizer's state, sum of losses)
_Carry = tuple[PyTree, PyTree, PyTree, jax.Array]


class LocalTraining(NamedTuple):
    """How a client trains.

    Attributes:
      optimizer: learning rate -> optax optimizer.
      batch_size: examples per step; the last batch of an epoch may be smaller (it is masked).
      epochs: passes over the client's examples.
      preprocess: (batch, key, positions) -> batch, for example decoding and augmentation.
      differentiate: computes the gradient that the optimizer gets for a batch, such as that of
        `fedcodist.example_private`; see `train_client`. None: the gradient of the loss.
    """

    optimizer: OptimizerFactory = optax.sgd
    batch_size: int = 20
    epochs: int = 1
    preprocess: Preprocess = lambda batch, key, positions: batch
    differentiate: Callable[[BatchLoss], Callable[..., Any]] | None = None


class TrainedClient(NamedTuple):
    """A client after local training.

    Attributes:
      variables: the trained model.
      num_steps: int32 scalar, optimizer steps taken.
      loss: float32 scalar, the training loss averaged over steps.
      num_examples: int32 scalar, examples seen, each counted once per epoch.
      optimizer_state: after the last step.
    """

    variables: Variables
    num_steps: jax.Array
    loss: jax.Array
    num_examples: jax.Array
    optimizer_state: PyTree


def train_client(
    model: Model,
    training: LocalTraining,
    variables: Variables,
    data: ClientData,
    key: jax.Array,
    learning_rate: jax.Array | float,
    gradient_hook: Callable[[PyTree, PyTree], PyTree] = lambda gradient, params: gradient,
    loss_hook: Callable[[Any, Batch], jax.Array] | None = None,
    optimizer_state: PyTree = None,
    differentiate: Callable[[BatchLoss], Callable[..., Any]] | None = None,
) -> TrainedClient:
    """Trains a copy of `variables` on one client's examples.

    Each epoch visits every example once in a random order. A client that is trained together with
    larger clients takes as many steps as they do; its surplus steps change nothing. Padding has no
    weight in losses and batch statistics.

    Args:
      model: the network.
      training: optimizer, batch size, epochs and preprocessing.
      variables: where training starts: Variables, or a method's message, which may have more fields.
      data: the client's examples.
      key: drives the order of examples, preprocessing and dropout.
      learning_rate: client learning rate, may be traced.
      gradient_hook: (gradient, params) -> gradient, such as FedProx's or SCAFFOLD's term.
      loss_hook: (outputs, batch) -> per-example loss [batch] in place of the model's.
      optimizer_state: the state from which the optimizer continues; None: a fresh state.
      differentiate: loss of a batch -> function of the same arguments that returns ((loss, mutable
        state), the gradient for the optimizer); pFedMe and Per-FedAvg give one. The mutable state may
        hold more than the model's. The default is `training.differentiate` or `jax.value_and_grad`.

    Returns:
      The trained client. Every step's loss is computed at the parameters before that step.

    Raises:
      ValueError, TypeError: names the field of `training` that is not allowed, or the hook that returns
        something else.
    """
    check_training("training", training, learning_rate=learning_rate)
    batch_size, epochs = batch_size_for(training.batch_size, data.capacity), training.epochs
    if epochs * (data.capacity + batch_size) > LARGEST_INTEGER:
        raise ValueError(
            f"training.epochs must be at most {LARGEST_INTEGER // (data.capacity + batch_size):,} for "
            f"a client of {data.capacity} examples in batches of {batch_size}, got {epochs}."
        )
    optimizer = training.optimizer(learning_rate)
    loss_of, name_of_loss = (model.loss, "loss") if loss_hook is None else (loss_hook, "loss_hook")
    mean_loss = model.mean_loss if loss_hook is None else None
    order = _example_order(keys.derive(key, "order"), data, batch_size, epochs)
    steps_per_epoch = -(-data.size // batch_size)
    num_steps = epochs * steps_per_epoch
    if differentiate is not None and training.differentiate is not None:
        raise ValueError(
            "training.differentiate must be None for a method that makes gradients in a way of its own."
        )
    from_loss = functools.partial(jax.value_and_grad, has_aux=True)
    gradient_of = differentiate or training.differentiate or from_loss

    def mean_of(outputs: Any, batch: Batch, mask: jax.Array) -> jax.Array:
        if mean_loss is not None:
            return mean_loss(outputs, batch, mask)
        per_example = checked_loss(loss_of, outputs, batch, name_of_loss)
        return jnp.sum(per_example * mask) / jnp.maximum(jnp.sum(mask), 1)

    def loss(
        params: PyTree, mutable: PyTree, batch: Batch, mask: jax.Array, dropout_key: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        note_inputs(model, batch)
        variables = Variables(params, mutable)
        outputs, mutable = applied(model, variables, batch, train=True, key=dropout_key, mask=mask)
        check_filled_batches(model.apply, variables, batch, batch_size, data, outputs, mean_of)
        return mean_of(outputs, batch, mask), mutable

    def step(index: jax.Array, carry: _Carry) -> _Carry:
        params, mutable, optimizer_state, loss_sum = carry
        step_in_epoch = index % jnp.maximum(steps_per_epoch, 1)
        first = step_in_epoch * batch_size
        epoch = jnp.minimum(index // jnp.maximum(steps_per_epoch, 1), epochs - 1)
        examples = jax.lax.dynamic_slice(order, (epoch, first), (1, batch_size))[0]
        mask = (first + jnp.arange(batch_size) < data.size).astype(jnp.float32)
        step_key = keys.derive(key, "step", index)
        with jax.named_scope("input"):
            input_key, positions = keys.derive(step_key, "input"), jnp.arange(batch_size)
            batch = batches.read(data.columns, examples, training.preprocess, input_key, positions)
        (value, new_mutable), gradient = gradient_of(loss)(
            params, mutable, batch, mask, keys.derive(step_key, "dropout")
        )
        with jax.named_scope("optimizer"):
            hooked = gradient_hook(gradient, params)
            check_same_shapes("gradient_hook must return a gradient", gradient, hooked)
            # In 64-bit mode hyper-parameters have more digits than a float32 model.
            hooked = jax.tree.map(lambda g, w: g.astype(w.dtype), hooked, params)
            updates, new_state = optimizer.update(hooked, optimizer_state, params)
            new_params = optax.apply_updates(params, updates)
        loss_sum = loss_sum + value.astype(loss_sum.dtype)
        new = (new_params, new_mutable, new_state, loss_sum)
        if not data.ragged:
            return new
        return jax.tree.map(
            lambda after, before: jnp.where(index < num_steps, after, before), new, carry
        )

    bound = epochs * -(-data.bound // batch_size)
    if optimizer_state is None:
        optimizer_state = optimizer.init(variables.params)
    start = (variables.params, variables.mutable, optimizer_state, jnp.zeros((), jnp.float32))
    params, mutable, optimizer_state, loss_sum = jax.lax.fori_loop(0, bound, step, start)
    return TrainedClient(
        Variables(params, mutable),
        num_steps,
        loss_sum / jnp.maximum(num_steps, 1),
        epochs * data.size,
        optimizer_state,
    )


def check_training(
    name: str, training: LocalTraining, fewest_epochs: int = 1, learning_rate: PyTree = 0.1
) -> None:
    """Raises ValueError or TypeError that names the field of `training` which is not allowed."""
    check_factory(f"{name}.optimizer", training.optimizer, learning_rate)
    check_integer(f"{name}.batch_size", training.batch_size, low=1)
    check_integer(f"{name}.epochs", training.epochs, low=fewest_epochs, high=MOST_EPOCHS)
    check_preprocess(f"{name}.preprocess", training.preprocess)


def check_plain_gradients(method: str, training: LocalTraining) -> None:
    """Raises ValueError if gradients are made in another way, as private ones are.

    It is for methods whose parties send more of their examples than a model that was trained on them.
    """
    if training.differentiate is not None:
        raise ValueError(
            f"training.differentiate must be None for {method}, whose parties also send counts of their "
            "labels or what the trained model says of their examples."
        )


def batch_size_for(batch_size: int, capacity: int) -> int:
    """The batch size, reduced to the largest client's examples if it is far larger.

    This only leaves out padding, which changes no result but takes memory. People write 10**9 for "all".
    """
    return max(capacity, 1) if batch_size > max(capacity, _LARGEST_PADDED_BATCH) else batch_size


def last_gradient() -> optax.GradientTransformation:
    """An optimizer that does not change parameters; its state is the last gradient."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return optax.GradientTransformation(
        zeros, lambda gradient, state, params=None: (zeros(gradient), gradient)
    )


def gradient_of_a_batch(
    model: Model,
    training: LocalTraining,
    variables: Variables,
    data: ClientData,
    key: jax.Array,
) -> PyTree:
    """The gradient of a client's loss on one batch of its examples, as in the first step of training.

    Arguments are those of `train_client`. Nothing is trained.
    """
    batch = drawn_examples(data, training.batch_size, keys.derive(key, "batch"))
    without_steps = training._replace(optimizer=lambda rate: last_gradient(), epochs=1)
    trained = train_client(model, without_steps, variables, batch, key, 0.0)
    return trained.optimizer_state


def _example_order(key: jax.Array, data: ClientData, batch_size: int, epochs: int) -> jax.Array:
    """The indices of every epoch's examples in visiting order, int32 [epochs, padded capacity]."""
    padded = -(-data.capacity // batch_size) * batch_size
    positions = jnp.broadcast_to(jnp.arange(padded), (epochs, padded))
    order = permuted_positions(key, positions, data.size, epoch=jnp.arange(epochs)[:, None])
    return data.start + order


def drawn_examples(data: ClientData, count: int, key: jax.Array) -> ClientData:
    """A client's data with `count` of its examples, drawn without replacement; all if it has fewer."""
    count = min(count, data.capacity)
    positions = permuted_positions(key, jnp.arange(count), data.size)
    return ClientData(
        {name: column[data.start + positions] for name, column in data.columns.items()},
        start=jnp.int32(0),
        size=jnp.minimum(data.size, count),
        bound=jnp.minimum(data.bound, count),
        capacity=count,
        ragged=data.ragged,
    )
