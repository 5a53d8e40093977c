"""Count-sketch (Charikar et al. 2002): a linear map that preserves heavy hitters, used by FetchSGD.

FetchSGD: Rothchild et al. 2020, https://arxiv.org/abs/2007.07682.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, Progress, check_names, taken
from fedcodist.compression.top_k import largest_entries, scattered
from fedcodist.core.checks import LARGEST_INTEGER, check_integer
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import flat, parameter_count, unflat

PyTree = Any
_MOST_ENTRIES = LARGEST_INTEGER // 4 - 1  # an int32 counts a message's bytes, four per entry


@flax.struct.dataclass
class Sketch:
    """A sketch of a vector, whose entries are added up in the cells of a small table.

    Attributes:
      table: float32 [rows, columns]. Each row has a hash that gives every index a cell and a sign.
      size: length of the vector.
      seed: of the hashes; tables of different hashes must not be added.
    """

    table: jax.Array
    size: int = flax.struct.field(pytree_node=False)
    seed: int = flax.struct.field(pytree_node=False)


def sketched(vector: jax.Array, rows: int, columns: int, seed: int = 0) -> Sketch:
    """The sketch of a vector, which is linear in the vector."""
    cells, signs = _hashes(rows, columns, vector.shape[0], seed)
    one_row = lambda cell, sign: jax.ops.segment_sum(vector * sign, cell, columns)
    return Sketch(jax.vmap(one_row)(cells, signs), vector.shape[0], seed)


def estimates(sketch: Sketch) -> jax.Array:
    """Estimates of the vector's entries, float32 [size]: the medians of the rows' estimates."""
    rows, columns = sketch.table.shape
    cells, signs = _hashes(rows, columns, sketch.size, sketch.seed)
    by_row = jnp.take_along_axis(sketch.table, cells, axis=1) * signs
    return jnp.median(by_row, axis=0)


def without(sketch: Sketch, indices: jax.Array) -> Sketch:
    """The sketch with 0 in all cells to which the indices [k] are hashed, as in FetchSGD's code."""
    rows, columns = sketch.table.shape
    cells, _ = _hashes(rows, columns, sketch.size, sketch.seed)
    hit = cells[:, indices]
    return dataclasses.replace(
        sketch, table=jax.vmap(lambda row, cell: row.at[cell].set(0))(sketch.table, hit)
    )


def count_sketch(rows: int, columns: int, count: int, seed: int = 0) -> Compressor:
    """Sends a tree as one table; the receiver restores the `count` entries of largest estimate.

    Args:
      rows: of the table that is sent.
      columns: of the table.
      count: k, the entries that the receiver restores; it sets the others to 0.
      seed: of the hashes; the same at both ends, for all clients and rounds.

    Raises:
      ValueError, TypeError: names the argument that is not a positive integer.
    """
    check_sketch(rows, columns, count)
    check_integer("seed", seed, low=0)

    def compress(
        tree: PyTree, memory: PyTree, key: jax.Array, progress: Progress
    ) -> tuple[Sketch, PyTree]:
        return sketched(flat(tree), rows, columns, seed), memory

    def decompress(message: Sketch, like: PyTree) -> PyTree:
        entries = largest_entries(estimates(message), min(count, message.size))
        return unflat(scattered(entries, message.size), like)

    # The hashes depend on the vector's size, so the message has it too, as the shape of an empty array.
    def pack(message: Sketch) -> dict[str, np.ndarray]:
        return {
            "table": np.asarray(message.table),
            "entries": np.zeros((0, message.size), np.float32),
        }

    def unpack(arrays: Mapping[str, np.ndarray], like: PyTree) -> Sketch:
        check_names(arrays, ["table", "entries"])
        taken(arrays, "entries", np.float32, (0, parameter_count(like)))
        table = taken(arrays, "table", np.float32, (rows, columns))
        return Sketch(jnp.asarray(table), parameter_count(like), seed)

    return Compressor(
        label=f"count-sketch of {rows} x {columns}, hashes {seed}",
        init=lambda tree: (),
        compress=compress,
        decompress=decompress,
        payload=lambda message: jnp.int32(tree_bytes(message)),
        pack=pack,
        unpack=unpack,
    )


def check_sketch(
    rows: int,
    columns: int,
    count: int,
    names: tuple[str, str, str] = ("rows", "columns", "count"),
) -> None:
    """Raises ValueError or TypeError that names the argument which is not allowed.

    `names`: the caller's arguments, for messages.
    """
    check_integer(names[0], rows, low=1, high=_MOST_ENTRIES)
    check_integer(names[1], columns, low=1)
    if columns > (most := _MOST_ENTRIES // rows):
        raise ValueError(f"{names[1]} must be at most {most:,} with {rows} rows, got {columns}.")
    check_integer(names[2], count, low=1)


def _hashes(rows: int, columns: int, size: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """(cells int32 [rows, size] in [0, columns), signs float32 [rows, size] of -1 and 1)."""
    bits = jax.random.bits(jax.random.key(seed), (rows, size), jnp.uint32)
    cells = (bits >> 1) % jnp.uint32(columns)
    signs = 1 - 2 * (bits & 1).astype(jnp.float32)
    return cells.astype(jnp.int32), signs
