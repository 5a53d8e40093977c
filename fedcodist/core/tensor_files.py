"""Safetensors files as NumPy arrays, with bfloat16, which the package's NumPy reader lacks."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from fedcodist.core.files import write_atomically

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
}


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes tensors to a file atomically.

    The file has the process's usual permissions. The package's writer lets only its owner read it. The
    same tensors and metadata are the same bytes.

    Args:
      path: the file.
      tensors: by name, in C order.
      metadata: strings kept in the file's header.

    Raises:
      OSError: the file cannot be written; an existing file stays unchanged.
    """
    content = safetensors.numpy.save(dict(tensors), dict(metadata))
    write_atomically(Path(path), _in_order(content) if len(metadata) > 1 else content)


def _in_order(content: bytes) -> bytes:
    """A file's content with its metadata in the order of names; the package writes them in any."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[start:]


def load_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a file, by name.

    Raises:
      ValueError: the file cannot be read, or as `tensors_of`. The message does not name the file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{error.strerror}") from error
    return tensors_of(content)


def tensors_of(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file's bytes, by name; the arrays are read-only.

    Raises:
      ValueError: the bytes are truncated or no safetensors file, or a tensor has a dtype that NumPy
        lacks. The message does not name the file.
    """
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise ValueError(" ".join(str(error).split())) from error
    tensors = {}
    for name, tensor in entries:
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise ValueError(
                f"tensor {name} is of {tensor['dtype']}, and must be of one of {list(_DTYPES)}"
            )
        tensors[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    return tensors
