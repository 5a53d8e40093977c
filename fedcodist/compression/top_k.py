"""The entries of largest magnitude and where they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, check_names, taken
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import flat, size_of, unflat

PyTree = Any


class Entries(NamedTuple):
    """Some entries of a tree taken as one vector: arrays, values float32 [k], indices int32 [k]."""

    values: Any
    indices: Any


def top_k(share: float | None = None, count: int | None = None) -> Compressor:
    """The k entries of largest magnitude of the whole tree; all others are taken for 0.

    What is left out is lost unless `with_error_feedback` keeps it for the next message. An entry takes
    eight bytes, four for its value and four for its index, so a share of more than a half saves nothing.

    Args:
      share: of all entries, in (0, 1]; at least one is sent.
      count: k, in place of the share; all where there are fewer.

    Raises:
      ValueError, TypeError: one line; another number, or both or neither of the two.
    """
    if (share is None) == (count is None):
        raise ValueError(f"share or count must be given, one of them, got {share} and {count}.")
    if share is not None:
        check_number("share", share, above=0, high=1)
    else:
        check_integer("count", count, low=1)

    def entries_of(tree):
        size = size_of(tree)
        return min(size, count or max(1, round((share or 0) * size)))

    def compress(tree, memory, key, progress):
        return largest_entries(flat(tree), entries_of(tree)), memory

    def unpack(arrays, like):
        check_names(arrays, ["values", "indices"])
        kept, size = entries_of(like), size_of(like)
        indices = taken(arrays, "indices", np.int32, (kept,))
        if not ((indices >= 0) & (indices < size)).all():
            raise ValueError(f"message's 'indices' must be in [0, {size}).")
        if len(np.unique(indices)) < kept:
            raise ValueError("message's 'indices' must not repeat one.")
        return Entries(taken(arrays, "values", np.float32, (kept,)), indices)

    return Compressor(
        label="top_k",
        init=lambda tree: (),
        compress=compress,
        decompress=lambda message, like: unflat(scattered(message, size_of(like)), like),
        payload=lambda message: jnp.int32(tree_bytes(message)),
        pack=lambda message: {
            "values": np.asarray(message.values),
            "indices": np.asarray(message.indices),
        },
        unpack=unpack,
    )


def largest_entries(vector: jax.Array, count: int) -> Entries:
    """The `count` entries of largest magnitude of a vector; a NaN is the largest of all."""
    _, indices = jax.lax.top_k(jnp.abs(vector), count)
    return Entries(vector[indices], indices.astype(jnp.int32))


def scattered(entries: Entries, size: int) -> jax.Array:
    """The vector [size] with these entries, and 0 elsewhere."""
    return jnp.zeros(size, jnp.float32).at[entries.indices].set(entries.values)
