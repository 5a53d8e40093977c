"""The range of a column's numbers, and whether they are finite and fit in 32 bits.

Columns are read some megabytes at a time, and pages of memory-mapped columns are given back.
"""

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

_CHUNK_BYTES = 2**24


def least_and_largest(column: Any) -> tuple[int, int] | None:
    """The range of the finite values of a column, without fractions; None if there are none."""
    finite = lambda part: part[np.isfinite(part)] if part.dtype.kind == "f" else part
    parts = [finite(part) for _, part in _parts(column)]
    ranges = [(int(part.min()), int(part.max())) for part in parts if part.size]
    if not ranges:
        return None
    return min(least for least, _ in ranges), max(largest for _, largest in ranges)


def first_not_finite(column: Any, dtype: Any = None) -> tuple[int, Any] | None:
    """(index, value) of the first number that is NaN or infinite; None where all are finite.

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
    """Checks that the integers of all columns fit in 32 bits: JAX drops the higher bits silently.

    Columns may be int64 where their numbers are small.

    Args:
      where: whose columns, for the message, such as "split 'test'".
      columns: name -> array.

    Raises:
      ValueError: names the column and its range.
    """
    for name, column in columns.items():
        dtype = np.dtype(column.dtype)
        on_device = jax.dtypes.canonicalize_dtype(dtype)  # int32 of int64, uint32 of uint64
        if dtype.kind not in "iu" or on_device == dtype:
            continue
        allowed = np.iinfo(on_device)
        span = least_and_largest(column)
        if span and not allowed.min <= span[0] <= span[1] <= allowed.max:
            raise ValueError(
                f"column {name!r} of {where} must have whole numbers from {allowed.min} to "
                f"{allowed.max}, since JAX keeps 32 bits of {dtype}, got {span[0]} to {span[1]}: "
                "leave it out, or scale it to floats or smaller numbers."
            )


def give_back_pages(columns: Mapping[str, np.ndarray]) -> None:
    """Gives back the pages of memory-mapped columns that were read; the system still has them cached.

    Without this, pages that were read stay resident: after some rounds, all examples.
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
    """Yields (index of the first example, examples) of a column, some megabytes at a time."""
    values = column if isinstance(column, np.ndarray) else np.asarray(column)
    row_bytes = max(1, values[:1].nbytes)
    rows = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(values), rows):
        yield start, values[start : start + rows]
        give_back_pages({"": values})
