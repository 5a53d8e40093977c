"""The shapes of hyper-parameters, and which of them are missing."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

PyTree = Any


def hyper_shapes(hyper: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """The shapes of an algorithm's hyper-parameters. Raises ValueError or TypeError that names one."""

    def shape(path: tuple[Any, ...], value: Any) -> Any:
        return hyper_shape(value, f"hyper{jax.tree_util.keystr(path)}")

    return jax.tree_util.tree_map_with_path(shape, hyper, is_leaf=is_leaf)


def hyper_shape(value: Any, name: str = "hyper") -> Any:
    """A hyper-parameter's shape in training. Raises TypeError or ValueError unless it is a number."""
    try:
        if value is None or np.asarray(value).dtype.kind in "OSU":  # text may look like a number
            raise TypeError
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must hold numbers, got {value!r}.") from None
    if np.isnan(numbers).any():
        raise ValueError(f"{name} must hold numbers, got {value!r}.")
    return jax.ShapeDtypeStruct(numbers.shape, jax.dtypes.canonicalize_dtype(float))


def without_value(hyper: PyTree) -> str:
    """Which hyper-parameters are None, for messages about a None; '' if none is."""
    leaves = jax.tree_util.tree_flatten_with_path(hyper, is_leaf=lambda value: value is None)[0]
    missing = [f"hyper{jax.tree_util.keystr(path)}" for path, value in leaves if value is None]
    return f" ({', '.join(missing)} is None)" if missing and hyper is not None else ""
