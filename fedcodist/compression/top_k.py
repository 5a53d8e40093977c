"""Top-k sparsification: the entries of largest magnitude and their indices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, Progress, check_names, taken
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import flat, parameter_count, unflat

PyTree = Any


class Entries(NamedTuple):
    """Some entries of a tree flattened to one vector: values float32 [k], indices int32 [k]."""

    values: Any
    indices: Any


def top_k(share: float | None = None, count: int | None = None) -> Compressor:
    """Sends the k entries of largest magnitude of the whole tree; the receiver sets the others to 0.

    The other entries are lost unless `with_error_feedback` keeps them for the next message. An entry
    takes eight bytes, four for its value and four for its index, so shares above one half save nothing.

    Args:
      share: of all entries, in (0, 1]; at least one is sent.
      count: k, in place of the share; if there are fewer entries, all are sent.

    Raises:
      ValueError, TypeError: names the argument that is not allowed, or both if not exactly one is given.
    """
    if (share is None) == (count is None):
        raise ValueError(f"share or count must be given, one of them, got {share} and {count}.")
    if share is not None:
        check_number("share", share, above=0, high=1)
    else:
        check_integer("count", count, low=1)

    def entries_of(tree: PyTree) -> int:
        size = parameter_count(tree)
        return min(size, count or max(1, round((share or 0) * size)))

    def compress(
        tree: PyTree, memory: PyTree, key: jax.Array, progress: Progress
    ) -> tuple[Entries, PyTree]:
        return largest_entries(flat(tree), entries_of(tree)), memory

    def unpack(arrays: Mapping[str, np.ndarray], like: PyTree) -> Entries:
        check_names(arrays, ["values", "indices"])
        k, size = entries_of(like), parameter_count(like)
        indices = taken(arrays, "indices", np.int32, (k,))
        if not ((indices >= 0) & (indices < size)).all():
            raise ValueError(f"message's 'indices' must be in [0, {size}).")
        if len(np.unique(indices)) < k:
            raise ValueError("message's 'indices' must not repeat one.")
        return Entries(taken(arrays, "values", np.float32, (k,)), indices)

    return Compressor(
        label="top_k",
        init=lambda tree: (),
        compress=compress,
        decompress=lambda message, like: unflat(scattered(message, parameter_count(like)), like),
        payload=lambda message: jnp.int32(tree_bytes(message)),
        pack=lambda message: {
            "values": np.asarray(message.values),
            "indices": np.asarray(message.indices),
        },
        unpack=unpack,
    )


def largest_entries(vector: jax.Array, count: int) -> Entries:
    """The `count` entries of largest magnitude of a vector; NaN counts as the largest."""
    _, indices = jax.lax.top_k(jnp.abs(vector), count)
    return Entries(vector[indices], indices.astype(jnp.int32))


def scattered(entries: Entries, size: int) -> jax.Array:
    """The vector [size] with these entries, and 0 elsewhere."""
    return jnp.zeros(size, jnp.float32).at[entries.indices].set(entries.values.astype(jnp.float32))
