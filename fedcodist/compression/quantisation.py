"""Uniform stochastic quantisation: a few bits for every number, right in the mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.compression.compressor import Compressor, check_names, taken
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
    """Every tensor on 2^bits evenly spaced values from its least to its largest number.

    A number goes to the grid's value below or above it, by chance and so that it is right in the mean
    (Konečný et al., 2016, section 3.2, with more than one bit). Codes are packed without gaps, and two
    floats per tensor say where the grid lies.

    Args:
      bits: 1 to 16.
    """
    check_integer("bits", bits, low=1)
    if bits > 16:
        raise ValueError(f"bits must be at most 16, got {bits}.")
    levels = 2**bits - 1
    dtype = np.uint8 if bits <= 8 else np.uint16

    def compress(tree, memory, key, progress):
        def code(index, leaf):
            number = leaf.astype(jnp.float32)
            low, high = jnp.min(number), jnp.max(number)
            step = (high - low) / levels
            place = (number - low) / jnp.where(step > 0, step, 1)
            chance = jax.random.uniform(keys.derive(key, index), leaf.shape)
            chosen = jnp.clip(jnp.floor(place + chance), 0, levels)
            return Codes(chosen.astype(dtype), low, step)

        return [code(index, leaf) for index, leaf in enumerate(jax.tree.leaves(tree))], memory

    def decompress(message, like):
        leaves, structure = jax.tree.flatten(like)
        values = [
            (part.low + part.step * part.codes.astype(jnp.float32)).astype(leaf.dtype)
            for part, leaf in zip(message, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, values)

    def pack(message):
        arrays = {}
        for index, part in enumerate(message):
            arrays[f"{index}/codes"] = _packed(np.asarray(part.codes), bits)
            arrays[f"{index}/grid"] = np.array([part.low, part.step], np.float32)
        return arrays

    def unpack(arrays, like):
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
    places = np.arange(bits)[::-1]
    each = (codes.reshape(-1, 1) >> places.astype(codes.dtype)) & codes.dtype.type(1)
    return np.packbits(each.astype(np.uint8).reshape(-1))


def _unpacked(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    each = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    return each.astype(np.int64) @ (1 << np.arange(bits)[::-1])
