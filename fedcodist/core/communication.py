"""Bytes that a client downloads and uploads, counted from the shapes exchanged."""

from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class Communication(NamedTuple):
    """Bytes that a client downloads (`down`) and uploads (`up`) in one participation."""

    down: int
    up: int


def tree_bytes(tree: PyTree) -> int:
    """The payload of a pytree of arrays or shapes, in bytes."""
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )
