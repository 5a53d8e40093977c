"""What a compressor is: pure functions on pytrees, in the manner of optax."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.trees import named_leaves

PyTree = Any


class Compressor(NamedTuple):
    """A way to send a pytree of floats in fewer bytes.

    `compress` and `decompress` are pure and of fixed shapes, whatever the values: a rank or a choice
    that depends on them is a number within the message, so a round stays one program. `pack` and
    `unpack` are for the host: the arrays that would really be sent, and back.

    Attributes:
      label: what both ends must agree on, written beside packed arrays.
      init: tree -> memory, what a sender keeps from one message to the next; () for most.
      compress: (tree, memory, key, progress) -> (message, memory). `progress` is the share of the
        training's rounds done after this one, in (0, 1].
      decompress: (message, like) -> tree; `like` is a tree of arrays or shapes.
      payload: message -> int32 scalar, the bytes of the arrays that `pack` gives.
      pack: message of concrete arrays -> name -> NumPy array.
      unpack: (name -> array, like) -> message; ValueError, one line, for arrays that make none.
    """

    label: str
    init: Callable[[PyTree], PyTree]
    compress: Callable[[PyTree, PyTree, jax.Array, Any], tuple[PyTree, PyTree]]
    decompress: Callable[[PyTree, PyTree], PyTree]
    payload: Callable[[PyTree], jax.Array]
    pack: Callable[[PyTree], dict[str, np.ndarray]]
    unpack: Callable[[Mapping[str, np.ndarray], PyTree], PyTree]


def check_finite(what: str, tree: PyTree) -> None:
    """Raises ValueError, one line, at a value that is no number; traced values are let pass."""
    for name, leaf in named_leaves(tree).items():
        if isinstance(leaf, jax.core.Tracer):
            continue
        if not np.isfinite(np.asarray(leaf, np.float32)).all():
            raise ValueError(f"{what} must be finite, but {name!r} has a value that is not.")


def taken(arrays: Mapping[str, np.ndarray], name: str, dtype: Any, shape: Any) -> np.ndarray:
    """One array of a packed message, checked.

    Args:
      arrays: the packed message.
      name: the array's.
      dtype: that it must have.
      shape: that it must have; None stands for any length.

    Raises:
      ValueError: one line; it is missing, of another kind or shape, or has values that are not finite.
    """
    if name not in arrays:
        raise ValueError(f"message must hold {name!r}, got {sorted(arrays)[:5]}.")
    array = np.asarray(arrays[name])
    fits = len(array.shape) == len(shape) and all(
        need is None or have == need for have, need in zip(array.shape, shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        wanted = f"{np.dtype(dtype)} {['any' if n is None else int(n) for n in shape]}"
        raise ValueError(
            f"message's {name!r} must be {wanted}, got {array.dtype} {list(array.shape)}."
        )
    if jnp.issubdtype(array.dtype, jnp.floating):
        check_finite("message", {name: array})
    return array


def check_names(arrays: Mapping[str, np.ndarray], expected: Any) -> None:
    """Raises ValueError, one line, at an array that no message of this kind has."""
    if unknown := sorted(set(arrays) - set(expected)):
        raise ValueError(
            f"message must not hold {unknown[0]!r}, of which the receiver knows nothing."
        )
