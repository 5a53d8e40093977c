"""Checks of values that users give. Errors are one line: the argument, what is allowed, and the value.

All `check_...` functions raise ValueError or TypeError that names the argument.
"""

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sized
from typing import Any

import numpy as np

# Limits of int32 and float32: larger values would wrap, or become infinite, on the device.
LARGEST_INTEGER = 2**31 - 1
LARGEST_BATCH = 2**20  # of batches that are filled up by repeating examples
MOST_EPOCHS = 10**6
LARGEST_NUMBER = float(np.finfo(np.float32).max)


def check_number(
    name: str,
    value: Any,
    low: float = -np.inf,
    high: float = np.inf,
    above: float = -np.inf,
    below: float = np.inf,
) -> None:
    """Checks that the value is a finite number in [low, high], above `above` and below `below`.

    An array without dimensions is a number. Without `high`, the limit is float32's largest number.
    """
    if _is_traced(value):
        return
    limits = [f"at least {low:g}"] * (low > -np.inf) + [f"at most {high:g}"] * (high < np.inf)
    limits += [f"above {above:g}"] * (above > -np.inf) + [f"below {below:g}"] * (below < np.inf)
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
    is_inside = low <= number <= high and above < number < below
    if is_boolean or not np.isfinite(number) or not is_inside:
        finite = "" if np.isfinite(number) else "finite and "
        raise ValueError(f"{name} must be {finite}{allowed}, got {shown(value)}.")
    # JAX makes Python integers int32.
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    if abs(number) > largest:
        raise ValueError(f"{name} must be at most {largest:.3g}, got {shown(value)}.")


def check_integer(name: str, value: Any, low: int, high: int = LARGEST_INTEGER) -> None:
    """Checks that the value is an integer from `low` to `high`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {low}, got {shown(value)}.")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}.")
    if value > high:
        raise ValueError(f"{name} must be at most {high:,}, got {shown(value)}.")


def check_stream(size: str, batch_size: Any, steps: str, count: Any, low: int = 1) -> None:
    """Checks that a round can draw `count` batches of an endless stream of examples.

    A batch is always full, even if there are fewer examples. All batches of a round are drawn at once.

    Args:
      size: name of the argument `batch_size`.
      batch_size: examples per batch.
      steps: name of the argument `count`.
      count: batches per round.
      low: the least number of batches.
    """
    check_integer(size, batch_size, low=1, high=LARGEST_BATCH)
    check_integer(steps, count, low=low)
    if int(count) * int(batch_size) > LARGEST_INTEGER:
        raise ValueError(
            f"{steps} must be at most {LARGEST_INTEGER // batch_size:,} with batches of {batch_size}, "
            f"got {count}."
        )


def check_function(name: str, value: Any, arguments: Collection[str], result: str) -> None:
    """Raises TypeError that names the argument unless it is a function of these arguments, in order."""
    promise = f"{name} must be a function ({', '.join(arguments)}) -> {result}"
    if not callable(value):
        raise TypeError(f"{promise}, got {shown(value)}.")
    try:
        signature = inspect.signature(value)
    except ValueError:  # functions written in C may have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise TypeError(f"{promise}, got one of {signature}.") from None


def check_boolean(name: str, value: Any) -> None:
    """Checks that the value is True or False; text such as 'no' would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")


def check_text(name: str, value: Any) -> None:
    """Checks that the value is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {shown(value)}.")


def check_several(name: str, values: Any) -> None:
    """Checks that the values are a list or the like: not text, and not used up when they are read."""
    is_several = isinstance(values, Iterable) and isinstance(values, Sized)
    if isinstance(values, str | bytes) or not is_several:
        raise TypeError(f"{name} must be a list, got {shown(values)}.")


def check_integers(name: str, values: Any, low: int) -> None:
    """Checks that the values are a list of integers of at least `low`."""
    check_several(name, values)
    for index, value in enumerate(values):
        check_integer(f"{name}[{index}]", value, low=low)


def check_not_masked(name: str, values: Any) -> None:
    """Checks that no entry of an array, or of the arrays in a list, is masked.

    `np.asarray` drops masks, so the values under them would be used.
    """
    arrays = values if isinstance(values, list | tuple) else [values]
    masks = [np.ma.getmask(array) for array in arrays if isinstance(array, np.ma.MaskedArray)]
    if count := sum(map(np.count_nonzero, masks)):
        raise ValueError(
            f"{name} must not be masked, since masks are not kept: leave the {count} masked entries "
            "out, or fill them."
        )


def check_clients(name: str, clients: Any) -> np.ndarray:
    """Checks indices of clients: at least one, none twice. Returns them ascending, int32 [clients]."""
    check_not_masked(name, clients)
    try:
        indices = np.asarray(clients)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be integers, indices of clients, got {shown(clients)}."
        ) from None
    if indices.size == 0:
        raise ValueError(f"{name} must not be empty.")
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(
            f"{name} must be integers, indices of clients, got {indices.dtype} {list(indices.shape)}."
        )
    ascending = np.unique(indices)
    if ascending[0] < 0:
        raise ValueError(f"{name} must be at least 0, got {ascending[0]}.")
    if ascending[-1] > LARGEST_INTEGER:
        raise ValueError(f"{name} must be at most {LARGEST_INTEGER:,}, got {ascending[-1]}.")
    if ascending.size != indices.size:
        raise ValueError(f"{name} must not repeat a client.")
    return ascending.astype(np.int32)


def check_columns(name: str, columns: Any) -> None:
    """Checks that columns are arrays, or shapes of arrays, by name."""
    if not isinstance(columns, Mapping):
        raise TypeError(f"{name} must be arrays by name, got {shown(columns)}.")
    for column, values in columns.items():
        if not len(getattr(values, "shape", ())) or not hasattr(values, "dtype"):
            raise TypeError(
                f"{name}[{column!r}] must be an array [examples, ...], got {shown(values)}."
            )


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises ValueError that names the argument unless its value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {shown(value)}.")


def check_names(name: str, names: Iterable[Any]) -> None:
    """Checks that names are text without '/', which separates names from metrics in metrics lines."""
    for entry in names:
        if not isinstance(entry, str):
            raise TypeError(f"{name} must have names that are text, got {shown(entry)}.")
        if not entry:
            raise ValueError(f"{name} must have names that are not empty.")
        if "/" in entry:
            raise ValueError(f"{name} must have names without '/', got {entry!r}.")


def shown(value: Any, longest: int = 60) -> str:
    """The first characters of a value's representation, in one line, for messages."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write integers of more than 4,300 digits
        is_integer = isinstance(value, int)
        text = f"an integer of {value.bit_length()} bits" if is_integer else type(value).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _is_traced(value: Any) -> bool:
    # Commands check their settings before they import JAX, which takes a second.
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)
