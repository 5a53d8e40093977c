"""MHD's buffers of stale checkpoints, in place of a live exchange (the paper's rolling pools P_i).

Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR 2023,
https://arxiv.org/abs/2211.15774.

The whole exchange of checkpoints is drawn before a run, from the graph and a seed. So the bank of an
architecture's checkpoints has exactly as many slots as the run needs. A checkpoint in the buffers of two
clients is stored once.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph.graphs import over_time
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.core.checks import check_choice, check_integer

PyTree = Any
PLACES = ("device", "host")
_MOST_EXCHANGES = 10**7  # of all clients over a run; minutes of drawing


class CheckpointExchange(NamedTuple):
    """How clients get each other's checkpoints.

    Attributes:
      checkpoints_per_client: N_P, the size of a client's buffer; None: the number of clients.
      checkpoints_on: where checkpoints are kept, "device" or "host". On the host they take no device
        memory, and the device fetches one when a step needs it. Results are the same. A CPU uses the
        host's memory, so there both are the same.
      seed: of the exchange. It is drawn before the run, like the partition of the examples, and is the
        same for all seeds of a run.
      memory: bytes that all checkpoints may take; None: `memory_for_checkpoints`.
    """

    checkpoints_per_client: int | None = None
    checkpoints_on: str = "device"
    seed: int = 0
    memory: int | None = None

    def check(self, name: str) -> None:
        """Raises ValueError or TypeError that names the field which is not allowed."""
        check_choice(f"{name}.checkpoints_on", self.checkpoints_on, PLACES)
        if self.checkpoints_per_client is not None:
            check_integer(f"{name}.checkpoints_per_client", self.checkpoints_per_client, low=1)
        check_integer(f"{name}.seed", self.seed, low=0)
        if self.memory is not None:
            check_integer(f"{name}.memory", self.memory, low=1, high=sys.maxsize)

    @property
    def is_on_host(self) -> bool:
        """Whether programs fetch checkpoints from the host.

        Never on a CPU: it has them in the same memory anyway, and callbacks of its virtual devices can
        deadlock.
        """
        return self.checkpoints_on == "host" and jax.default_backend() != "cpu"


class ExchangeSchedule(NamedTuple):
    """The contents of all buffers over a run, as index arrays on the host.

    A buffer's entry is (architecture, slot): the index of an architecture, in the order of groups, and a
    slot of this architecture's bank. Each round but the first begins with a refresh.

    Attributes:
      first: int32 [clients, buffer, 2], the buffers before the first round.
      first_source: int32 [clients, buffer], the clients whose checkpoints these are.
      first_slot: architecture -> int32 [group], the slot of each client's initial model.
      replaced: int32 [rounds, clients], the index of the buffer entry that is replaced.
      entry: int32 [rounds, clients, 2], the new entry.
      source: int32 [rounds, clients], the client whose checkpoint it is; -1 if nothing is replaced.
      slot: architecture -> int32 [rounds, group], the slot in which each client's model is stored.
      num_slots: architecture -> slots of its bank.

    If nothing is stored or replaced, an index is beyond the end, and scatters drop it.
    """

    first: np.ndarray
    first_source: np.ndarray
    first_slot: dict[str, np.ndarray]
    replaced: np.ndarray
    entry: np.ndarray
    source: np.ndarray
    slot: dict[str, np.ndarray]
    num_slots: dict[str, int]


def exchange_schedule(
    groups: Mapping[str, PartyGroup],
    graph: np.ndarray,
    checkpoints_per_client: int,
    num_rounds: int,
    seed: int,
) -> ExchangeSchedule:
    """Draws a run's exchange of checkpoints.

    Before the first round a client's buffer has its neighbours' initial models, repeated until it is
    full. In each later round a fresh checkpoint of a random neighbour replaces a random entry. A client
    that has no neighbour in this round keeps its buffer.

    Args:
      groups: checked groups, of clients 0 to clients - 1.
      graph: bool [clients, clients] or [at least num_rounds, clients, clients], in which every client
        has a neighbour at the first time.
      checkpoints_per_client: N_P.
      num_rounds: rounds of the run.
      seed: of the draws.

    Raises:
      ValueError: a graph that changes is shorter than the run; names `graph`.
    """
    check_integer("checkpoints_per_client", checkpoints_per_client, low=1)
    clients = graph.shape[-1]
    if num_rounds * clients > _MOST_EXCHANGES:
        raise ValueError(
            f"num_rounds must be at most {_MOST_EXCHANGES // clients:,} for {clients} clients, whose "
            f"exchanges are drawn before the first round, got {num_rounds}."
        )
    edges = over_time(graph, num_rounds)
    generator = np.random.default_rng(seed)
    architecture = np.zeros(clients, np.int32)
    for index, group in enumerate(groups.values()):
        architecture[group.clients] = index
    slots_in_use = _SlotsInUse(len(groups))

    # Before the first round: the neighbours' initial models.
    # A generator of their own, so that the exchanges are the same for any size of the buffers.
    of_first = np.random.default_rng((seed, 1))
    first_source = np.stack(
        [_first_sources(np.flatnonzero(row), checkpoints_per_client, of_first) for row in edges[0]]
    )
    buffers = np.zeros((clients, checkpoints_per_client, 2), np.int32)
    first_slots = {c: slots_in_use.put(architecture[c]) for c in np.unique(first_source).tolist()}
    for client, entry in np.ndindex(clients, checkpoints_per_client):
        source = int(first_source[client, entry])
        buffers[client, entry] = slots_in_use.take(int(architecture[source]), first_slots[source])
    first = buffers.copy()

    # Every S_P steps: a fresh checkpoint of a neighbour replaces one entry of each buffer.
    replaced = np.full((num_rounds, clients), checkpoints_per_client, np.int32)
    entries = np.zeros((num_rounds, clients, 2), np.int32)
    sources = np.full((num_rounds, clients), -1, np.int32)
    slots: list[dict[int, int]] = [{}]  # round -> client -> slot of its checkpoint
    for round in range(1, num_rounds):
        for client in np.flatnonzero(edges[round].any(axis=1)):
            sources[round, client] = generator.choice(np.flatnonzero(edges[round, client]))
            entry = replaced[round, client] = generator.integers(checkpoints_per_client)
            slots_in_use.drop(*buffers[client, entry])
        fresh = np.unique(sources[round][sources[round] >= 0]).tolist()
        slots.append({c: slots_in_use.put(architecture[c]) for c in fresh})
        for client in np.flatnonzero(sources[round] >= 0):
            source = int(sources[round, client])
            new = slots_in_use.take(int(architecture[source]), slots[round][source])
            buffers[client, replaced[round, client]] = entries[round, client] = new

    num_slots = dict(zip(groups, slots_in_use.counts, strict=True))

    def of_group(name: str, slot_of_client: Mapping[int, int]) -> list[int]:
        members = groups[name].clients.tolist()
        return [slot_of_client.get(client, num_slots[name]) for client in members]

    return ExchangeSchedule(
        first=first,
        first_source=first_source.astype(np.int32),
        first_slot={name: np.array(of_group(name, first_slots), np.int32) for name in groups},
        replaced=replaced,
        entry=entries,
        source=sources,
        slot={name: np.array([of_group(name, s) for s in slots], np.int32) for name in groups},
        num_slots=num_slots,
    )


def first_banks(schedule: ExchangeSchedule, models: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The banks before the first round: architecture -> leaves [slots, ...].

    Args:
      schedule: the run's.
      models: architecture -> initial models, leaves [group, ...].
    """

    def bank(name: str) -> PyTree:
        zeros = lambda leaf: jnp.zeros((schedule.num_slots[name], *leaf.shape[1:]), leaf.dtype)
        return _put(jax.tree.map(zeros, models[name]), schedule.first_slot[name], models[name])

    return {name: bank(name) for name in models}


def refresh(
    schedule: ExchangeSchedule,
    buffers: jax.Array,
    banks: Mapping[str, PyTree],
    models: Mapping[str, PyTree],
    round: jax.Array,
) -> tuple[jax.Array, dict[str, PyTree]]:
    """Buffers [clients, buffer, 2] and banks at the beginning of a round, from those before it."""
    return refresh_buffers(schedule, buffers, round), {
        name: _put(bank, jnp.asarray(schedule.slot[name])[round], models[name])
        for name, bank in banks.items()
    }


def refresh_buffers(schedule: ExchangeSchedule, buffers: jax.Array, round: jax.Array) -> jax.Array:
    """Buffers [clients, buffer, 2] at the beginning of a round, from those before it."""
    clients = jnp.arange(buffers.shape[0])
    replaced = jnp.asarray(schedule.replaced)[round]
    return buffers.at[clients, replaced].set(jnp.asarray(schedule.entry)[round], mode="drop")


class _SlotsInUse:
    """Counts the buffer entries that refer to each slot of each architecture, for the schedule."""

    def __init__(self, architectures: int):
        self._users: list[list[int]] = [[] for _ in range(architectures)]
        self._pending: list[set[int]] = [set() for _ in range(architectures)]

    @property
    def counts(self) -> list[int]:
        """How many slots each architecture needs."""
        return [len(users) for users in self._users]

    def put(self, architecture: int) -> int:
        """Reserves and returns the first free slot, for a new checkpoint."""
        users, pending = self._users[architecture], self._pending[architecture]
        free = (s for s, count in enumerate(users) if count == 0 and s not in pending)
        slot = next(free, len(users))
        if slot == len(users):
            users.append(0)
        pending.add(slot)
        return slot

    def take(self, architecture: int, slot: int) -> tuple[int, int]:
        self._users[architecture][slot] += 1
        self._pending[architecture].discard(slot)
        return architecture, slot

    def drop(self, architecture: int, slot: int) -> None:
        self._users[architecture][slot] -= 1


def _put(bank: PyTree, slots: Any, models: PyTree) -> PyTree:
    # The bank of an architecture that never teaches is empty.
    put = lambda leaf, new: leaf.at[slots].set(new, mode="drop") if leaf.shape[0] else leaf
    return jax.tree.map(put, bank, models)


def _first_sources(
    neighbours: np.ndarray, entries: int, generator: np.random.Generator
) -> np.ndarray:
    """The clients whose initial models fill a buffer: all neighbours in turn, or some at random."""
    if entries < len(neighbours):
        return generator.permutation(neighbours)[:entries]
    return np.resize(neighbours, entries)
