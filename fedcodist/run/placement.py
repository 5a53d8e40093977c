"""Placement of arrays on a run's devices: on every device, or only the examples of its own clients."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedcodist.core.inputs import Inputs

PyTree = Any
AXIS = "clients"
SHARDED = PartitionSpec(None, AXIS)  # [seeds, one part per device, ...]


def all_devices() -> Mesh | None:
    """A mesh of all devices of all processes along `clients`; None if there is only one."""
    devices = np.array(jax.devices())
    return None if devices.size == 1 else Mesh(devices, (AXIS,))


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Puts a pytree of host arrays on every device. Every process passes the same arrays."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, tree)


def replicate_data(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """As `replicate`, for data, which no program changes.

    A CPU reads memory-mapped columns, and other aligned arrays, where they are. So processes of one
    machine share the pages of a prepared folder, and arrays must not be changed during a run.
    """
    if mesh is not None:
        return replicate(tree, mesh)
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), tree)


def on_host(tree: PyTree) -> PyTree:
    """The same pytree with NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def own_devices(mesh: Mesh | None) -> list[int]:
    """The indices of this process's devices along `clients`."""
    if mesh is None:
        return [0]
    process = jax.process_index()
    return [i for i, device in enumerate(mesh.devices.flat) if device.process_index == process]


def place_inputs(inputs: Inputs, mesh: Mesh | None) -> Inputs:
    """Puts streamed inputs [seeds, ...] on the devices.

    They are replicated, except the examples of cohorts: these were gathered for `own_devices`, and every
    device gets its part.
    """
    if mesh is None:
        return replicate(inputs, mesh)
    devices = own_devices(mesh)
    sharding = NamedSharding(mesh, SHARDED)

    def deal(leaf: np.ndarray) -> jax.Array:
        parts = dict(zip(devices, np.split(leaf, len(devices), axis=1), strict=True))
        length = leaf.shape[1] // len(devices)
        shape = (leaf.shape[0], length * mesh.size, *leaf.shape[2:])

        def part(index: Any) -> np.ndarray:
            return parts[(index[1].start or 0) // length]

        return jax.make_array_from_callback(shape, sharding, part)

    columns = {pool: jax.tree.map(deal, c.columns) for pool, c in inputs.cohorts.items()}
    others = {pool: replace(cohort, columns={}) for pool, cohort in inputs.cohorts.items()}
    others = replicate(others, mesh)
    cohorts = {pool: replace(others[pool], columns=columns[pool]) for pool in others}
    return Inputs(cohorts, replicate(inputs.examples, mesh))
