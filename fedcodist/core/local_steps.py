"""Local training by steps on an endless stream of examples, for clients who meet between rounds."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import batches, keys
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import check_function, check_integer, check_stream
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.input_types import note_inputs
from fedcodist.core.inputs import ClientData
from fedcodist.core.model import Model, Variables, applied
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory, lasting_state
from fedcodist.core.shuffling import stream_positions

PyTree = Any
# The purpose of the clients' keys, which are the same in all rounds and methods.
CLIENT_STEPS = "client_steps"
# (variables with the private batch's mutable state, step of the run, step of the round, key)
# -> (gradient of a further term, mutable state, metrics)
FurtherTerm = Callable[
    [Variables, jax.Array, jax.Array, jax.Array], tuple[PyTree, PyTree, dict[str, jax.Array]]
]


def cosine_decay(rate: Any, done: jax.Array) -> jax.Array:
    """The rate at a share `done` in [0, 1) of the run's steps: rate (1 + cos(pi done)) / 2."""
    return rate * (1 + jnp.cos(jnp.pi * done)) / 2


class StepTraining(NamedTuple):
    """How a client trains. Defaults are MHD's as we know them.

    The batch size of 512, the 200 steps and the momentum are not verified in its paper.

    Attributes:
      optimizer: learning rate -> optax optimizer.
      batch_size: private examples per step. Batches are always full: a client's examples are shuffled
        again after every pass, and a batch may span two passes.
      steps: optimizer steps per round; clients communicate between rounds.
      preprocess: (batch, key, positions) -> batch, of private examples.
      schedule: (learning rate, share of the run's steps done) -> the step's learning rate.
    """

    optimizer: OptimizerFactory = lambda rate: optax.sgd(rate, momentum=0.9)
    batch_size: int = 512
    steps: int = 200
    preprocess: Preprocess = lambda batch, key, positions: batch
    schedule: Callable[[Any, jax.Array], Any] = cosine_decay


class Learner(NamedTuple):
    """A client's model and the state of its optimizer, which continues over all rounds."""

    variables: Variables
    optimizer_state: PyTree


def check_step_training(training: StepTraining, num_rounds: int) -> None:
    """Raises ValueError or TypeError that names the argument which is not allowed."""
    check_factory("training.optimizer", training.optimizer)
    check_stream("training.batch_size", training.batch_size, "training.steps", training.steps)
    check_preprocess("training.preprocess", training.preprocess)
    check_function("training.schedule", training.schedule, ("rate", "share of steps done"), "rate")
    check_integer("num_rounds", num_rounds, low=1)


def start_learners(training: StepTraining, models: dict[str, Variables]) -> dict[str, Learner]:
    """Adds fresh optimizer states to models, architecture -> leaves [group, ...]."""
    fresh = jax.vmap(functools.partial(lasting_state, "training.optimizer", training.optimizer))
    return {name: Learner(variables, fresh(variables.params)) for name, variables in models.items()}


def train_steps(
    model: Model,
    training: StepTraining,
    learner: Learner,
    data: ClientData,
    key: jax.Array,
    round: jax.Array,
    num_rounds: int,
    learning_rate: Any,
    further: FurtherTerm | None = None,
    further_metrics: tuple[str, ...] = (),
) -> tuple[Learner, dict[str, jax.Array]]:
    """Trains a client for one round of steps. A client without examples (data.bound 0) takes no step.

    Batches, preprocessing and dropout depend on the key and the step alone, so methods that share a key
    see the same private batches.

    Args:
      model: the network.
      training: optimizer, batch size, steps, preprocessing and schedule.
      learner: the client's model and optimizer state before the round.
      data: the client's examples.
      key: the client's key, the same in all rounds.
      round: counted from 0.
      num_rounds: of the run, for the schedule.
      learning_rate: before the schedule, may be traced.
      further: a loss term beside the model's loss on private examples. Its gradient is added.
      further_metrics: the names of the term's metrics.

    Returns:
      The learner after the round, and means over steps of the private `loss` and the term's metrics.
    """
    indices = data.start + stream_positions(
        keys.derive(key, "private"),
        jnp.asarray(round, jnp.uint32) * (training.steps * training.batch_size),
        training.steps * training.batch_size,
        data.size,
    ).reshape(training.steps, training.batch_size)
    positions = jnp.arange(training.batch_size)

    def one_step(round_step: jax.Array, learner: Learner) -> tuple[Learner, dict[str, jax.Array]]:
        variables, optimizer_state = learner
        run_step = round * training.steps + round_step
        step_key = keys.derive(key, "step", run_step)
        input_key = keys.derive(step_key, "input")
        batch = batches.read(
            data.columns, indices[round_step], training.preprocess, input_key, positions
        )

        note_inputs(model, batch)

        def private_loss(params: PyTree) -> tuple[jax.Array, PyTree]:
            outputs, mutable = applied(
                model,
                Variables(params, variables.mutable),
                batch,
                train=True,
                key=keys.derive(step_key, "dropout"),
            )
            return jnp.mean(checked_loss(model.loss, outputs, batch)), mutable

        (loss, mutable), gradient = jax.value_and_grad(private_loss, has_aux=True)(variables.params)
        metrics = {"loss": loss}
        if further is not None:
            # Gradients are added, not losses. A term of weight 0 then adds zeros, and training agrees
            # to the bit with training without the term.
            extra, mutable, more = further(
                Variables(variables.params, mutable),
                run_step,
                round_step,
                keys.derive(step_key, "further"),
            )
            gradient = jax.tree.map(jnp.add, gradient, extra)
            metrics |= more
        # After the last of `num_rounds` rounds the rate stays as it was at the end.
        done = jnp.minimum(jnp.asarray(run_step, float) / (num_rounds * training.steps), 1.0)
        optimizer = training.optimizer(training.schedule(learning_rate, done))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, variables.params)
        params = optax.apply_updates(variables.params, updates)
        return Learner(Variables(params, mutable), optimizer_state), metrics

    def step(
        round_step: jax.Array, carry: tuple[Learner, dict[str, jax.Array]]
    ) -> tuple[Learner, dict[str, jax.Array]]:
        learner, totals = carry
        learner, metrics = one_step(round_step, learner)
        return learner, {n: total + metrics[n].astype(total.dtype) for n, total in totals.items()}

    totals = {name: jnp.zeros((), float) for name in ("loss", *further_metrics)}
    steps = jnp.where(data.bound > 0, training.steps, 0)
    learner, totals = jax.lax.fori_loop(0, steps, step, (learner, totals))
    return learner, {name: total / training.steps for name, total in totals.items()}
