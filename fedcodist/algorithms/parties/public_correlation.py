"""FCCL's training on public batches: outputs learn to correlate with the mean outputs of all parties."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.party import (
    PartiesResult,
    PartyResult,
    PartyUpdate,
    if_here,
    run_parties,
)
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import batches, keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory
from fedcodist.core.shuffling import permuted_positions

PyTree = Any
# A party's variables, and the state of its optimizer
Party = tuple[Variables, PyTree]


class PublicBatches(NamedTuple):
    """How parties learn on public examples, whose labels are not used.

    Attributes:
      num_public: number of examples of the data set `public`.
      public_batch_size: examples per step. A pass leaves out the examples that do not fill a batch.
      public_epochs: passes in a round.
      optimizer: learning rate -> optax optimizer, fresh in every round.
      preprocess: (batch, key, positions) -> batch.
    """

    num_public: int
    public_batch_size: int = 256
    public_epochs: int = 1
    optimizer: OptimizerFactory = optax.adam
    preprocess: Preprocess = lambda batch, key, positions: batch


def public_order(key: jax.Array, public: PublicBatches) -> jax.Array:
    """Indices of public examples in a round's batches, int32 [steps, batch]; each pass reshuffles."""
    used = public.num_public // public.public_batch_size * public.public_batch_size
    positions = jnp.broadcast_to(jnp.arange(used), (public.public_epochs, used))
    epochs = jnp.arange(public.public_epochs)[:, None]
    order = permuted_positions(key, positions, public.num_public, epochs)
    return order.reshape(-1, public.public_batch_size)


def learn_from_others(
    groups: Mapping[str, PartyGroup],
    models: Mapping[str, Variables],
    public: PublicBatches,
    round: Round,
    hyper: Any,
    execution: Execution,
    reduce: Reduce | None,
) -> tuple[dict[str, Variables], dict[str, jax.Array]]:
    """Parties' models, leaves [group, ...], after a round's public batches, and the reduction's metrics.

    Measured bytes are summed over batches; other metrics, such as `<party>/client_clipped_share`, are
    means.

    Args:
      groups, models: architecture -> its parties, and their models.
      public: how they learn.
      round: with the data set `public`, indices [steps, batch].
      hyper: has `public_learning_rate` and `off_diagonal`.
      execution: how parties are executed.
      reduce: how the parties' logits are averaged.
    """
    examples = round.inputs.examples[PUBLIC]

    def batch_of(index: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        positions = jnp.arange(public.public_batch_size)
        rows = examples.indices[index]
        return batches.read(examples.columns, rows, public.preprocess, key, positions)

    def step(
        parties: dict[str, Party], index: jax.Array
    ) -> tuple[dict[str, Party], dict[str, jax.Array]]:
        key = keys.derive(round.key, "public", round.index, index)
        batch = batch_of(index, keys.derive(key, "input"))

        def answer(
            model: Model, batch: Batch, party: Party, data: ClientData, key: jax.Array
        ) -> PartyResult:
            logits = lambda: _in_training(model, party[0], batch, key)[0]
            return PartyResult((), {}, if_here(data, logits))

        def learn(
            model: Model,
            received: tuple[Batch, jax.Array],
            party: Party,
            data: ClientData,
            key: jax.Array,
        ) -> PartyResult:
            batch, mean = received
            rate, off_diagonal = hyper.public_learning_rate, hyper.off_diagonal

            def learned() -> Party:
                return correlated_step(
                    model, public.optimizer, party, batch, mean, key, rate, off_diagonal
                )

            return PartyResult(if_here(data, learned), {})

        # One key for both passes, so that dropout is the same in prediction and in training.
        def run(update: PartyUpdate, message: PyTree) -> PartiesResult:
            return run_parties(groups, update, message, parties, round, key, execution, reduce)

        answers = run(answer, batch)
        mean = answers.combined
        return run(learn, (batch, mean)).states, answers.metrics

    optimizer = public.optimizer(hyper.public_learning_rate)
    parties = {
        name: (values, jax.vmap(optimizer.init)(values.params)) for name, values in models.items()
    }
    parties, metrics = jax.lax.scan(step, parties, jnp.arange(len(examples.indices)))
    of_round = {
        metric: jnp.sum(values) if "_bytes_" in metric else jnp.mean(values)
        for metric, values in metrics.items()
    }
    return {name: variables for name, (variables, _) in parties.items()}, of_round


def correlation_loss(logits: jax.Array, mean: jax.Array, off_diagonal: Any) -> jax.Array:
    """The loss of logits [batch, classes] against the parties' mean logits, a scalar."""

    def normalised(values: jax.Array) -> jax.Array:
        # A constant changes no correlation. Without the first row, the mean of equal numbers is exact.
        moved = values - jax.lax.stop_gradient(values[0])
        centred = moved - jnp.mean(moved, axis=0)
        square = jnp.sum(centred**2, axis=0)
        # If all logits of a class are equal but for rounding, its correlations are 0.
        rounding = 4 * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values), axis=0)
        is_equal = square <= len(values) * rounding**2
        unit = centred / jnp.sqrt(jnp.where(is_equal, 1, square))
        return jnp.where(is_equal, 0, unit)

    correlations = normalised(logits).T @ normalised(mean)
    is_diagonal = jnp.eye(len(correlations), dtype=bool)
    same = jnp.sum(jnp.where(is_diagonal, (1 - correlations) ** 2, 0))
    return same + off_diagonal * jnp.sum(jnp.where(is_diagonal, 0, (1 + correlations) ** 2))


def correlated_step(
    model: Model,
    optimizer: OptimizerFactory,
    party: Party,
    batch: Mapping[str, jax.Array],
    mean: jax.Array,
    key: jax.Array,
    learning_rate: Any,
    off_diagonal: Any,
) -> Party:
    """A party's variables and optimizer state after a step on a public batch's correlation loss."""
    variables, state = party

    def loss(params: PyTree) -> tuple[jax.Array, PyTree]:
        logits, mutable = _in_training(model, variables._replace(params=params), batch, key)
        return correlation_loss(logits, mean, off_diagonal), mutable

    gradient, mutable = jax.grad(loss, has_aux=True)(variables.params)
    updates, state = optimizer(learning_rate).update(gradient, state, variables.params)
    return Variables(optax.apply_updates(variables.params, updates), mutable), state


def checked_steps(public: PublicBatches) -> int:
    """The number of public batches in a round; raises ValueError or TypeError that names the field."""
    check_integer("public.num_public", public.num_public, low=1)
    check_integer("public.public_batch_size", public.public_batch_size, low=2)
    check_integer("public.public_epochs", public.public_epochs, low=1)
    check_factory("public.optimizer", public.optimizer)
    check_preprocess("public.preprocess", public.preprocess)
    if public.public_batch_size > public.num_public:
        raise ValueError(
            f"public.public_batch_size must be at most the {public.num_public} public examples, got "
            f"{public.public_batch_size}."
        )
    return public.public_epochs * (public.num_public // public.public_batch_size)


def _in_training(
    model: Model, variables: Variables, batch: Batch, key: jax.Array
) -> tuple[jax.Array, PyTree]:
    size = next(iter(batch.values())).shape[0]
    outputs, mutable = model.apply(variables, batch, train=True, key=key, mask=jnp.ones(size))
    return checked_logits(outputs), mutable
