"""Columns of examples: arrays `[examples, ...]` by name, checked."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcodist.core.checks import check_not_masked

_COLUMN_KINDS = "biufcSU"  # bool, integers, floats, complex, byte strings and text


def checked_columns(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Columns as arrays with equally many examples. Raises TypeError or ValueError for others."""
    if not isinstance(columns, Mapping):
        raise TypeError(
            f"columns must be a mapping from name to array, got {type(columns).__name__}"
        )
    if not columns:
        raise ValueError("columns must not be empty")
    checked = {}
    for name, column in columns.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"column names must be non-empty strings, got {name!r}")
        array = array_of(name, column)
        if array.ndim == 0:
            raise ValueError(
                f"column {name!r} must have examples on its leading axis, got a scalar"
            )
        if array.dtype.kind not in _COLUMN_KINDS or not array.dtype.isnative:
            raise ValueError(
                f"column {name!r} must be numeric, bool or fixed-width strings in native byte "
                f"order, got dtype {array.dtype}"
            )
        checked[name] = array
    sizes = {name: len(array) for name, array in checked.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"columns must have equal numbers of examples, got {sizes}")
    return checked


def array_of(name: str, column: Any, where: str = "") -> np.ndarray:
    """A column as an array. Raises TypeError or ValueError if it is no array or hides entries."""
    of = f" of {where}" if where else ""
    check_not_masked(f"column {name!r}{of}", column)
    try:
        array = column if isinstance(column, np.ndarray) else np.asarray(column)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"column {name!r}{of} must be an array [examples, ...] of one shape: {reason:.120}"
        ) from None
    if isinstance(column, list | tuple):
        check_fixed_width(f"column {name!r}{of}", array, column)
    return array.data if isinstance(array, np.ma.MaskedArray) else array


def check_fixed_width(name: str, array: np.ndarray, values: Any) -> None:
    """Raises ValueError unless an array of text or bytes has the values of which NumPy made it.

    NumPy pads text with NUL, so one at its end is lost. It also makes text of numbers beside text.
    """
    if array is values or array.dtype.kind not in "SU":
        return
    kind = str if array.dtype.kind == "U" else bytes
    for kept, value in zip(array.flat, np.asarray(values, object).flat, strict=True):
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value.item()
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be all text where some is, got {value!r:.40}")
        if kept != value:
            raise ValueError(
                f"{name} must not have text that ends in NUL, which fixed width loses, got {value!r:.40}"
            )


def check_numbers(where: str, columns: Mapping[str, Any]) -> None:
    """Checks that columns hold numbers; raises TypeError that names one of text, objects or times."""
    for name, column in columns.items():
        if column.dtype.kind in "OSUMm":
            raise TypeError(
                f"{where} must have columns of numbers, {name!r} is {column.dtype}: leave it out or "
                "encode it."
            )


def check_same_columns(
    client_id: str,
    table: dict[str, np.ndarray],
    first_id: str,
    first: dict[str, np.ndarray],
) -> None:
    """Raises ValueError unless a client's columns have the first client's names, shapes and dtypes."""
    if not table:
        raise ValueError(f"client {client_id!r} has no columns")
    if set(table) != set(first):
        raise ValueError(
            f"client {client_id!r} has columns {sorted(table)}, client {first_id!r} {sorted(first)}"
        )
    sizes = set()
    for name, column in table.items():
        if column.ndim == 0:
            raise ValueError(
                f"client {client_id!r}: column {name!r} must have examples, got a scalar"
            )
        sizes.add(len(column))
        expected = first[name]
        # Strings of different widths are one dtype to the user; concatenating takes the widest.
        same_dtype = column.dtype == expected.dtype or (
            column.dtype.kind == expected.dtype.kind and column.dtype.kind in "SU"
        )
        if column.shape[1:] != expected.shape[1:] or not same_dtype:
            raise ValueError(
                f"client {client_id!r}: column {name!r} is {column.dtype} "
                f"{list(column.shape[1:])} per example, but {expected.dtype} "
                f"{list(expected.shape[1:])} for client {first_id!r}"
            )
    if len(sizes) > 1:
        raise ValueError(
            f"client {client_id!r}: columns must have equal numbers of examples, "
            f"got { {name: len(column) for name, column in table.items()} }"
        )


def one_array(name: str, value: Any) -> np.ndarray:
    """An argument as an array. Raises TypeError or ValueError if it is ragged or masked."""
    check_not_masked(name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be one array, got lists of different lengths") from None
