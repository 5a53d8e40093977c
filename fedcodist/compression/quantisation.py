"""Uniform stochastic quantisation: a few bits per value, unbiased."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, Progress, check_names, taken
from fedcodist.core import keys
from fedcodist.core.checks import check_integer
from fedcodist.core.trees import named_leaves

PyTree = Any


class Codes(NamedTuple):
    """A tensor on a grid: low + step x codes.

    Attributes:
      codes: uint8, or uint16 for more than 8 bits, of the tensor's shape.
      low, step: float32 scalars.
    """

    codes: Any
    low: Any
    step: Any


def quantisation(bits: int = 8) -> Compressor:
    """Rounds every tensor to 2^bits evenly spaced levels from its minimum to its maximum.

    A value is rounded at random to the level below or above it, so that its expectation stays the same:
    the probabilistic quantisation of Konečný et al. 2016, https://arxiv.org/abs/1610.05492. Codes are
    packed without gaps. Two floats per tensor give the grid's first level and step.

    Args:
      bits: 1 to 16.

    Raises:
      ValueError, TypeError: names `bits` if it is not allowed.
    """
    check_integer("bits", bits, low=1)
    if bits > 16:
        raise ValueError(f"bits must be at most 16, got {bits}.")
    bits = int(bits)  # a power of NumPy's small integers would overflow
    levels = 2**bits - 1
    dtype = np.uint8 if bits <= 8 else np.uint16

    def compress(
        tree: PyTree, memory: PyTree, key: jax.Array, progress: Progress
    ) -> tuple[list[Codes], PyTree]:
        def code(index: int, leaf: jax.Array) -> Codes:
            values = leaf.astype(jnp.float32)
            # A tensor without values has no smallest one.
            low, high = (jnp.min(values), jnp.max(values)) if leaf.size else jnp.zeros(2)
            step = (high - low) / levels
            position = (values - low) / jnp.where(step > 0, step, 1)
            chance = jax.random.uniform(keys.derive(key, index), leaf.shape)
            chosen = jnp.clip(jnp.floor(position + chance), 0, levels)
            return Codes(chosen.astype(dtype), low, step)

        return [code(index, leaf) for index, leaf in enumerate(jax.tree.leaves(tree))], memory

    def decompress(message: Sequence[Codes], like: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(like)
        values = [
            (part.low + part.step * part.codes.astype(jnp.float32)).astype(leaf.dtype)
            for part, leaf in zip(message, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, values)

    def pack(message: Sequence[Codes]) -> dict[str, np.ndarray]:
        arrays = {}
        for index, part in enumerate(message):
            arrays[f"{index}/codes"] = _packed(np.asarray(part.codes), bits)
            arrays[f"{index}/grid"] = np.array([part.low, part.step], np.float32)
        return arrays

    def unpack(arrays: Mapping[str, np.ndarray], like: PyTree) -> list[Codes]:
        leaves = list(named_leaves(like).values())
        names = [f"{i}/{part}" for i in range(len(leaves)) for part in ("codes", "grid")]
        check_names(arrays, names)
        message = []
        for index, leaf in enumerate(leaves):
            length = -(-leaf.size * bits // 8)
            packed = taken(arrays, f"{index}/codes", np.uint8, (length,))
            low, step = taken(arrays, f"{index}/grid", np.float32, (2,))
            if step < 0:
                raise ValueError(
                    f"message's '{index}/grid' must have a step of at least 0, got {step}."
                )
            codes = _unpacked(packed, bits, leaf.size).astype(dtype).reshape(leaf.shape)
            message.append(Codes(codes, low, step))
        return message

    return Compressor(
        label=f"quantisation of {bits} bits",
        init=lambda tree: (),
        compress=compress,
        decompress=decompress,
        payload=lambda message: jnp.int32(
            sum(-(-part.codes.size * bits // 8) + 8 for part in message)
        ),
        pack=pack,
        unpack=unpack,
    )


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes without gaps, uint8 [bytes], each code's highest bit first."""
    shifts = np.arange(bits)[::-1]
    of_codes = (codes.reshape(-1, 1) >> shifts.astype(codes.dtype)) & codes.dtype.type(1)
    return np.packbits(of_codes.astype(np.uint8).reshape(-1))


def _unpacked(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    of_codes = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    return of_codes.astype(np.int64) @ (1 << np.arange(bits)[::-1])
