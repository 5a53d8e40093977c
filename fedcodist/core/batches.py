"""Batches of examples: which examples a step reads, the mask of padding, and preprocessing.

Every pass over examples uses these functions.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_function

# (batch, key, positions in the whole batch) -> batch; traced inside the step.
Preprocess = Callable[[dict[str, jax.Array], jax.Array, jax.Array], dict[str, jax.Array]]


class Places(NamedTuple):
    """Which examples a batch has.

    Attributes:
      positions: int32 [size], counted from the first example to beyond the last one.
      indices: int32 [size], the positions, with the last example's index in place of larger ones.
      is_real: bool [size], false for padding at the end of the last batch.
    """

    positions: jax.Array
    indices: jax.Array
    is_real: jax.Array


def places(step: Any, size: int, count: Any) -> Places:
    """The examples of batch number `step` of a pass, counted from 0.

    Args:
      step: int, may be traced.
      size: of a batch.
      count: number of examples, may be traced. If it is 0, the first index fills up the batch.
    """
    positions = step * size + jnp.arange(size)
    indices = jnp.minimum(positions, jnp.maximum(count - 1, 0))
    return Places(positions, indices, positions < count)


def check_preprocess(name: str, preprocess: Any) -> None:
    """Raises TypeError that names the argument unless it is a function of a batch, key and positions."""
    check_function(name, preprocess, ("batch", "key", "positions"), "batch")


def read(
    columns: Mapping[str, jax.Array],
    indices: jax.Array,
    preprocess: Preprocess,
    key: jax.Array,
    positions: jax.Array,
) -> dict[str, jax.Array]:
    """The batch of some examples after preprocessing, leaves [size, ...].

    Args:
      columns: name -> [examples, ...].
      indices: int32 [size], indices of examples.
      preprocess: (batch, key, positions) -> batch.
      key: of random augmentation.
      positions: int32 [size], each example's position in the whole batch, of which this may be a part.

    Raises:
      ValueError: `preprocess` looks up a column that is not there.
      TypeError: `preprocess` returns no columns.
    """
    batch = {name: column[indices] for name, column in columns.items()}
    try:
        preprocessed = preprocess(dict(batch), key, positions)
    except KeyError as error:
        raise ValueError(
            f"preprocess looks up {error}, which is not there: the columns are {sorted(batch)}."
        ) from error
    if not isinstance(preprocessed, Mapping):
        raise TypeError(
            f"preprocess must return a batch, arrays by name, got {type(preprocessed).__name__}."
        )
    return dict(preprocessed)


def on_all(
    answer: Callable[[jax.Array], jax.Array],
    capacity: int,
    size: int,
    bound: Any,
    devices: int = 1,
    device: Any = 0,
) -> jax.Array:
    """A function's values for all examples, computed batch by batch, [capacity, ...].

    Args:
      answer: positions int32 [size] -> [size, ...]; positions may lie beyond the last example.
      capacity: the largest possible number of examples.
      size: of a batch.
      bound: the number of examples for which values are computed; may be traced. The rest is zeros.
      devices: how many devices share the batches.
      device: index of this device. Values of the other devices' batches are zeros.
    """

    def add(index: jax.Array, answers: jax.Array) -> jax.Array:
        positions = (index * devices + device) * size + jnp.arange(size)
        return answers.at[positions].set(answer(positions), mode="drop")

    shape = jax.eval_shape(answer, jnp.arange(size))
    answers = jnp.zeros((capacity, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, -(-bound // (size * devices)), add, answers)
