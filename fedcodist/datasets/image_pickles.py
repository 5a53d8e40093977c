"""Images and labels from pickles, the format of CIFAR-10, CIFAR-100 and ImageNet 32x32.

The unpickler runs no code: a few names are allowed and give inert values; all others are refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any

import numpy as np

IMAGE_SHAPE = (32, 32, 3)  # height, width, channel
_LARGEST_TUPLE = 1000  # objects; an array's has some ten


def unpickled(content: bytes) -> dict[str, Any]:
    """A pickled dictionary, with arrays for `image_array`. Damaged ones raise many types of errors."""
    _check_operations(content)
    table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(table, dict):
        raise ValueError("it is not a dictionary")
    if not all(isinstance(key, bytes | str) for key in table):
        raise ValueError("it has a key that is no text")
    return {
        key.decode("latin1") if isinstance(key, bytes) else key: value
        for key, value in table.items()
    }


def image_array(table: Mapping[str, Any]) -> np.ndarray:
    """The images in 'data', stored channel by channel, as uint8 `[images, 32, 32, 3]`.

    Raises:
      ValueError: unless they are uint8 `[images, 3072]` with at least one image.
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
    """A list of labels in low..high, one per image, as int32. Raises ValueError for anything else."""
    values = table.get(key)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"it has no list of integers {key!r}")
    if len(values) != num_images:
        raise ValueError(f"{len(values)} {key} for {num_images} images")
    if min(values) < low or max(values) > high:
        raise ValueError(f"{key} must be in {low}..{high}")
    return np.array(values, np.int32)


def one_line(error: Exception) -> str:
    """An error's message, escaped and cut: it may quote a damaged file."""
    return str(error).encode("unicode_escape").decode()[:300] or type(error).__name__


def _check_operations(content: bytes) -> None:
    """Follows an unpickler's operations without executing them.

    Raises:
      ValueError: operations for which a few bytes need endless work: a memo of gigabytes, or tuples that
        hold a tuple twice, which holds another one twice, and so on, whose hash takes 2^n steps.
    """
    # The size of each object on the stack; for tuples, with all contents, each as often as it occurs.
    stack: list[int | None] = []  # None is a mark
    memo: dict[int, int | None] = {}
    for position, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if name.endswith("PUT") or name == "MEMOIZE":
            index = len(memo) if name == "MEMOIZE" else int(argument or 0)
            # The unpickler's memo is an array as long as its largest index.
            if index > position:
                raise ValueError(f"it stores object {index} of at most {position}")
            memo[index] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(None)
        elif name == "POP":
            stack.pop()
        elif name == "DUP":
            raise ValueError("it has an object twice, which nothing that is written by Python has")
        else:
            taken = _taken(stack, opcode.stack_before)
            size = 1
            if name.startswith(("TUPLE", "EMPTY_TUPLE")):
                size += sum(item_size or 0 for item_size in taken)
                if size > _LARGEST_TUPLE:
                    raise ValueError(f"it has a tuple of more than {_LARGEST_TUPLE} objects")
            stack += [size] * len(opcode.stack_after)


def _taken(stack: list[int | None], before: list[Any]) -> list[int | None]:
    """Takes an operation's arguments from the stack: a number of objects, or all down to a mark."""
    count = len(before)
    if pickletools.markobject in before:
        mark = len(stack) - 1 - stack[::-1].index(None) if None in stack else -1
        count = len(stack) - mark + before.index(pickletools.markobject)
    if count > len(stack):
        raise ValueError("it takes what is not there")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


class _Array:
    """The pickled state of an array; NumPy gets it only after checks."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

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
        # Other values are not shown: the text of nested lists can be endless.
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise ValueError(f"'data' must be [images, {width}]")
        if len(shape) != 2 or shape[1] != width or shape[0] < 1 or len(raw) != shape[0] * width:
            raise ValueError(f"'data' must be [images, {width}], it is {shape!r:.60}")
        order: Any = "F" if fortran_order else "C"
        return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class _Dtype:
    def __init__(self, name: Any, *flags: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Bytes:
    """Python 3's form of bytes for Python 2: text of code points below 256, or nothing."""

    def __new__(cls, text: str = "", encoding: str = "latin1") -> Any:
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        pass


# Classes that keep a pickle's state, so that it cannot change the classes that they replace.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Bytes,
    ("__builtin__", "bytes"): _Bytes,
    ("builtins", "bytes"): _Bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"it asks for {module}.{name}, which is refused")
        return _ALLOWED[module, name]
