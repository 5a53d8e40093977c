"""Communication graphs: which are accepted, how far knowledge travels, and errors for bad ones."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.graph import graphs

FEW = settings(max_examples=40)


@st.composite
def edges(draw, most=6):
    count = draw(st.integers(2, most))
    found = draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count))
    matrix = np.array(found).reshape(count, count)
    np.fill_diagonal(matrix, False)
    return matrix


@FEW
@given(edges())
def test_networkx_and_arrays_are_the_same_graph(matrix):
    count = len(matrix)
    of_networkx = nx.from_numpy_array(matrix.astype(int), create_using=nx.DiGraph)
    for given_as in (matrix, matrix.astype(int), matrix.tolist(), of_networkx):
        np.testing.assert_array_equal(graphs.adjacency(given_as, count), matrix)
    both = matrix | matrix.T
    undirected = nx.from_numpy_array(both.astype(int))
    np.testing.assert_array_equal(graphs.adjacency(undirected, count), both)
    over_time = graphs.adjacency([of_networkx, undirected], count)
    np.testing.assert_array_equal(over_time, np.stack([matrix, both]))


@FEW
@given(edges())
def test_hops_are_the_lengths_of_shortest_ways(matrix):
    lengths = dict(nx.all_pairs_shortest_path_length(nx.DiGraph(matrix.astype(int))))
    expected = [
        [lengths[i].get(j, graphs.UNREACHABLE) for j in range(len(matrix))]
        for i in range(len(matrix))
    ]
    np.testing.assert_array_equal(graphs.hops(matrix), expected)


def test_the_paper_s_topologies():
    cycle = graphs.directed_cycle(4)
    assert cycle.sum(axis=1).tolist() == [1] * 4  # one teacher each
    np.testing.assert_array_equal(graphs.hops(cycle)[0], [0, 1, 2, 3])
    islands = graphs.islands(4, 2)
    np.testing.assert_array_equal(graphs.hops(islands)[0], [0, 1, -1, -1])
    np.testing.assert_array_equal(graphs.islands(4, 4), graphs.complete(4))
    assert graphs.islands(3, 1).sum() == 0
    changing = graphs.time_varying([islands, nx.complete_graph(4)], 4, every=3)
    assert changing.shape == (6, 4, 4)
    np.testing.assert_array_equal(changing[2], islands)
    np.testing.assert_array_equal(changing[3], graphs.complete(4))
    np.testing.assert_array_equal(graphs.over_time(changing, 4), changing[:4])
    assert graphs.over_time(cycle, 5).shape == (5, 4, 4)


def test_random_graphs_give_everybody_a_neighbour_and_are_repeatable():
    for seed in range(20):
        sparse = graphs.random_graph(6, 0.05, seed)
        graphs.check_neighbours(sparse, "this test")
        assert not sparse.diagonal().any()
        np.testing.assert_array_equal(sparse, graphs.random_graph(6, 0.05, seed))
    np.testing.assert_array_equal(graphs.random_graph(6, 1.0, 0), graphs.complete(6))
    shares = [graphs.random_graph(40, 0.3, seed).mean() for seed in range(20)]
    assert abs(np.mean(shares) - 0.3 * 39 / 40) < 0.01


ALONE = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: graphs.adjacency(nx.path_graph(5), 4),
            "clients 0 to 3, it has an edge from 3 to 4",
        ),
        (
            lambda: graphs.adjacency(graphs.complete(4), 3),
            "clients 0 to 2, it has an edge from 0 to 3",
        ),
        (lambda: graphs.adjacency(nx.Graph([("a", "b")]), 4), "client indices as nodes, got 'a'"),
        (lambda: graphs.adjacency(graphs.complete(3), 4), r"each of the 4 clients, got \(3, 3\)"),
        (lambda: graphs.adjacency(np.eye(3), 3), "must not join a client with itself, client 0 is"),
        (lambda: graphs.adjacency(np.ones((3, 2)), 3), r"\[clients, clients\] or \[times"),
        (lambda: graphs.adjacency("cycle", 3), "must be a networkx graph, or an array of 0 and 1"),
        (
            lambda: graphs.adjacency([[0, 1], [1]], 2),
            "must be a networkx graph, or an array of 0 and 1",
        ),
        (lambda: graphs.adjacency([[0, 0.5], [1, 0]], 2), "an array of 0 and 1"),
        (
            lambda: graphs.check_neighbours(ALONE == 1, "MHD"),
            "learn from in MHD, client 2 has none",
        ),
        (
            lambda: graphs.check_neighbours(np.stack([ALONE == 1] * 2), "MHD"),
            "client 2 has none at the first time",
        ),
        (
            lambda: graphs.over_time(np.stack([graphs.complete(3)] * 4), 5),
            "each of the run's 5 rounds, it has those of 4",
        ),
        (lambda: graphs.islands(5, 2), "size must divide the 5 clients, got 2"),
        (lambda: graphs.directed_cycle(1), "num_clients must be at least 2"),
        (lambda: graphs.random_graph(4, 1.5, 0), "probability must be at least 0 and at most 1"),
        (lambda: graphs.random_graph(4, 0.5, -1), "seed must be at least 0, got -1"),
        (lambda: graphs.time_varying([], 4), "graphs must hold at least one graph"),
    ],
)
def test_bad_graphs_are_one_clear_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
