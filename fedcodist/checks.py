"""Checks of numbers that users give: one line that names the argument and what is allowed."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def check_number(
    name: str, value: Any, low: float = -np.inf, high: float = np.inf, above: float = -np.inf
) -> None:
    """Raises one line unless value is a finite number in [low, high] and above `above`."""
    if isinstance(value, jax.core.Tracer):
        return
    limits = [f"at least {low:g}"] * (low > -np.inf) + [f"at most {high:g}"] * (high < np.inf)
    limits += [f"above {above:g}"] * (above > -np.inf)
    allowed = " and ".join(limits) or "finite"
    wrong_type = f"{name} must be a number {allowed}, got {value!r}."
    if isinstance(value, str):
        raise TypeError(wrong_type)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(wrong_type) from None
    if (
        isinstance(value, bool)
        or not np.isfinite(number)
        or not low <= number <= high
        or number <= above
    ):
        finite = "" if np.isfinite(number) else "finite and "
        raise ValueError(f"{name} must be {finite}{allowed}, got {value!r}.")


def check_clients(name: str, clients: Any) -> np.ndarray:
    """Returns indices of clients, int32 ascending, or raises one line unless they are at least one, and
    no two are the same."""
    given = np.asarray(clients)
    if given.size == 0:
        raise ValueError(f"{name} must not be empty.")
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise TypeError(
            f"{name} must be integers, indices of clients, got {given.dtype} {list(given.shape)}."
        )
    ascending = np.unique(given)
    if ascending[0] < 0:
        raise ValueError(f"{name} must be at least 0, got {ascending[0]}.")
    if ascending.size != given.size:
        raise ValueError(f"{name} must not repeat a client.")
    return ascending.astype(np.int32)


def check_names(name: str, names: Iterable[str]) -> None:
    """Raises one line where a name has a slash, which parts names from metrics in records."""
    for own in names:
        if "/" in own:
            raise ValueError(f"{name} must have names without '/', got {own!r}.")


def check_integer(name: str, value: Any, low: int) -> None:
    """Raises one line unless value is an integer of at least `low`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {low}, got {value!r}.")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}.")
