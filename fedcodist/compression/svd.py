"""Truncated singular value decompositions, with ranks that follow from an energy threshold (FedKD)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, Progress, check_finite, check_names, taken
from fedcodist.core import keys
from fedcodist.core.checks import check_integer, check_number, shown
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import named_leaves

PyTree = Any
WHOLE = -1  # in place of a rank: the tensor is sent undecomposed


class Factors(NamedTuple):
    """A tensor as U diag(sigma) V, or undecomposed.

    Attributes:
      left: [P, R], zero beyond `rank` columns; R = min(P, Q).
      values: [R], zero beyond `rank`.
      right: [R, Q], zero beyond `rank` rows.
      whole: the tensor if it is sent undecomposed, else zeros.
      rank: int32, the number of singular values sent; 0 for a tensor of zeros; WHOLE if undecomposed.
    """

    left: Any
    values: Any
    right: Any
    whole: Any
    rank: Any


# A tensor's part of a message.
Part = Factors | jax.Array | np.ndarray


class RangeFinder(NamedTuple):
    """Singular vectors within a random subspace.

    Halko et al. 2011, algorithms 4.4 and 5.1, https://arxiv.org/abs/0909.4061.

    Attributes:
      columns: the subspace's dimension, which is the largest possible rank.
      power_iterations: iterations that turn the subspace towards the leading singular vectors.
    """

    columns: int
    power_iterations: int = 2


def svd(
    start: float = 0.95, end: float = 0.98, range_finder: RangeFinder | None = None
) -> Compressor:
    """Sends every tensor of two or more dimensions as a truncated singular value decomposition.

    A tensor [..., n] is a matrix of n columns, so a convolution's kernel has a column per filter. Its
    rank is the least that keeps a share T of the energy, the sum of squared singular values (FedKD,
    equation 8, https://arxiv.org/abs/2108.13323). T changes from `start` to `end` (equation 9).
    Here it changes per round, with t = (round + 1) / rounds, as in the authors' code. Equation 9, read
    literally, counts training steps. Factors are sent if they have fewer values than the tensor,
    P K + K + K Q < P Q. Otherwise the tensor is sent undecomposed. So are vectors, and all tensors at
    T = 1 but those of zeros, of which nothing is sent.

    Tensors with values that are not finite are sent undecomposed, so that the receiver sees them.
    Tensors of 16 bits are decomposed in float32. Their factors are rounded to 16 bits, so the energy
    kept is only approximately T.

    With a range finder a matrix is decomposed within a subspace. The energy outside of it is measured,
    so at least a share T of the whole is kept. If the subspace holds less than T, the whole matrix is
    decomposed. Ranks may be a little larger than the least. This saves time for large matrices with
    rapidly decreasing singular values, if clients are trained one by one. Under `vmap` both
    decompositions are computed.

    Args:
      start: first threshold, in (0, 1].
      end: last threshold, in [start, 1].
      range_finder: for approximate decompositions; None: exact decompositions.

    Raises:
      ValueError, TypeError: names the threshold or the field of the range finder that is not allowed.
        Outside of a compiled program `compress` raises ValueError for values that are not finite.
    """
    check_thresholds(start, end)
    if range_finder is not None:
        if not isinstance(range_finder, RangeFinder):
            raise TypeError(f"range_finder must be a RangeFinder, got {shown(range_finder)}.")
        check_integer("range_finder.columns", range_finder.columns, low=1)
        check_integer("range_finder.power_iterations", range_finder.power_iterations, low=0)

    def compress(
        tree: PyTree, memory: PyTree, key: jax.Array, progress: Progress
    ) -> tuple[list[Part], PyTree]:
        check_finite("what is decomposed", tree)
        share = threshold(start, end, progress)
        message = [
            _factored(leaf, share, range_finder, keys.derive(key, index))
            for index, leaf in enumerate(jax.tree.leaves(tree))
        ]
        return message, memory

    def decompress(message: Sequence[Part], like: PyTree) -> PyTree:
        leaves = [_product(part) if isinstance(part, Factors) else part for part in message]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def pack(message: Sequence[Part]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for index, part in enumerate(message):
            if not isinstance(part, Factors):
                arrays[f"{index}/whole"] = np.asarray(part)
            elif part.rank == WHOLE:
                arrays[f"{index}/whole"] = np.asarray(part.whole)
            else:
                # For a matrix of zeros an empty array is sent, to distinguish it from missing data.
                rank = int(part.rank)
                arrays[f"{index}/values"] = np.asarray(part.values[:rank])
                if not rank:
                    continue
                arrays[f"{index}/left"] = np.ascontiguousarray(part.left[:, :rank])
                arrays[f"{index}/right"] = np.asarray(part.right[:rank])
        return arrays

    def unpack(arrays: Mapping[str, np.ndarray], like: PyTree) -> list[Part]:
        leaves = list(named_leaves(like).values())
        parts = ("whole", "left", "values", "right")
        check_names(arrays, [f"{i}/{part}" for i in range(len(leaves)) for part in parts])
        return [_read(arrays, index, leaf) for index, leaf in enumerate(leaves)]

    return Compressor(
        label="svd",
        init=lambda tree: (),
        compress=compress,
        decompress=decompress,
        payload=lambda message: sum(map(_payload, message), jnp.int32(0)),
        pack=pack,
        unpack=unpack,
    )


def check_thresholds(start: float, end: float) -> None:
    """Raises ValueError or TypeError that names the energy threshold which is not allowed."""
    check_number("start", start, above=0, high=1)
    check_number("end", end, above=0, high=1)
    if end < start:
        raise ValueError(
            f"end must be at least start={start}, got {end}: thresholds never decrease."
        )


def threshold(start: float, end: float, progress: Progress) -> jax.Array:
    """T(t) = T_start + (T_end - T_start) t, where t is the share of the rounds that is done.

    It is computed as a weighted mean, so it is exactly `end` at t = 1, and exactly 1 if both are 1.
    """
    progress = jnp.minimum(jnp.asarray(progress, jnp.float32), 1)
    return jnp.where(start == end, jnp.float32(end), start * (1 - progress) + end * progress)


def rank_for(
    values: jax.Array, share: jax.Array | float, beyond: jax.Array | float = 0.0
) -> jax.Array:
    """The least K with at least a share of the energy in the first K singular values, int32.

    It is R for a share of 1, and 0 if all values are 0. The energy left out is summed, starting with the
    smallest value. It stays accurate even if the share kept would be rounded to 1.

    Args:
      values: [R], singular values in descending order.
      share: T, in (0, 1].
      beyond: further energy that is in none of the values; with it even R values may not suffice.
    """
    largest = values[0]
    scale = jnp.where(largest > 0, largest, 1)  # squares of tiny values would vanish
    tail = jnp.cumsum(((values / scale) ** 2)[::-1])[::-1]
    left_out = tail + beyond / scale / scale  # by rank 0 .. R - 1
    rank = jnp.sum(left_out > (1 - share) * left_out[0])
    rank = jnp.where(jnp.asarray(share) >= 1, len(values), rank)
    return jnp.where(largest > 0, jnp.maximum(rank, 1), 0).astype(jnp.int32)


def matrix_shape(leaf: Any) -> tuple[int, int] | None:
    """The shape of a tensor's matrix; None if even factors of rank 1 would not be smaller."""
    if len(leaf.shape) < 2:
        return None
    rows, columns = int(np.prod(leaf.shape[:-1])), leaf.shape[-1]
    return (rows, columns) if rows + 1 + columns < rows * columns else None


def as_matrix(leaf: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The matrix to decompose, in at least 32 bits, as LAPACK needs."""
    return leaf.reshape(shape).astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _factored(
    leaf: jax.Array, share: jax.Array, finder: RangeFinder | None, key: jax.Array
) -> Part:
    shape = matrix_shape(leaf)
    if shape is None:
        return leaf
    rows, columns = shape
    matrix = as_matrix(leaf, shape)
    is_finite = jnp.all(jnp.isfinite(matrix))
    matrix = jnp.where(is_finite, matrix, 0)
    if finder is None or finder.columns >= min(shape):
        left, values, right, rank = _exact(matrix, share)
    else:
        left, values, right, rank = _within_range(matrix, share, finder, key)
    # A decomposition that does not converge is NaN.
    is_usable = is_finite & jnp.all(jnp.isfinite(values))
    is_cheaper = rank * (rows + 1 + columns) < rows * columns
    rank = jnp.where(is_usable & is_cheaper, rank, WHOLE)
    is_sent = jnp.arange(len(values)) < rank
    cut = lambda part, mask: jnp.where(mask, part, 0).astype(leaf.dtype)
    return Factors(
        cut(left, is_sent),
        cut(values, is_sent),
        cut(right, is_sent[:, None]),
        jnp.where(rank == WHOLE, leaf, 0),
        rank,
    )


def _exact(matrix: jax.Array, share: jax.Array) -> tuple[jax.Array, ...]:
    """U, sigma, V and the rank that keeps the share."""
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    return left, values, right, rank_for(values, share)


def _within_range(
    matrix: jax.Array, share: jax.Array, finder: RangeFinder, key: jax.Array
) -> tuple[jax.Array, ...]:
    """Like `_exact`, but within a random subspace if this holds the share of the energy."""
    largest = jnp.max(jnp.abs(matrix))
    scaled = matrix / jnp.where(largest > 0, largest, 1)
    orthonormal = lambda vectors: jnp.linalg.qr(vectors)[0]
    with jax.default_matmul_precision("highest"):
        basis = orthonormal(
            scaled @ jax.random.normal(key, (matrix.shape[1], finder.columns), matrix.dtype)
        )
        for _ in range(finder.power_iterations):
            basis = orthonormal(scaled @ orthonormal(scaled.T @ basis))
        projected = basis.T @ scaled
        outside = jnp.sum((scaled - basis @ projected) ** 2)
        left, values, right = jnp.linalg.svd(projected, full_matrices=False)
        left = basis @ left
    is_enough = (share < 1) & (outside <= (1 - share) * (outside + jnp.sum(values**2)))
    full = min(matrix.shape)
    padded = lambda leaf, *shape: jnp.zeros(shape, leaf.dtype).at[*map(slice, leaf.shape)].set(leaf)

    def approximate() -> tuple[jax.Array, ...]:
        return (
            padded(left, matrix.shape[0], full),
            padded(values * largest, full),
            padded(right, full, matrix.shape[1]),
            rank_for(values, share, outside),
        )

    return jax.lax.cond(is_enough, approximate, lambda: _exact(matrix, share))


def _product(part: Factors) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        product = (part.left * part.values) @ part.right
    return jnp.where(part.rank == WHOLE, part.whole, product.reshape(part.whole.shape))


def _payload(part: Part) -> jax.Array:
    if not isinstance(part, Factors):
        return jnp.int32(tree_bytes(part))
    values_per_rank = part.left.shape[0] + 1 + part.right.shape[1]
    size = part.values.dtype.itemsize
    return jnp.where(part.rank == WHOLE, part.whole.size, part.rank * values_per_rank) * size


def _read(arrays: Mapping[str, np.ndarray], index: int, leaf: Any) -> Part:
    names = {part: f"{index}/{part}" for part in ("whole", "left", "values", "right")}
    shape = matrix_shape(leaf)
    if shape is None:
        check_names({n: arrays[n] for n in names.values() if n in arrays}, [names["whole"]])
        return taken(arrays, names["whole"], leaf.dtype, leaf.shape)
    full = min(shape)
    left, right = np.zeros((shape[0], full), leaf.dtype), np.zeros((full, shape[1]), leaf.dtype)
    values, whole = np.zeros(full, leaf.dtype), np.zeros(leaf.shape, leaf.dtype)
    present = [part for part, name in names.items() if name in arrays]
    if present == ["whole"]:
        whole = taken(arrays, names["whole"], leaf.dtype, leaf.shape)
        return Factors(left, values, right, whole, np.int32(WHOLE))
    if "whole" in present:
        raise ValueError(f"message must not hold {names['whole']!r} beside its factors.")
    sent = taken(arrays, names["values"], leaf.dtype, (None,))
    rank = len(sent)
    if not rank and present == ["values"]:
        return Factors(left, values, right, whole, np.int32(0))
    if not 1 <= rank <= full:
        raise ValueError(f"message's {names['values']!r} must hold 1 to {full} values, got {rank}.")
    if (sent < 0).any():
        raise ValueError(f"message's {names['values']!r} must be at least 0.")
    values[:rank] = sent
    left[:, :rank] = _vectors(arrays, names["left"], leaf.dtype, (shape[0], rank))
    right[:rank] = _vectors(arrays, names["right"], leaf.dtype, (rank, shape[1]))
    return Factors(left, values, right, whole, np.int32(rank))


def _vectors(arrays: Any, name: str, dtype: Any, shape: tuple[int, int]) -> np.ndarray:
    """Singular vectors of a message; up to rounding, their entries must be between -1 and 1."""
    vectors = taken(arrays, name, dtype, shape)
    if np.abs(vectors.astype(np.float32)).max() > 1.01:
        raise ValueError(f"message's {name!r} must be of unit vectors.")
    return vectors
