"""Client states: what clients keep from one participation to the next, on the device or on the host.

A round gets only the states of its cohorts. The loop around it holds the states of all clients. Inside
the scan of rounds they are stacked on the device. With streamed data they are on the host, where only
clients that have taken part need memory.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Clients = Mapping[str, Any]  # pool -> int32 [cohort], or [seeds, cohort]


class ClientStates(NamedTuple):
    """The clients of a pool that keep a state, and its initial value.

    Attributes:
      clients: int32 [pool], client indices in ascending order.
      first: a client's state before its first participation; None where clients keep nothing.
    """

    clients: np.ndarray
    first: PyTree


def device_client_states(definitions: Mapping[str, ClientStates], seeds: int) -> dict[str, PyTree]:
    """Every client's initial state: pool -> leaves [seeds, pool, ...], to be moved to the device."""

    def of_all(leaf: Any, num_clients: int) -> np.ndarray:
        # The dtype that the device holds: a Python number is one of 64 bits on the host.
        array = np.asarray(leaf, jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
        return np.broadcast_to(array, (seeds, num_clients, *array.shape))

    return {
        pool: jax.tree.map(
            lambda leaf, count=len(states.clients): of_all(leaf, count), states.first
        )
        for pool, states in definitions.items()
    }


def gather(
    definitions: Mapping[str, ClientStates], stored: Mapping[str, PyTree], clients: Clients
) -> dict[str, PyTree]:
    """The cohorts' client states, leaves [cohort, ...], of those stored on the device [pool, ...]."""
    return {
        pool: jax.tree.map(
            lambda leaf, places=_places(definitions[pool], clients[pool]): leaf[places],
            client_states,
        )
        for pool, client_states in stored.items()
    }


def scatter(
    definitions: Mapping[str, ClientStates],
    stored: Mapping[str, PyTree],
    clients: Clients,
    client_states: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Writes the cohorts' new states, leaves [cohort, ...], into `stored`, leaves [pool, ...]."""
    return {
        pool: jax.tree.map(
            lambda leaf, new, places=_places(definitions[pool], clients[pool]): leaf.at[places].set(
                new
            ),
            stored[pool],
            client_states[pool],
        )
        for pool in stored
    }


class HostClientStates:
    """States of the clients that have taken part so far, in the host's memory, for several seeds.

    When the arrays are full their length doubles, so memory is at most twice what these clients need.
    """

    def __init__(self, definitions: Mapping[str, ClientStates], seeds: int):
        firsts = {pool: definition.first for pool, definition in definitions.items()}
        self._first = {
            pool: jax.tree.map(np.asarray, first)
            for pool, first in firsts.items()
            if jax.tree.leaves(first)
        }
        self._empty = {pool: first for pool, first in firsts.items() if pool not in self._first}
        self._seeds = seeds
        # pool -> {(seed's index, client) -> place in the stacked client states}
        self._places: dict[str, dict[tuple[int, int], int]] = {pool: {} for pool in self._first}
        self._stacks = {pool: _room(first, 0) for pool, first in self._first.items()}

    def gather(self, clients: Clients) -> dict[str, PyTree]:
        """The cohorts' states, pool -> leaves [seeds, cohort, ...], of clients int32 [seeds, cohort]."""
        client_states = dict(self._empty)
        for pool in self._first.keys() & clients.keys():
            first = self._first[pool]
            wanted = _owners(clients[pool])
            known = [self._places[pool].get(owner, -1) for owner in wanted]
            places, shape = np.asarray(known), np.shape(clients[pool])

            def read(
                stack: np.ndarray,
                start: np.ndarray,
                places: np.ndarray = places,
                shape: tuple[int, ...] = shape,
            ) -> np.ndarray:
                values = np.empty((len(places), *start.shape), start.dtype)
                values[:] = start
                values[places >= 0] = stack[places[places >= 0]]
                return values.reshape(*shape, *start.shape)

            client_states[pool] = jax.tree.map(read, self._stacks[pool], first)
        return client_states

    def scatter(self, clients: Clients, client_states: Mapping[str, PyTree]) -> None:
        """Stores the cohorts' new client states, leaves [seeds, cohort, ...]."""
        for pool in self._first:
            places_of = self._places[pool]
            places = np.array(
                [places_of.setdefault(owner, len(places_of)) for owner in _owners(clients[pool])]
            )
            self._make_room(pool, len(places_of))

            def write(
                stack: np.ndarray, new: jax.Array | np.ndarray, places: np.ndarray = places
            ) -> None:
                stack[places] = np.asarray(new).reshape(len(places), *stack.shape[1:])

            jax.tree.map(write, self._stacks[pool], client_states[pool])

    def state(self) -> dict[str, PyTree]:
        """For a checkpoint: pool -> (pairs (seed's index, client) int64 [met, 2], states [met, ...]).

        `met` is the number of pairs whose client has taken part.
        """
        return {
            pool: (
                np.array(list(places), np.int64).reshape(-1, 2),
                jax.tree.map(lambda leaf, met=len(places): leaf[:met], self._stacks[pool]),
            )
            for pool, places in self._places.items()
        }

    def shapes(self) -> dict[str, PyTree]:
        """The shapes of `state`; -1 stands for the number of clients that have taken part."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((-1, *leaf.shape[1:]), leaf.dtype), self.state()
        )

    def restore(self, state: Mapping[str, PyTree]) -> None:
        """Continues from a checkpoint's `state`."""
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


def _places(definition: ClientStates, clients: jax.Array) -> jax.Array:
    return jnp.searchsorted(jnp.asarray(definition.clients), clients)


def _owners(clients: Any) -> list[tuple[int, int]]:
    """The pairs (seed's index, client) of clients int32 [seeds, cohort]."""
    return [
        (seed, int(client)) for seed, cohort in enumerate(np.asarray(clients)) for client in cohort
    ]


def _room(first: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), first)
