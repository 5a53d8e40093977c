"""Runs a per-client function over a cohort and reduces the results."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.checks import check_integer
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.inputs import ClientData, Cohort
from fedcodist.core.tracing import traced_once

PyTree = Any
# (message, client_state, data, key) -> ClientResult
ClientUpdate = Callable[[PyTree, PyTree, ClientData, jax.Array], ClientResult]


class Execution(NamedTuple):
    """How clients are executed. Results agree up to float reassociation.

    Attributes:
      loop: 'scan': one client after another; 'vmap': `chunk_size` clients at once; 'eager': a Python
        loop for debugging with prints, on one device. It must be called outside of `jax.jit`, as
        `as_fedjax` does.
      chunk_size: clients per chunk of 'vmap'; not used by 'scan' and 'eager'.
    """

    loop: str = "scan"
    chunk_size: int = 1

    def check(self, name: str) -> None:
        """Raises ValueError that names the field for an unknown loop or a chunk size below 1."""
        if self.loop not in ("scan", "vmap", "eager"):
            raise ValueError(f"{name}.loop must be 'scan', 'vmap' or 'eager', got {self.loop!r}.")
        check_integer(f"{name}.chunk_size", self.chunk_size, low=1)


class CohortResult(NamedTuple):
    """The results of a cohort.

    Attributes:
      total: the sum of `prepare(result)` over the cohort, the same on every device.
      client_states: the new client states, in the cohort's order, or None.
      metrics: name -> [cohort, ...], in the cohort's order.
      results: every client's ClientResult stacked in the cohort's order, where asked for.
    """

    total: PyTree
    client_states: PyTree
    metrics: dict[str, jax.Array]
    results: ClientResult | None


def for_each_client(
    client_update: ClientUpdate,
    prepare: Callable[[ClientResult, jax.Array], PyTree],
    message: PyTree,
    client_states: PyTree,
    cohort: Cohort,
    key: jax.Array,
    execution: Execution = Execution(),
    axis_name: str | None = None,
    individual_results: bool = False,
    mask: Callable[[PyTree, jax.Array], PyTree] | None = None,
) -> CohortResult:
    """Runs `client_update` on every client of a cohort and sums `prepare` of their results.

    Clients are ordered by size before they are dealt to devices and chunks, so that clients which
    share a chunk need about the same number of steps. If the cohort's size is not a multiple of devices
    times chunk size, it is filled up with empty slots, which have no examples and no weight.

    Args:
      client_update: (message, client_state, data, key) -> ClientResult; pure.
      prepare: (ClientResult, key) -> pytree of arrays to be summed, such as a `Reduce`'s.
      message: what every client downloads.
      client_states: client states with a leading axis [cohort], or None.
      cohort: who takes part, and where their data lie.
      key: this pool's key of the round; each client's key is derived from it and the client's index.
      execution: scan, vmap or eager.
      axis_name: the mesh axis over which clients are dealt when the caller runs inside `shard_map` or
        `pmap`; None on one device.
      individual_results: whether to return every client's result too (FedDF, FedBE, ...).
      mask: (prepared, the client's index) -> what is summed in its place, see `mask_of_round`.

    Raises:
      ValueError: names the field of `execution` that is not allowed, also 'eager' with `axis_name`.
    """
    chex.assert_equal_shape([cohort.clients, cohort.starts, cohort.sizes])
    execution.check("execution")

    chunk_of = functools.partial(
        _run_slots,
        client_update,
        prepare,
        mask,
        message,
        cohort,
        key,
        execution.loop,
    )
    if execution.loop == "eager":
        if axis_name is not None:
            raise ValueError(
                "execution.loop must be 'scan' or 'vmap' on several devices, got 'eager', which is for "
                "debugging on one."
            )
        with jax.disable_jit():
            outcomes = [
                chunk_of(client_states, jnp.array([slot])) for slot in range(len(cohort.clients))
            ]
        totals, results = zip(*outcomes, strict=True)
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *totals)
        stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)
    else:
        slots = _deal(cohort.sizes, execution, axis_name)
        chunk = traced_once(chunk_of)  # for the shapes here and in the loop
        total_shape, result_shape = jax.eval_shape(chunk, client_states, slots[0])
        new_states = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((len(cohort.clients), *leaf.shape[1:]), leaf.dtype),
            result_shape.client_state,
        )
        # The new states replace the old ones in place, unless they have other shapes.
        is_in_place = new_states == jax.eval_shape(lambda: client_states)
        start = _zeros(total_shape), client_states if is_in_place else _zeros(new_states)

        def step(carry: tuple[PyTree, PyTree], slots: jax.Array) -> tuple[tuple, ClientResult]:
            total, states = carry
            chunk_total, result = chunk(states if is_in_place else client_states, slots)
            states = _placed(states, result.client_state, slots, axis_name)
            result = result._replace(client_state=None)
            if not individual_results:
                result = result._replace(update=None, mutable=None, weight=None, extra=None)
            return (jax.tree.map(jnp.add, total, chunk_total), states), result

        (total, states), dealt = jax.lax.scan(step, start, slots)
        stacked = jax.tree.map(lambda leaf: _undeal(leaf, slots, len(cohort.clients)), dealt)
        stacked = stacked._replace(client_state=_only_dealt(states, slots, axis_name))
        total, stacked = sum_over_devices((total, stacked), axis_name)
    return CohortResult(
        total, stacked.client_state, stacked.metrics, stacked if individual_results else None
    )


def dealing_order(sizes: Any, devices: int) -> Any:
    """The order in which a cohort's clients are dealt to devices one by one.

    The client at place r goes to device r % devices, for every chunk size, so a host can gather what its
    devices will read. The largest clients come first. Every second turn goes from the last device back
    to the first; otherwise the first would get the largest client of every turn.

    Args:
      sizes: integers [cohort], a NumPy or a JAX array.
      devices: how many there are.

    Returns:
      Places in the cohort [cohort], an array of the same kind.
    """
    places = np.arange(len(sizes))
    turn, device = np.divmod(places, devices)
    backwards = (turn % 2 == 1) & (turn < len(sizes) // devices)
    there_and_back = np.where(backwards, (turn + 1) * devices - 1 - device, places)
    return (-sizes).argsort(stable=True)[there_and_back]


def _run_slots(
    client_update: ClientUpdate,
    prepare: Callable[[ClientResult, jax.Array], PyTree],
    mask: Callable[[PyTree, jax.Array], PyTree] | None,
    message: PyTree,
    cohort: Cohort,
    key: jax.Array,
    loop: str,
    client_states: PyTree,
    slots: jax.Array,
) -> tuple[PyTree, ClientResult]:
    """Runs the clients of some slots; returns their prepared sum and their results [slots, ...]."""
    clients = len(cohort.clients)
    real = slots < clients
    safe = jnp.minimum(slots, clients - 1)
    if cohort.present is not None:
        real = real & cohort.present[safe]
    sizes = jnp.where(real, cohort.sizes[safe], 0)
    data = ClientData(
        columns=cohort.columns,
        start=cohort.starts[safe],
        size=sizes,
        bound=jnp.max(sizes),
        capacity=cohort.capacity,
        ragged=loop == "vmap" and len(slots) > 1,
    )
    indices = cohort.clients[safe]
    client_keys = jax.vmap(lambda client: keys.derive(key, client))(indices)
    slot_client_states = jax.tree.map(lambda leaf: leaf[safe], client_states)

    def one_client(
        start: jax.Array,
        size: jax.Array,
        index: jax.Array,
        client_key: jax.Array,
        client_state: PyTree,
        is_real: jax.Array,
    ) -> tuple[PyTree, ClientResult]:
        result = client_update(
            message, client_state, dataclasses.replace(data, start=start, size=size), client_key
        )
        result = result._replace(weight=jnp.where(is_real, result.weight, 0))
        sent = prepare(result, keys.derive(client_key, "reduce"))
        if mask is not None:
            sent = mask(sent, index)
        # A weight of 0 is not enough: `prepare` may ignore weights, and no steps may give NaN.
        prepared = jax.tree.map(lambda leaf: jnp.where(is_real, leaf, jnp.zeros_like(leaf)), sent)
        return prepared, result

    arguments = (data.start, sizes, indices, client_keys, slot_client_states, real)
    if len(slots) == 1:
        prepared, result = one_client(*jax.tree.map(lambda leaf: leaf[0], arguments))
        # A method may return Python's numbers, which vmap takes too.
        return prepared, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)
    prepared, result = jax.vmap(one_client)(*arguments)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), prepared), result


def _deal(sizes: jax.Array, execution: Execution, axis_name: str | None) -> jax.Array:
    """Returns this device's slots, int32 [chunks, chunk]; slots >= cohort are fillers."""
    chunk = execution.chunk_size if execution.loop == "vmap" else 1
    devices, device = this_device(axis_name)
    cohort = len(sizes)
    chunk = min(chunk, -(-cohort // devices))
    num_chunks = -(-cohort // (devices * chunk))
    fillers = jnp.full((num_chunks * devices * chunk - cohort,), cohort)
    filled = jnp.concatenate([dealing_order(sizes, devices), fillers]).astype(jnp.int32)
    return filled.reshape(num_chunks * chunk, devices)[:, device].reshape(num_chunks, chunk)


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _placed(states: PyTree, new: PyTree, slots: jax.Array, axis_name: str | None) -> PyTree:
    """Puts the new client states [slots, ...] among those of the cohort [cohort, ...]."""
    has_fillers = len(slots) > 1 or axis_name is not None

    def put(leaf: jax.Array, rows: jax.Array) -> jax.Array:
        if has_fillers:
            return leaf.at[slots].set(rows, mode="drop")
        return jax.lax.dynamic_update_slice_in_dim(leaf, rows, slots[0], axis=0)

    return jax.tree.map(put, states, new)


def _only_dealt(states: PyTree, slots: jax.Array, axis_name: str | None) -> PyTree:
    """The client states of this device's clients, and zeros for those of other devices."""
    if axis_name is None:
        return states

    def only(leaf: jax.Array) -> jax.Array:
        is_here = jnp.zeros(len(leaf), bool).at[slots.reshape(-1)].set(True, mode="drop")
        return jnp.where(jnp.expand_dims(is_here, range(1, leaf.ndim)), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(only, states)


def _undeal(leaf: jax.Array, slots: jax.Array, cohort: int) -> jax.Array:
    """Puts results [chunks, chunk, ...] of this device at their clients' places [cohort, ...]."""
    flat = leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
    return (
        jnp.zeros((cohort, *flat.shape[1:]), flat.dtype)
        .at[slots.reshape(-1)]
        .set(flat, mode="drop")
    )
