"""Lossless compression of sparse trees: the entries that are not zero."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, Progress, check_names, taken
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import flat, parameter_count, unflat

PyTree = Any


def changed_entries() -> Compressor:
    """Sends the non-zero entries with their indices, eight bytes each, or all entries if that is less.

    It is for updates that are already sparse, such as FetchSGD's.
    """

    def count(vector: jax.Array) -> jax.Array:
        return jnp.sum(vector != 0, dtype=jnp.int32)

    def compress(
        tree: PyTree, memory: PyTree, key: jax.Array, progress: Progress
    ) -> tuple[jax.Array, PyTree]:
        return flat(tree), memory

    def payload(vector: jax.Array) -> jax.Array:
        whole = tree_bytes(vector)
        # Counts are compared, not bytes: those of many entries are beyond 32 bits.
        return jnp.where(count(vector) < whole / 8, 8 * count(vector), whole)

    def pack(vector: jax.Array | np.ndarray) -> dict[str, np.ndarray]:
        vector = np.asarray(vector)
        indices = np.flatnonzero(vector).astype(np.int32)
        if 8 * len(indices) >= vector.nbytes:
            return {"whole": vector}
        return {"values": vector[indices], "indices": indices}

    def unpack(arrays: Mapping[str, np.ndarray], like: PyTree) -> np.ndarray:
        size = parameter_count(like)
        if "whole" in arrays:
            check_names(arrays, ["whole"])
            return taken(arrays, "whole", np.float32, (size,))
        check_names(arrays, ["values", "indices"])
        values = taken(arrays, "values", np.float32, (None,))
        indices = taken(arrays, "indices", np.int32, values.shape)
        is_ascending = (np.diff(indices) > 0).all()
        if not is_ascending or not ((indices >= 0) & (indices < size)).all():
            raise ValueError(f"message's 'indices' must ascend within [0, {size}).")
        vector = np.zeros(size, np.float32)
        vector[indices] = values
        return vector

    return Compressor(
        label="changed_entries",
        init=lambda tree: (),
        compress=compress,
        decompress=lambda message, like: unflat(jnp.asarray(message), like),
        payload=payload,
        pack=pack,
        unpack=unpack,
    )
