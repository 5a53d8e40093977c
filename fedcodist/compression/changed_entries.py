"""Lossless compression of sparse trees: the entries that are not zero."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, check_names, taken
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import flat, size_of, unflat

PyTree = Any


def changed_entries() -> Compressor:
    """Sends the non-zero entries with their indices, eight bytes each, or all if these are fewer bytes.

    It is for updates that are sparse already, such as FetchSGD's.
    """

    def count(vector):
        return jnp.sum(vector != 0, dtype=jnp.int32)

    def compress(tree, memory, key, progress):
        return flat(tree), memory

    def payload(vector):
        return jnp.minimum(8 * count(vector), tree_bytes(vector))

    def pack(vector):
        vector = np.asarray(vector)
        indices = np.flatnonzero(vector).astype(np.int32)
        if 8 * len(indices) >= vector.nbytes:
            return {"whole": vector}
        return {"values": vector[indices], "indices": indices}

    def unpack(arrays, like):
        size = size_of(like)
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
