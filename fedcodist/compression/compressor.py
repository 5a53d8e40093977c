"""`Compressor`: pure functions on pytrees, in the style of optax, and checks of received messages."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.trees import named_leaves

PyTree = Any
Progress = jax.Array | float  # the share of the training's rounds done after this one, in (0, 1]


class Compressor(NamedTuple):
    """A way to send a pytree of floats in fewer bytes.

    `compress` and `decompress` are pure, and their shapes do not depend on values. A rank that depends
    on values is an integer in the message, so a round stays one program. `pack` and `unpack` run on the
    host: they make and read the arrays that would really be sent.

    Attributes:
      label: the settings on which both ends must agree, stored with packed arrays.
      init: tree -> memory, which a sender keeps from one message to the next; () in most compressors.
      compress: (tree, memory, key, progress) -> (message, memory). `progress` is the share of the
        training's rounds done after this one, in (0, 1].
      decompress: (message, like) -> tree; `like` is a tree of arrays or shapes.
      payload: message -> int32 scalar, the bytes of the arrays that `pack` returns.
      pack: message of concrete arrays -> name -> NumPy array.
      unpack: (name -> array, like) -> message. Raises ValueError that names the array which is wrong.
    """

    label: str
    init: Callable[[PyTree], PyTree]
    compress: Callable[[PyTree, PyTree, jax.Array, Progress], tuple[PyTree, PyTree]]
    decompress: Callable[[PyTree, PyTree], PyTree]
    payload: Callable[[PyTree], jax.Array]
    pack: Callable[[PyTree], dict[str, np.ndarray]]
    unpack: Callable[[Mapping[str, np.ndarray], PyTree], PyTree]


def check_finite(what: str, tree: PyTree) -> None:
    """Raises ValueError that names the leaf with a value that is not finite. Skips traced values."""
    for name, leaf in named_leaves(tree).items():
        if isinstance(leaf, jax.core.Tracer):
            continue
        if not np.isfinite(np.asarray(leaf, np.float32)).all():
            raise ValueError(f"{what} must be finite, but {name!r} has a value that is not.")


def taken(arrays: Mapping[str, np.ndarray], name: str, dtype: Any, shape: Any) -> np.ndarray:
    """Reads and checks one array of a packed message.

    Args:
      arrays: the packed message.
      name: the array's name.
      dtype: the dtype it must have.
      shape: the shape it must have; None stands for any length.

    Raises:
      ValueError: names the array, if it is missing, has another dtype or shape, or has values that are
        not finite.
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
    """Raises ValueError that names an array which is not expected in the message."""
    if unknown := sorted(set(arrays) - set(expected)):
        raise ValueError(
            f"message must not hold {unknown[0]!r}, of which the receiver knows nothing."
        )
