"""Communication graphs as arrays: which clients learn from which.

A graph is bool [clients, clients], or [times, clients, clients] if it changes. Entry (i, j) is true if
there is an edge from i to j; then i may learn from j. A `networkx` graph is accepted too; its undirected
edges count in both directions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.checks import check_integer, check_not_masked, check_number

UNREACHABLE = -1


def adjacency(graph: Any, num_clients: int) -> np.ndarray:
    """A graph as bool [clients, clients], or as [times, clients, clients] if it changes.

    Args:
      graph: `networkx` graph whose nodes are client indices (nodes that are left out have no edges),
        an array as above, or a sequence of either, one per time.
      num_clients: clients 0 to num_clients - 1.

    Raises:
      ValueError, TypeError: names `graph`, if an edge leads to an unknown client or from a client to
        itself, or if the array has another shape.
    """
    check_integer("num_clients", num_clients, low=1)
    if isinstance(graph, list | tuple) and any(map(_is_networkx, graph)):
        return np.stack([adjacency(entry, num_clients) for entry in graph])
    if _is_networkx(graph):
        return _checked(_of_networkx(graph, num_clients), num_clients)
    return _checked(_of_array(graph), num_clients)


def islands(num_clients: int, size: int) -> np.ndarray:
    """Complete subgraphs of `size` clients each, 0 to size - 1 and so on, with no edges between them.

    Raises:
      ValueError: the size does not divide the number of clients.
    """
    check_integer("num_clients", num_clients, low=1)
    check_integer("size", size, low=1)
    if num_clients % size:
        raise ValueError(f"size must divide the {num_clients} clients, got {size}.")
    island = np.arange(num_clients) // size
    return (island[:, None] == island[None]) & ~np.eye(num_clients, dtype=bool)


def directed_cycle(num_clients: int) -> np.ndarray:
    """Client i learns from i + 1, and the last one from the first."""
    check_integer("num_clients", num_clients, low=2)
    return np.roll(np.eye(num_clients, dtype=bool), 1, axis=1)


def complete(num_clients: int) -> np.ndarray:
    """Every client learns from all others."""
    check_integer("num_clients", num_clients, low=1)
    return ~np.eye(num_clients, dtype=bool)


def random_graph(num_clients: int, probability: float, seed: int) -> np.ndarray:
    """Directed edges, each with this probability; a client without an edge gets a random one."""
    check_integer("num_clients", num_clients, low=2)
    check_number("probability", probability, low=0, high=1)
    check_integer("seed", seed, low=0)
    generator = np.random.default_rng(seed)
    edges = generator.random((num_clients, num_clients)) < probability
    np.fill_diagonal(edges, False)
    others = (
        generator.integers(1, num_clients, num_clients) + np.arange(num_clients)
    ) % num_clients
    alone = np.flatnonzero(~edges.any(axis=1))
    edges[alone, others[alone]] = True
    return edges


def time_varying(graphs: Sequence[Any], num_clients: int, every: int = 1) -> np.ndarray:
    """One graph after another, each for `every` times: bool [len(graphs) * every, clients, clients]."""
    check_integer("every", every, low=1)
    if not len(graphs):
        raise ValueError("graphs must hold at least one graph, got none.")
    return np.repeat(np.stack([adjacency(graph, num_clients) for graph in graphs]), every, axis=0)


def over_time(graph: np.ndarray, num_rounds: int) -> np.ndarray:
    """The graph in each round, bool [rounds, clients, clients].

    Raises:
      ValueError: names `graph`, if it changes and has fewer rounds.
    """
    if graph.ndim == 2:
        return np.broadcast_to(graph, (num_rounds, *graph.shape))
    if len(graph) < num_rounds:
        raise ValueError(
            f"graph must have the edges of each of the run's {num_rounds} rounds, it has those of "
            f"{len(graph)}."
        )
    return graph[:num_rounds]


def cut(graph: np.ndarray, num_rounds: int) -> np.ndarray:
    """Like `over_time`, but a graph that does not change stays bool [clients, clients]."""
    return graph if graph.ndim == 2 else over_time(graph, num_rounds)


def at_round(graph: np.ndarray, round: Any) -> jax.Array:
    """The graph that `cut` returned, at a round, which may be traced: bool [clients, clients]."""
    return jnp.asarray(graph) if graph.ndim == 2 else jnp.asarray(graph)[round]


def mean_over_neighbours(edges: jax.Array, values: jax.Array) -> jax.Array:
    """The mean of each client's neighbours' values, [clients, ...]; zeros for clients without any.

    Args:
      edges: bool [clients, clients].
      values: of each client, [clients, ...].
    """
    shares = edges / jnp.maximum(jnp.sum(edges, axis=1), 1)[:, None]
    return jnp.tensordot(shares.astype(values.dtype), values, axes=1, precision="highest")


def check_neighbours(graph: np.ndarray, method: str) -> None:
    """Raises ValueError that names a client who learns from nobody at the first time."""
    first = graph if graph.ndim == 2 else graph[0]
    alone = np.flatnonzero(~first.any(axis=1))
    if alone.size:
        when = "" if graph.ndim == 2 else " at the first time"
        raise ValueError(
            f"graph must give every client a neighbour to learn from in {method}, client {alone[0]} "
            f"has none{when}."
        )


def hops(graph: np.ndarray) -> np.ndarray:
    """Distances in the graph: int [clients, clients], the length of a shortest path from i to j.

    0 on the diagonal, UNREACHABLE if there is no path.

    Args:
      graph: bool [clients, clients].
    """
    edges = np.asarray(graph, bool)
    count = len(edges)
    distance = np.where(np.eye(count, dtype=bool), 0, UNREACHABLE)
    reached = np.eye(count, dtype=bool)
    for step in range(1, count):
        further = (reached @ edges) & (distance == UNREACHABLE)
        if not further.any():
            break
        distance[further] = step
        reached = further
    return distance


def _is_networkx(graph: Any) -> bool:
    return hasattr(graph, "edges") and hasattr(graph, "is_directed")


def _of_networkx(graph: Any, num_clients: int) -> np.ndarray:
    edges = np.zeros((num_clients, num_clients), bool)
    for node in graph.nodes:
        if isinstance(node, bool) or not isinstance(node, int | np.integer):
            raise TypeError(f"graph must have client indices as nodes, got {node!r}.")
    for start, end in graph.edges():
        for node in (start, end):
            if not 0 <= node < num_clients:
                raise _unknown(start, end, num_clients)
        edges[start, end] = True
        if not graph.is_directed():
            edges[end, start] = True
    return edges


def _of_array(graph: Any) -> np.ndarray:
    check_not_masked("graph", graph)
    try:
        array = np.asarray(graph)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise TypeError("graph must be a networkx graph, or an array of 0 and 1 (1: an edge).")
    return array.astype(bool)


def _checked(graph: np.ndarray, num_clients: int) -> np.ndarray:
    if graph.ndim not in (2, 3) or graph.shape[-1] != graph.shape[-2] or 0 in graph.shape:
        raise ValueError(
            f"graph must be [clients, clients] or [times, clients, clients], got {graph.shape}."
        )
    if graph.shape[-1] < num_clients:
        raise ValueError(
            f"graph must have an entry for each of the {num_clients} clients, got {graph.shape}."
        )
    edges = np.argwhere(graph)[:, -2:]
    for start, end in edges[(edges >= num_clients).any(axis=1)]:
        raise _unknown(start, end, num_clients)
    for start in edges[edges[:, 0] == edges[:, 1], 0]:
        raise ValueError(f"graph must not join a client with itself, client {start} is.")
    return graph[..., :num_clients, :num_clients]


def _unknown(start: Any, end: Any, num_clients: int) -> ValueError:
    return ValueError(
        f"graph must join clients 0 to {num_clients - 1}, it has an edge from {start} to {end}."
    )
