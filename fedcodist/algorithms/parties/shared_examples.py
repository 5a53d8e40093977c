"""Examples that all parties have, such as public ones, and what models say of them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import Preprocess
from fedcodist.core.model import Model, Variables

PUBLIC = "public"  # examples that everybody has


def shared_examples(columns: Mapping[str, jax.Array], data: ClientData) -> ClientData:
    """Examples that all parties have, as those of the party that `data` belongs to."""
    count = next(iter(columns.values())).shape[0]
    return ClientData(
        columns=columns,
        start=jnp.zeros((), jnp.int32),
        size=jnp.where(data.size > 0, count, 0),
        bound=jnp.where(data.bound > 0, count, 0),
        capacity=count,
        ragged=data.ragged,
    )


def all_examples(columns: Mapping[str, jax.Array]) -> ClientData:
    """Examples as those of one client who has all of them, such as a server."""
    count = next(iter(columns.values())).shape[0]
    size = jnp.asarray(count, jnp.int32)
    return ClientData(columns, jnp.zeros((), jnp.int32), size, size, count, ragged=False)


def inference(
    model: Model,
    variables: Variables,
    data: ClientData,
    preprocess: Preprocess,
    batch_size: int,
    of: Callable[[Any], jax.Array] = logits_of,
) -> jax.Array:
    """What a model says in evaluation mode of all of some examples, [capacity, ...].

    Args:
      model, variables: the model.
      data: the examples.
      preprocess: as in `LocalTraining`; it gets one fixed key.
      batch_size: examples per step.
      of: outputs -> array [batch, ...]: the logits, or such as an embedding.
    """
    size = min(batch_size, data.capacity)

    def said_of(positions):
        rows = data.start + jnp.minimum(positions, data.capacity - 1)
        batch = {name: column[rows] for name, column in data.columns.items()}
        outputs, _ = model.apply(variables, preprocess(batch, jax.random.key(0), positions))
        return of(outputs)

    def add(index, values):
        positions = index * size + jnp.arange(size)
        return values.at[positions].set(said_of(positions), mode="drop")

    shape = jax.eval_shape(said_of, jnp.arange(size))
    start = jnp.zeros((data.capacity, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, -(-data.bound // size), add, start)


def without_examples(data: ClientData, keeps: jax.Array) -> ClientData:
    """The same client, without any examples where `keeps` is false: it then makes no step."""
    bound = data.bound if data.ragged else jnp.where(keeps, data.bound, 0)
    return dataclasses.replace(data, size=jnp.where(keeps, data.size, 0), bound=bound)
