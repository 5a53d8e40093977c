"""Rolling pools of stale checkpoints, MHD's stand-in for live exchange.

Who gets whose checkpoint when is settled before a run, from the graph and a seed, as the examples are
dealt before it: so the bank of checkpoints has exactly as many places as it will need, and none is kept
twice for two clients who have the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph.graphs import over_time
from fedcodist.algorithms.parties.party import PartyGroup
from fedcodist.core.checks import check_integer

PyTree = Any
_MOST_EXCHANGES = 10**7  # of all clients over a run; minutes of drawing


class ExchangeSchedule(NamedTuple):
    """Every pool's content over a run; index arrays on the host.

    A pool holds (architecture, slot): the index of an architecture, in the order of groups, and a place
    in this architecture's bank. Each round but the first begins with a refresh.

    Attributes:
      first: int32 [clients, pool, 2], the pools before the first round.
      first_source: int32 [clients, pool], whose checkpoints these are.
      first_slot: architecture -> int32 [group], where each client's initial model is put.
      replaced: int32 [rounds, clients], which entry of the pool is replaced.
      entry: int32 [rounds, clients, 2], by what.
      source: int32 [rounds, clients], whose checkpoint that is; -1 where nothing is replaced.
      slot: architecture -> int32 [rounds, group], where each client's present model is put.
      num_slots: architecture -> places of its bank.

    Where nothing is put or replaced an index is beyond the end, and scatters drop it.
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

    Before the first round a client's pool has its neighbours' initial models, one after another until it
    is full. At each later round a fresh checkpoint of a random neighbour replaces a random entry; a
    client that has no neighbour just then keeps its pool.

    Args:
      groups: checked groups, of clients 0 to clients - 1.
      graph: bool [clients, clients] or [at least num_rounds, clients, clients], where everybody has a
        neighbour at the first time.
      checkpoints_per_client: N_P.
      num_rounds: rounds of the run.
      seed: of the draws.

    Raises:
      ValueError: one line; a graph that changes is shorter than the run.
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
    architectures = list(groups)
    of_client = np.zeros(clients, np.int32)
    for index, group in enumerate(groups.values()):
        of_client[group.clients] = index
    bank = _Bank(len(architectures))

    first_source = np.stack(
        [np.resize(np.flatnonzero(row), checkpoints_per_client) for row in edges[0]]
    )
    pools = np.zeros((clients, checkpoints_per_client, 2), np.int32)
    first_placed = {c: bank.put(of_client[c]) for c in np.unique(first_source).tolist()}
    for client, entry in np.ndindex(clients, checkpoints_per_client):
        source = int(first_source[client, entry])
        pools[client, entry] = bank.take(int(of_client[source]), first_placed[source])
    first = pools.copy()

    replaced = np.full((num_rounds, clients), checkpoints_per_client, np.int32)
    entries = np.zeros((num_rounds, clients, 2), np.int32)
    sources = np.full((num_rounds, clients), -1, np.int32)
    placed: list[dict[int, int]] = [{}]
    for round in range(1, num_rounds):
        for client in np.flatnonzero(edges[round].any(axis=1)):
            sources[round, client] = generator.choice(np.flatnonzero(edges[round, client]))
            entry = replaced[round, client] = generator.integers(checkpoints_per_client)
            bank.drop(*pools[client, entry])
        fresh = np.unique(sources[round][sources[round] >= 0]).tolist()
        placed.append({c: bank.put(of_client[c]) for c in fresh})
        for client in np.flatnonzero(sources[round] >= 0):
            source = int(sources[round, client])
            new = bank.take(int(of_client[source]), placed[round][source])
            pools[client, replaced[round, client]] = entries[round, client] = new

    num_slots = dict(zip(architectures, bank.sizes, strict=True))

    def slots(name, placed):
        return [placed.get(c, num_slots[name]) for c in groups[name].clients.tolist()]

    return ExchangeSchedule(
        first=first,
        first_source=first_source.astype(np.int32),
        first_slot={name: np.array(slots(name, first_placed), np.int32) for name in groups},
        replaced=replaced,
        entry=entries,
        source=sources,
        slot={name: np.array([slots(name, at) for at in placed], np.int32) for name in groups},
        num_slots=num_slots,
    )


def first_banks(schedule: ExchangeSchedule, models: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The banks before the first round: architecture -> leaves [slots, ...].

    Args:
      schedule: the run's.
      models: architecture -> initial models, leaves [group, ...].
    """

    def bank(name):
        place = lambda leaf: jnp.zeros((schedule.num_slots[name], *leaf.shape[1:]), leaf.dtype)
        return _put(jax.tree.map(place, models[name]), schedule.first_slot[name], models[name])

    return {name: bank(name) for name in models}


def refresh(
    schedule: ExchangeSchedule,
    pools: jax.Array,
    banks: Mapping[str, PyTree],
    models: Mapping[str, PyTree],
    round: jax.Array,
) -> tuple[jax.Array, dict[str, PyTree]]:
    """Pools [clients, pool, 2] and banks at the beginning of a round, from those of the one before."""
    return refresh_pools(schedule, pools, round), {
        name: _put(bank, jnp.asarray(schedule.slot[name])[round], models[name])
        for name, bank in banks.items()
    }


def refresh_pools(schedule: ExchangeSchedule, pools: jax.Array, round: jax.Array) -> jax.Array:
    """Pools [clients, pool, 2] at the beginning of a round, from those of the one before."""
    clients = jnp.arange(pools.shape[0])
    at = jnp.asarray(schedule.replaced)[round]
    return pools.at[clients, at].set(jnp.asarray(schedule.entry)[round], mode="drop")


class _Bank:
    """Counts who refers to which slot, by architecture, while the schedule is drawn."""

    def __init__(self, architectures: int):
        self._users: list[list[int]] = [[] for _ in range(architectures)]
        self._pending: list[set[int]] = [set() for _ in range(architectures)]

    @property
    def sizes(self) -> list[int]:
        return [len(users) for users in self._users]

    def put(self, architecture: int) -> int:
        """A free slot for a new checkpoint, the first one; it is taken from now on."""
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
    # Of an architecture that is nobody's teacher the bank is empty.
    put = lambda leaf, new: leaf.at[slots].set(new, mode="drop") if leaf.shape[0] else leaf
    return jax.tree.map(put, bank, models)
