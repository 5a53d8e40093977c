"""Devices of a mesh and processes of a run: this device's index, sums, and all processes' values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def this_device(axis_name: str | None) -> tuple[int, jax.Array]:
    """(number of devices along a mesh axis, this device's index); (1, 0) without an axis."""
    if axis_name is None:
        return 1, jnp.zeros((), jnp.int32)
    return jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)


def sum_over_devices(tree: PyTree, axis_name: str | None) -> PyTree:
    """Sums a pytree over a named mesh axis in one collective per dtype.

    One flat all-reduce has one latency. On virtual CPU devices several independent ones can deadlock:
    each can hold a thread that another waits for.
    """
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    summed = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        index = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jax.lax.psum(jnp.concatenate([leaves[i].reshape(-1) for i in index]), axis_name)
        start = 0
        for i in index:
            part = flat[start : start + leaves[i].size].reshape(leaves[i].shape)
            summed[i] = part.astype(dtype)  # `psum` returns integers for bools
            start += leaves[i].size
    return jax.tree.unflatten(structure, summed)


def from_all_processes(value: int) -> list[int]:
    """The values (below 2**31) of all processes, in their order, on every process."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.int32(value)).tolist()
