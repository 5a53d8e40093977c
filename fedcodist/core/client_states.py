"""What clients keep from one participation to the next, on the device or on the host.

A round sees the states of its cohorts alone. Where the states of all clients lie is the business of
the loop around it: stacked on the device inside the scan of rounds, or, with streamed data, on the host,
where a million clients that have met a thousand take memory for a thousand.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Clients = Mapping[str, Any]  # pool -> int32 [cohort], or [seeds, cohort]


class ClientStates(NamedTuple):
    """Which clients of a pool keep a state, and what it is at first.

    Attributes:
      clients: int32 [pool], client indices in ascending order.
      first: a client's state before its first participation; None where clients keep nothing.
    """

    clients: np.ndarray
    first: PyTree


def device_client_states(kept: Mapping[str, ClientStates], seeds: int) -> dict[str, PyTree]:
    """Every client's first state: pool -> leaves [seeds, pool, ...], to be moved to the device."""
    return {
        pool: jax.tree.map(
            lambda leaf, pool=pool: np.broadcast_to(
                leaf, (seeds, len(kept[pool].clients), *jnp.shape(leaf))
            ),
            kept[pool].first,
        )
        for pool in kept
    }


def gather(
    kept: Mapping[str, ClientStates], stored: Mapping[str, PyTree], clients: Clients
) -> dict[str, PyTree]:
    """The cohorts' client states, leaves [cohort, ...], of those stored on the device [pool, ...]."""
    return {
        pool: jax.tree.map(
            lambda leaf, at=_places(kept[pool], clients[pool]): leaf[at], client_states
        )
        for pool, client_states in stored.items()
    }


def scatter(
    kept: Mapping[str, ClientStates],
    stored: Mapping[str, PyTree],
    clients: Clients,
    client_states: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Puts the cohorts' new client states in their places."""
    return {
        pool: jax.tree.map(
            lambda leaf, new, at=_places(kept[pool], clients[pool]): leaf.at[at].set(new),
            stored[pool],
            client_states[pool],
        )
        for pool in stored
    }


class HostClientStates:
    """Rows of the clients met so far, in the host's memory, for several seeds.

    Memory doubles when it is full, so it is at most twice what the clients met so far need.
    """

    def __init__(self, kept: Mapping[str, ClientStates], seeds: int):
        self._first = {
            pool: jax.tree.map(np.asarray, each.first)
            for pool, each in kept.items()
            if jax.tree.leaves(each.first)
        }
        self._empty = {pool: each.first for pool, each in kept.items() if pool not in self._first}
        self._seeds = seeds
        # pool -> {(seed's index, client) -> place in the stacked client states}
        self._places: dict[str, dict[tuple[int, int], int]] = {pool: {} for pool in self._first}
        self._stacks = {pool: _room(first, 0) for pool, first in self._first.items()}

    def gather(self, clients: Clients) -> dict[str, PyTree]:
        """pool -> leaves [seeds, cohort, ...] of clients int32 [seeds, cohort], of these pools."""
        client_states = dict(self._empty)
        for pool in self._first.keys() & clients.keys():
            first = self._first[pool]
            wanted = _owners(clients[pool])
            known = [self._places[pool].get(owner, -1) for owner in wanted]
            places, shape = np.asarray(known), np.shape(clients[pool])

            def read(stack, start, places=places, shape=shape):
                found = np.empty((len(places), *start.shape), start.dtype)
                found[:] = start
                found[places >= 0] = stack[places[places >= 0]]
                return found.reshape(*shape, *start.shape)

            client_states[pool] = jax.tree.map(read, self._stacks[pool], first)
        return client_states

    def scatter(self, clients: Clients, client_states: Mapping[str, PyTree]) -> None:
        """Keeps the cohorts' new client states, leaves [seeds, cohort, ...]."""
        for pool in self._first:
            own = self._places[pool]
            places = np.array([own.setdefault(o, len(own)) for o in _owners(clients[pool])])
            self._make_room(pool, len(own))

            def write(stack, new, places=places):
                stack[places] = np.asarray(new).reshape(len(places), *stack.shape[1:])

            jax.tree.map(write, self._stacks[pool], client_states[pool])

    def state(self) -> dict[str, PyTree]:
        """What a checkpoint holds: pool -> (owners int64 [met, 2], client_states [met, ...])."""
        return {
            pool: (
                np.array(list(own), np.int64).reshape(-1, 2),
                jax.tree.map(lambda leaf, met=len(own): leaf[:met], self._stacks[pool]),
            )
            for pool, own in self._places.items()
        }

    def shapes(self) -> dict[str, PyTree]:
        """The shapes of `state`; -1 stands for the number of clients met."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((-1, *leaf.shape[1:]), leaf.dtype), self.state()
        )

    def restore(self, state: Mapping[str, PyTree]) -> None:
        """Goes on from a checkpoint's `state`."""
        for pool, (owners, stack) in state.items():
            pairs = [(int(seed), int(client)) for seed, client in owners]
            self._places[pool] = {owner: place for place, owner in enumerate(pairs)}
            self._stacks[pool] = jax.tree.map(np.array, stack)

    def _make_room(self, pool: str, needed: int) -> None:
        room = jax.tree.leaves(self._stacks[pool])[0].shape[0]
        if needed > room:
            more = _room(self._first[pool], max(needed - room, room))
            self._stacks[pool] = jax.tree.map(
                lambda old, new: np.concatenate([old, new]), self._stacks[pool], more
            )


def _places(kept: ClientStates, clients: jax.Array) -> jax.Array:
    return jnp.searchsorted(jnp.asarray(kept.clients), clients)


def _owners(clients: Any) -> list[tuple[int, int]]:
    return [(seed, int(c)) for seed, own in enumerate(np.asarray(clients)) for c in own]


def _room(first: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), first)
