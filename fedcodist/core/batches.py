"""Batches of examples: which examples a step reads, the mask of padding, and preprocessing.

Every pass over examples uses these functions.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_function
from fedcodist.core.inputs import ClientData

PyTree = Any
# The column of the targets of a network's outputs; no data set has this name by chance.
TARGET = "fedcodist/target"
# The column of an example's number, by which `one_view` draws.
_NUMBER = "fedcodist/number"
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
      ValueError: `preprocess` looks up a column that is not there, or changes the number of examples.
      TypeError: `preprocess` returns no columns.
      Exception: of `preprocess` itself, with a note that names it.
    """
    batch = {name: column[indices] for name, column in columns.items()}
    try:
        preprocessed = preprocess(dict(batch), key, positions)
    except KeyError as error:
        raise ValueError(
            f"preprocess looks up {error}, which is not there: the columns are {sorted(batch)}."
        ) from error
    except Exception as error:
        error.add_note("in preprocess")
        raise
    if not isinstance(preprocessed, Mapping):
        raise TypeError(
            f"preprocess must return a batch, arrays by name, got {type(preprocessed).__name__}."
        )
    for name, column in preprocessed.items():
        # A further column need not be of examples.
        if name in batch and jnp.shape(column)[:1] != indices.shape:
            raise ValueError(
                f"preprocess must return as many examples as it gets: column {name!r} has shape "
                f"{list(jnp.shape(column))} for {len(indices)} examples."
            )
    return dict(preprocessed)


def beside_targets(preprocess: Preprocess) -> Preprocess:
    """The preprocessing of examples with a column TARGET, which `preprocess` does not see or lose."""

    def preprocessed(
        batch: dict[str, jax.Array], key: jax.Array, positions: jax.Array
    ) -> dict[str, jax.Array]:
        examples = {name: column for name, column in batch.items() if name != TARGET}
        return {**preprocess(examples, key, positions), TARGET: batch[TARGET]}

    return preprocessed


def one_view(
    columns: Mapping[str, jax.Array], preprocess: Preprocess, key: jax.Array
) -> tuple[dict[str, jax.Array], Preprocess]:
    """Examples, and a preprocessing that shows the same view of each example in all passes over them.

    A network that learns another's predictions thus sees the same augmented images on which they were
    computed.

    Args:
      columns: name -> [examples, ...].
      preprocess: (batch, key, positions) -> batch. If it is random, it draws by key and position.
      key: of random augmentation.

    Returns:
      The columns, with one of the examples' numbers, and the preprocessing of their batches.
    """

    def preprocessed(
        batch: dict[str, jax.Array], key_of_step: jax.Array, positions: jax.Array
    ) -> dict[str, jax.Array]:
        examples = {name: column for name, column in batch.items() if name != _NUMBER}
        return preprocess(examples, key, batch[_NUMBER])

    count = len(next(iter(columns.values()), ()))
    return {**columns, _NUMBER: jnp.arange(count)}, preprocessed


def on_examples(
    answer: Callable[[dict[str, jax.Array]], PyTree],
    data: ClientData,
    preprocess: Preprocess,
    batch_size: int,
) -> PyTree:
    """A function's values for all examples of a client, leaves [capacity, ...].

    Args:
      answer: batch -> leaves [size, ...].
      data: the client's examples. Beyond the last one, values mean nothing.
      preprocess: (batch, key, positions) -> batch; it gets one fixed key.
      batch_size: examples per step, at most.
    """
    size = min(batch_size, data.capacity)

    def at(positions: jax.Array) -> PyTree:
        rows = data.start + jnp.minimum(positions, data.capacity - 1)
        return answer(read(data.columns, rows, preprocess, jax.random.key(0), positions))

    return on_all(at, data.capacity, size, data.bound)


def on_all(
    answer: Callable[[jax.Array], PyTree],
    capacity: int,
    size: int,
    bound: Any,
    devices: int = 1,
    device: Any = 0,
) -> PyTree:
    """A function's values for all examples, computed batch by batch, leaves [capacity, ...].

    Args:
      answer: positions int32 [size] -> leaves [size, ...]; positions may lie beyond the last example.
      capacity: the largest possible number of examples.
      size: of a batch.
      bound: the number of examples for which values are computed; may be traced. The rest is zeros.
      devices: how many devices share the batches.
      device: index of this device. Values of the other devices' batches are zeros.
    """

    def add(index: jax.Array, answers: PyTree) -> PyTree:
        positions = (index * devices + device) * size + jnp.arange(size)
        put = lambda leaf, values: leaf.at[positions].set(values, mode="drop")
        return jax.tree.map(put, answers, answer(positions))

    answers = jax.tree.map(
        lambda leaf: jnp.zeros((capacity, *leaf.shape[1:]), leaf.dtype),
        jax.eval_shape(answer, jnp.arange(size)),
    )
    return jax.lax.fori_loop(0, -(-bound // (size * devices)), add, answers)


def number_of_examples(batch: Mapping[str, Any]) -> int:
    """The length of a batch's first column, padding included."""
    return int(next(iter(batch.values())).shape[0])
