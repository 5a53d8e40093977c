"""Banks of stale checkpoints in the host's memory, if a device cannot hold that many models.

A compiled program fetches a checkpoint from the host when a step needs it, and stores fresh ones at the
beginning of a round. The result depends only on the run, the round and the slot, so a program may fetch
the same checkpoint more than once.
"""

import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph.mhd_exchange import ExchangeSchedule
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.core.model import variable_shapes

PyTree = Any


class HostBanks:
    """A bank per architecture and run; each seed is a run. Every process has its own banks.

    `state`, `shapes` and `restore` are used by the experiment's checkpoints, `clear` at a run's start.

    Args:
      schedule: the run's exchange, with the number of slots and when they are filled.
      groups: architecture -> its clients.
    """

    def __init__(self, schedule: ExchangeSchedule, groups: Mapping[str, PartyGroup]):
        self._shapes = {
            name: jax.tree.map(_shape, variable_shapes(group.model))
            for name, group in groups.items()
        }
        self._num_slots = schedule.num_slots
        # In round 0 the initial models are stored, since the schedule stores nothing before it.
        self._slots = {
            name: np.concatenate([schedule.first_slot[name][None], slots[1:]])
            for name, slots in schedule.slot.items()
        }
        self._runs: dict[tuple[int, ...], dict[str, list[np.ndarray]]] = {}
        self._lock = threading.Lock()

    def put(self, key: jax.Array, round: jax.Array, models: Mapping[str, PyTree]) -> jax.Array:
        """Within a program, at the beginning of a round: stores models according to the schedule.

        Args:
          key: of the run, the same in all rounds.
          round: counted from 0.
          models: architecture -> the clients' current models, leaves [group, ...].

        Returns:
          A number that `read` takes, so that nothing is read before this is done.
        """
        slots = {name: jnp.asarray(of_rounds)[round] for name, of_rounds in self._slots.items()}
        return jax.pure_callback(
            self._write,
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.random.key_data(key),
            slots,
            dict(models),
            vmap_method="sequential",
        )

    def read(self, key: jax.Array, done: jax.Array, name: str, slot: jax.Array) -> PyTree:
        """Within a program: the checkpoint in a slot of an architecture's bank, as Variables.

        Args:
          key: as in `put`.
          done: the result of `put` in this round.
          name: the architecture.
          slot: beyond the end the last slot is read, and from an empty bank zeros. This happens if a
            branch that is not taken is computed nevertheless.
        """
        shapes = self._shapes[name]

        def look(run: jax.Array, done: jax.Array, slot: jax.Array) -> PyTree:
            return self._read(name, run, int(slot))

        return jax.pure_callback(
            look, shapes, jax.random.key_data(key), done, slot, vmap_method="sequential"
        )

    def state(self) -> PyTree:
        """For a checkpoint: the runs' keys, uint32 [runs, words], and leaves [runs, slots, ...]."""
        with self._lock:
            runs = np.array(list(self._runs), np.uint32).reshape(-1, *_key_shape())
            banks = {
                name: [
                    np.stack([run_banks[name][index] for run_banks in self._runs.values()])
                    if self._runs
                    else np.zeros((0, self._num_slots[name], *leaf.shape), leaf.dtype)
                    for index, leaf in enumerate(jax.tree.leaves(shapes))
                ]
                for name, shapes in self._shapes.items()
            }
        return runs, banks

    def shapes(self) -> PyTree:
        """The shapes of `state`; -1 stands for the number of runs."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((-1, *leaf.shape[1:]), leaf.dtype), self.state()
        )

    def restore(self, state: PyTree) -> None:
        """Continues from a checkpoint's `state`."""
        runs, banks = state
        with self._lock:
            self._runs = {
                tuple(run.tolist()): {
                    name: [np.array(leaf[index]) for leaf in leaves]
                    for name, leaves in banks.items()
                }
                for index, run in enumerate(np.asarray(runs))
            }

    def clear(self) -> None:
        """Forgets earlier runs, whose banks would take memory and lie in all later checkpoints."""
        with self._lock:
            self._runs = {}

    def _write(
        self, run: jax.Array, slots: dict[str, jax.Array], models: dict[str, PyTree]
    ) -> np.int32:
        for name, leaves in self._of(run).items():
            places = np.asarray(slots[name])
            is_put = places < self._num_slots[name]
            for bank, new in zip(leaves, jax.tree.leaves(models[name]), strict=True):
                bank[places[is_put]] = np.asarray(new)[is_put]
        return np.int32(0)

    def _read(self, name: str, run: jax.Array, slot: int) -> PyTree:
        shapes = self._shapes[name]
        if not self._num_slots[name]:
            return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        slot = min(slot, self._num_slots[name] - 1)
        leaves = [bank[slot] for bank in self._of(run)[name]]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def _of(self, run: jax.Array) -> dict[str, list[np.ndarray]]:
        """The banks of a run, created at the first call; locked, since devices may call at once."""
        key = tuple(np.asarray(run).tolist())
        with self._lock:
            if key not in self._runs:
                self._runs[key] = {
                    name: [
                        np.zeros((self._num_slots[name], *leaf.shape), leaf.dtype)
                        for leaf in jax.tree.leaves(shapes)
                    ]
                    for name, shapes in self._shapes.items()
                }
            return self._runs[key]


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _key_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
