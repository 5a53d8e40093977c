"""Messages as bytes: safetensors files with a header and `payload` bytes."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from fedcodist.compression.compressor import Compressor
from fedcodist.core.tensor_files import tensors_of

PyTree = Any


def encode(compressor: Compressor, message: PyTree) -> bytes:
    """A message as a safetensors file: `payload(message)` bytes after a header."""
    # C order, since safetensors ignores the strides of a view.
    arrays = {name: np.asarray(a, order="C") for name, a in compressor.pack(message).items()}
    return safetensors.numpy.save(arrays, {"compressor": compressor.label})


def decode(compressor: Compressor, content: bytes, like: PyTree) -> PyTree:
    """The message that `encode` wrote.

    Args:
      compressor: one with the sender's settings.
      content: the bytes.
      like: the tree that was compressed, or its shapes.

    Raises:
      ValueError: says what is wrong with the message: its bytes are truncated or not a message, another
        compressor (or a sketch with other hashes) has made it, or it does not fit the tree.
    """
    try:
        arrays = tensors_of(content)
    except ValueError as error:
        raise ValueError(f"message cannot be read: {error}.") from error
    label = (_header(content).get("__metadata__") or {}).get("compressor")
    if label != compressor.label:
        raise ValueError(f"message must be of {compressor.label!r}, got one of {label!r}.")
    return jax.tree.map(jnp.asarray, compressor.unpack(arrays, like))


def header_bytes(content: bytes) -> int:
    """How many of an encoded message's bytes are its header."""
    return 8 + int.from_bytes(content[:8], "little")


def _header(content: bytes) -> dict[str, Any]:
    return json.loads(content[8 : header_bytes(content)])
