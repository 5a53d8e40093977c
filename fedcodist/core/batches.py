"""Batches of examples: which of them a step reads, and how a network gets them.

Every pass over examples reads them here: positions, the mask of what only fills up a batch, and
preprocessing are right in one place.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# (batch, key, positions in the whole batch) -> batch; traced inside the step.
Preprocess = Callable[[dict[str, jax.Array], jax.Array, jax.Array], dict[str, jax.Array]]


class Places(NamedTuple):
    """The places of one batch among some examples, int32 [size].

    Attributes:
      positions: counted on beyond the last example.
      rows: the same, but the last example in the place of those that do not exist.
      is_real: bool, False where an example only fills up the batch.
    """

    positions: jax.Array
    rows: jax.Array
    is_real: jax.Array


def places(step: Any, size: int, count: Any) -> Places:
    """The places of a pass's batch number `step`, from 0.

    Args:
      step: int, may be traced.
      size: of a batch.
      count: of examples, may be traced; of none, the first row fills up the batch.
    """
    positions = step * size + jnp.arange(size)
    rows = jnp.minimum(positions, jnp.maximum(count - 1, 0))
    return Places(positions, rows, positions < count)


def read(
    columns: Mapping[str, jax.Array],
    rows: jax.Array,
    preprocess: Preprocess,
    key: jax.Array,
    positions: jax.Array,
) -> dict[str, jax.Array]:
    """Examples as a network gets them, leaves [size, ...].

    Args:
      columns: name -> [examples, ...].
      rows: int32 [size].
      preprocess: (batch, key, positions) -> batch.
      key: of random augmentation.
      positions: int32 [size], each example's place in the whole batch, of which this may be a part.
    """
    return dict(
        preprocess({name: column[rows] for name, column in columns.items()}, key, positions)
    )


def on_all(
    answer: Callable[[jax.Array], jax.Array],
    capacity: int,
    size: int,
    bound: Any,
    devices: int = 1,
    device: Any = 0,
) -> jax.Array:
    """What a function answers to all examples, batch by batch, [capacity, ...].

    Args:
      answer: positions int32 [size] -> [size, ...]; positions may lie beyond the last example.
      capacity: how many examples there are at most.
      size: of a batch.
      bound: how many examples are asked for; may be traced. Other answers are zeros.
      devices, device: how many share the batches, and which of them this is. Others' answers are zeros.
    """

    def add(index, answers):
        positions = (index * devices + device) * size + jnp.arange(size)
        return answers.at[positions].set(answer(positions), mode="drop")

    shape = jax.eval_shape(answer, jnp.arange(size))
    answers = jnp.zeros((capacity, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, -(-bound // (size * devices)), add, answers)
