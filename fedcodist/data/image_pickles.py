"""Images and labels from pickles, in which CIFAR-10, CIFAR-100 and ImageNet 32x32 are published.

They are read by an unpickler that runs nothing: the few names that they mention stand for inert
values, and every other name is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any

import numpy as np

IMAGE_SHAPE = (32, 32, 3)  # height, width, channel


def unpickled(content: bytes) -> dict[str, Any]:
    """A pickled dictionary; arrays in it are for `image_array`. Damaged ones raise nearly anything."""
    # The memo is an array as long as its largest index, which a few bytes could make gigabytes.
    for position, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > position:
            raise ValueError(f"it stores object {argument} of at most {position}")
    table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(table, dict):
        raise ValueError("it is not a dictionary")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value
        for key, value in table.items()
    }


def image_array(table: Mapping[str, Any]) -> np.ndarray:
    """The rows of 'data', channel by channel, as uint8 `[images, 32, 32, 3]`.

    Raises ValueError unless they are uint8 `[images, 3072]` with at least one image.
    """
    if not isinstance(table.get("data"), _Array):
        raise ValueError("it has no array 'data'")
    return images_of_rows(table["data"].rows())


def images_of_rows(rows: np.ndarray) -> np.ndarray:
    """uint8 `[images, 3072]`, channel by channel, as `[images, 32, 32, 3]`."""
    planes = rows.reshape(-1, IMAGE_SHAPE[2], *IMAGE_SHAPE[:2])
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def label_array(
    table: Mapping[str, Any], key: str, num_images: int, low: int, high: int
) -> np.ndarray:
    """A list of labels in low..high, one for each image, as int32. Raises ValueError for others."""
    values = table.get(key)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"it has no list of integers {key!r}")
    if len(values) != num_images:
        raise ValueError(f"{len(values)} {key} for {num_images} images")
    if min(values) < low or max(values) > high:
        raise ValueError(f"{key} must be in {low}..{high}")
    return np.array(values, np.int32)


def one_line(error: Exception) -> str:
    """What an error says, which may quote the file: escaped and cut, so that it stays readable."""
    return str(error).encode("unicode_escape").decode()[:300] or type(error).__name__


class _Array:
    """What a pickled array says of itself; NumPy only sees it once it is known to be sound."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def rows(self) -> np.ndarray:
        """The array, which must be uint8 `[rows, 3072]` with at least one row."""
        width = int(np.prod(IMAGE_SHAPE))
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("'data' is not an array")
        _, shape, dtype, fortran_order, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in (b"u1", "u1"):
            raise ValueError("'data' must be uint8")
        if len(shape) != 2 or shape[1] != width or shape[0] < 1 or len(raw) != shape[0] * width:
            raise ValueError(f"'data' must be [images, {width}], it is {shape!r:.60}")
        order: Any = "F" if fortran_order else "C"
        return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class _Dtype:
    def __init__(self, name: Any, *flags: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(*arguments: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    # How Python 3 writes bytes for Python 2: text of code points below 256.
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    return b""


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _empty_bytes,
    ("builtins", "bytes"): _empty_bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"it asks for {module}.{name}, which is refused")
        return _ALLOWED[module, name]
