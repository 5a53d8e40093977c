"""Checks of numbers that users give: one line that names the argument and what is allowed."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# What an int32 and a float32 hold: greater ones would wrap, or become infinite, on the device.
LARGEST_INTEGER = 2**31 - 1
LARGEST_BATCH = 2**20  # of those that are filled up by repeating examples
MOST_EPOCHS = 10**6
LARGEST_NUMBER = float(np.finfo(np.float32).max)


def check_number(
    name: str, value: Any, low: float = -np.inf, high: float = np.inf, above: float = -np.inf
) -> None:
    """Raises one line unless value is a finite number in [low, high] and above `above`.

    An array of no dimensions is a number. Without `high`, the largest one is float32's.
    """
    if _is_traced(value):
        return
    limits = [f"at least {low:g}"] * (low > -np.inf) + [f"at most {high:g}"] * (high < np.inf)
    limits += [f"above {above:g}"] * (above > -np.inf)
    allowed = " and ".join(limits) or "finite"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_array = dtype is not None and shape == () and np.dtype(dtype).kind in "iufbV"
    if not (isinstance(value, int | float) or is_array):
        raise TypeError(f"{name} must be a number {allowed}, got {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    is_boolean = isinstance(value, bool) or (is_array and np.dtype(dtype).kind == "b")
    if is_boolean or not np.isfinite(number) or not low <= number <= high or number <= above:
        finite = "" if np.isfinite(number) else "finite and "
        raise ValueError(f"{name} must be {finite}{allowed}, got {shown(value)}.")
    # JAX takes Python's integers for int32, whatever they are used for.
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    if abs(number) > largest:
        raise ValueError(f"{name} must be at most {largest:.3g}, got {shown(value)}.")


def check_integer(name: str, value: Any, low: int, high: int = LARGEST_INTEGER) -> None:
    """Raises one line unless value is an integer from `low` to `high`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {low}, got {shown(value)}.")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}.")
    if value > high:
        raise ValueError(f"{name} must be at most {high:,}, got {shown(value)}.")


def check_stream(size: str, batch_size: Any, steps: str, count: Any, low: int = 1) -> None:
    """Raises one line unless a round can draw so many batches of an endless stream of examples.

    A batch is always full, however few examples there are, and all of a round's are drawn at once.

    Args:
      size, batch_size: name and value of a batch's examples.
      steps, count: name and value of a round's batches.
      low: the least of them.
    """
    check_integer(size, batch_size, low=1, high=LARGEST_BATCH)
    check_integer(steps, count, low=low)
    if count * batch_size > LARGEST_INTEGER:
        raise ValueError(
            f"{steps} must be at most {LARGEST_INTEGER // batch_size:,} with batches of {batch_size}, "
            f"got {count}."
        )


def check_boolean(name: str, value: Any) -> None:
    """Raises one line unless value is True or False; text such as 'no' would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")


def check_text(name: str, value: Any) -> None:
    """Raises one line unless value is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {shown(value)}.")


def check_several(name: str, values: Any) -> None:
    """Raises one line unless values are several in a list, or in what can be gone through like one."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {shown(values)}.")


def check_clients(name: str, clients: Any) -> np.ndarray:
    """Returns indices of clients, int32 ascending, or raises one line unless they are at least one, and
    no two are the same."""
    try:
        given = np.asarray(clients)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be integers, indices of clients, got {shown(clients)}."
        ) from None
    if given.size == 0:
        raise ValueError(f"{name} must not be empty.")
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise TypeError(
            f"{name} must be integers, indices of clients, got {given.dtype} {list(given.shape)}."
        )
    ascending = np.unique(given)
    if ascending[0] < 0:
        raise ValueError(f"{name} must be at least 0, got {ascending[0]}.")
    if ascending[-1] > LARGEST_INTEGER:
        raise ValueError(f"{name} must be at most {LARGEST_INTEGER:,}, got {ascending[-1]}.")
    if ascending.size != given.size:
        raise ValueError(f"{name} must not repeat a client.")
    return ascending.astype(np.int32)


def check_columns(name: str, columns: Any) -> None:
    """Raises one line unless columns are arrays, or shapes of arrays, by name."""
    if not isinstance(columns, Mapping):
        raise TypeError(f"{name} must be arrays by name, got {shown(columns)}.")
    for column, values in columns.items():
        if not len(getattr(values, "shape", ())) or not hasattr(values, "dtype"):
            raise TypeError(
                f"{name}[{column!r}] must be an array [examples, ...], got {shown(values)}."
            )


def check_names(name: str, names: Iterable[Any]) -> None:
    """Raises one line where a name is no text or has a slash, which parts names from metrics in
    records."""
    for own in names:
        if not isinstance(own, str):
            raise TypeError(f"{name} must have names that are text, got {shown(own)}.")
        if "/" in own:
            raise ValueError(f"{name} must have names without '/', got {own!r}.")


def shown(value: Any, longest: int = 60) -> str:
    """The value as a message shows it: its first characters, in one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _is_traced(value: Any) -> bool:
    # Commands check their settings before they import JAX, which takes a second.
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)
