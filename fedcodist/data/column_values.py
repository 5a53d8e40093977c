"""The numbers of a column, looked at once: their range, what is not finite, what 32 bits cannot hold.

A pass goes over some megabytes at a time and gives back the pages of memory-mapped columns.
"""

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

_CHUNK_BYTES = 2**24


def least_and_largest(column: Any) -> tuple[int, int] | None:
    """The range of a column of whole numbers or of bool; None where it has no entries."""
    ranges = [(int(part.min()), int(part.max())) for _, part in _parts(column) if part.size]
    if not ranges:
        return None
    return min(least for least, _ in ranges), max(largest for _, largest in ranges)


def first_not_finite(column: Any, dtype: Any = None) -> tuple[int, Any] | None:
    """(row, value) of the first number that is NaN or infinite; None where all are finite.

    Args:
      column: floats or complex numbers.
      dtype: a narrower type that the numbers will have, in which large ones are infinite too.
    """
    for start, part in _parts(column):
        if dtype is not None and part.dtype != dtype:
            with np.errstate(over="ignore"):
                narrow = part.astype(dtype)
        else:
            narrow = part
        is_finite = np.isfinite(narrow)
        if not is_finite.all():
            place = np.unravel_index(int(np.argmin(is_finite)), narrow.shape)
            return start + int(place[0]), part[place]
    return None


def check_32_bits(where: str, columns: Mapping[str, Any]) -> None:
    """Raises one line that names a column of whole numbers that more than 32 bits hold.

    JAX keeps the lower 32 bits of 64-bit numbers without a word. Columns may be int64 where their
    numbers are small.

    Args:
      where: whose columns, for the message, such as "split 'test'".
      columns: name -> array.
    """
    for name, column in columns.items():
        dtype = np.dtype(column.dtype)
        on_device = jax.dtypes.canonicalize_dtype(dtype)  # int32 of int64, uint32 of uint64
        if dtype.kind not in "iu" or on_device == dtype:
            continue
        allowed = np.iinfo(on_device)
        found = least_and_largest(column)
        if found and not allowed.min <= found[0] <= found[1] <= allowed.max:
            raise ValueError(
                f"column {name!r} of {where} must have whole numbers from {allowed.min} to "
                f"{allowed.max}, since JAX keeps 32 bits of {dtype}, got {found[0]} to {found[1]}: "
                "leave it out, or scale it to floats or smaller numbers."
            )


def give_back_pages(columns: Mapping[str, np.ndarray]) -> None:
    """Gives back the pages of memory-mapped columns that were read; the system still has them cached.

    Each that is read stays resident otherwise, with many around it: after some rounds, all examples.
    """
    for column in columns.values():
        owner: Any = column
        while isinstance(owner, np.ndarray):
            # Pages of a copy-on-write mapping may hold what was written to them.
            shared = isinstance(owner, np.memmap) and owner.mode != "c"
            owner = owner.base
            if shared and isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                owner.madvise(mmap.MADV_DONTNEED)


def _parts(column: Any) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a column, some megabytes at a time."""
    values = column if isinstance(column, np.ndarray) else np.asarray(column)
    row_bytes = max(1, values[:1].nbytes)
    rows = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(values), rows):
        yield start, values[start : start + rows]
        give_back_pages({"": values})
