"""Examples that all parties have, such as public ones, and models' outputs on them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import batches
from fedcodist.core.batches import Preprocess
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.model import Batch, Model, Variables

PUBLIC = "public"  # the data set that all parties have


def shared_examples(columns: Mapping[str, jax.Array], data: ClientData) -> ClientData:
    """Shared examples in the form of a party's ClientData; none if the party's `data` has none."""
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
    """Examples in the form of one client's ClientData, with all of them, for a server."""
    count = next(iter(columns.values())).shape[0]
    size = jnp.asarray(count, jnp.int32)
    return ClientData(columns, jnp.zeros((), jnp.int32), size, size, count, ragged=False)


def inference(
    model: Model,
    variables: Variables,
    data: ClientData,
    preprocess: Preprocess,
    batch_size: int,
    of: Callable[[Any], jax.Array] = checked_logits,
) -> jax.Array:
    """A model's outputs in evaluation mode on all examples of `data`, [capacity, ...].

    Args:
      model, variables: the model.
      data: the examples.
      preprocess: as in `LocalTraining`; it gets one fixed key.
      batch_size: examples per step.
      of: outputs -> array [batch, ...]: by default the logits; may be an embedding, for example.
    """

    def answer(batch: Batch) -> jax.Array:
        return of(model.apply(variables, batch)[0])

    return batches.on_examples(answer, data, preprocess, batch_size)


def without_examples(data: ClientData, keeps: jax.Array) -> ClientData:
    """The same client, without examples if `keeps` is false; it then takes no step."""
    bound = data.bound if data.ragged else jnp.where(keeps, data.bound, 0)
    return dataclasses.replace(data, size=jnp.where(keeps, data.size, 0), bound=bound)
