"""FedGen's generator: draws, the loss of heads on generated embeddings, and the generator's training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import keys
from fedcodist.core.checks import check_integer
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory
from fedcodist.models.embedding_generator import EmbeddingGenerator, diversity
from fedcodist.models.headed import HEAD, apply_head

PyTree = Any


class Generator(NamedTuple):
    """The server's generator, how it is trained in a round, and how much parties use it.

    Attributes:
      noise, hidden: widths of its noise and of its hidden layer.
      steps, batch_size: of its training in a round.
      optimizer: learning rate -> optax optimizer; its state continues over rounds.
      generated: generated embeddings per step of local training; None: as many as the batch size.
    """

    noise: int = 32
    hidden: int = 256
    steps: int = 50
    batch_size: int = 32
    optimizer: OptimizerFactory = optax.adam
    generated: int | None = None


def check_generator(generator: Generator) -> None:
    """Raises ValueError or TypeError that names the field which is not allowed."""
    for field in ("noise", "hidden", "steps", "batch_size"):
        check_integer(f"generator.{field}", getattr(generator, field), low=1)
    if generator.generated is not None:
        check_integer("generator.generated", generator.generated, low=1)
    check_factory("generator.optimizer", generator.optimizer)


def init_generator(settings: Generator, width: int, classes: int, key: jax.Array) -> PyTree:
    """The generator's initial parameters."""
    network = EmbeddingGenerator(classes, settings.hidden, width)
    labels, noise = jnp.zeros(1, jnp.int32), jnp.zeros((1, settings.noise))
    return network.init(key, labels, noise)["params"]


def drawn(
    key: jax.Array, label_shares: jax.Array, count: int, noise: int
) -> tuple[jax.Array, jax.Array]:
    """Labels [count] drawn with the given shares, and standard normal noise [count, noise]."""
    labels = jax.random.categorical(
        keys.derive(key, "labels"), jnp.log(label_shares), shape=(count,)
    )
    return labels, jax.random.normal(keys.derive(key, "noise"), (count, noise))


def generated_loss(
    settings: Generator,
    params: PyTree,
    head: PyTree,
    label_shares: jax.Array,
    count: int,
    key: jax.Array,
    diversity_weight: Any = None,
) -> jax.Array:
    """The mean cross-entropy of a head on generated embeddings and their labels, scalar.

    Args:
      settings, params: the generator.
      head: of a party, or the mean of all.
      label_shares: p(y), [classes].
      count: embeddings.
      key: of labels and noise.
      diversity_weight: of the diversity loss, for the generator's own training.
    """
    labels, noise = drawn(key, label_shares, count, settings.noise)
    width, classes = head["kernel"].shape
    network = EmbeddingGenerator(classes, settings.hidden, width)
    embeddings: Any = network.apply({"params": params}, labels, noise)
    logits = apply_head(head, embeddings)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    if diversity_weight is None:
        return loss
    return loss + diversity_weight * diversity(noise, embeddings)


def with_generated_loss(model: Model, loss: Callable[[PyTree, jax.Array], jax.Array]) -> Model:
    """The model with training outputs (its own, the loss of its head on generated embeddings).

    Args:
      model: with a head, as `headed` makes it.
      loss: (head, key) -> scalar.
    """

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        **arguments: Any,
    ) -> tuple[Any, PyTree]:
        outputs, mutable = model.apply(variables, batch, train=train, key=key, **arguments)
        if not train:
            return outputs, mutable
        if key is None:
            raise ValueError("key must be given in training, where it draws generated embeddings.")
        return (outputs, loss(variables.params[HEAD], keys.derive(key, "generated"))), mutable

    return model._replace(apply=apply)


def train_generator(
    settings: Generator,
    start: tuple[PyTree, PyTree],
    head: PyTree,
    label_shares: jax.Array,
    hyper: Any,
    key: jax.Array,
) -> tuple[tuple[PyTree, PyTree], jax.Array]:
    """The generator after a round's training.

    Args:
      settings: steps, batch size and optimizer.
      start: (parameters, optimizer's state).
      head: the mean of the parties'.
      label_shares: p(y), [classes].
      hyper: FedGenHyper.
      key: of the draws.

    Returns:
      (parameters, optimizer's state), and each step's loss [steps].
    """
    optimizer = settings.optimizer(hyper.generator_learning_rate)

    def step(
        carry: tuple[PyTree, PyTree], index: jax.Array
    ) -> tuple[tuple[PyTree, PyTree], jax.Array]:
        params, optimizer_state = carry

        def loss(params: PyTree) -> jax.Array:
            step_key = keys.derive(key, index)
            size, weight = settings.batch_size, hyper.diversity_weight
            return generated_loss(settings, params, head, label_shares, size, step_key, weight)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return jax.lax.scan(step, start, jnp.arange(settings.steps))
