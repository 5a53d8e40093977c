"""Clients by labels, as a picture and as numbers."""

import sys

import numpy as np
import pytest

import fedcodist as fc
from fedcodist.data import dirichlet
from fedcodist.report.partition_plot import label_counts, plot_partition

PNG = b"\x89PNG"


def clients_of(num_clients, num_labels=10, count=2000):
    labels = np.random.default_rng(0).integers(0, num_labels, count)
    return fc.FederatedData.from_arrays(
        {"label": labels}, partition=dirichlet(labels, num_clients, 0.5, 0)
    )


def test_counts_are_those_of_each_client():
    labels = np.array([7, 7, 3, 3, 3, 9])
    data = fc.FederatedData.from_arrays({"label": labels}, offsets=[0, 3, 3, 6], allow_empty=True)
    present, counts = label_counts(data)
    assert present.tolist() == [3, 7, 9]
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [2, 0, 1]]
    one_hot = fc.FederatedData.from_arrays({"label": np.eye(10)[labels]}, offsets=[0, 3, 6])
    assert label_counts(one_hot)[1].tolist() == [[1, 2, 0], [2, 0, 1]]


@pytest.mark.parametrize("num_clients", [4, 100])
def test_bubbles_have_the_area_of_their_examples(num_clients, tmp_path):
    data = clients_of(num_clients)
    _, counts = label_counts(data)
    path = tmp_path / "partition.png"
    (axes,) = fc.plot_partition(data, path).axes
    assert path.read_bytes().startswith(PNG)
    bubbles = axes.collections[0]
    places, areas = np.asarray(bubbles.get_offsets(), int), bubbles.get_sizes()
    assert len(places) == (counts > 0).sum()
    drawn = np.zeros_like(counts, float)
    drawn[places[:, 0], places[:, 1]] = areas
    np.testing.assert_allclose(drawn, counts * areas.max() / counts.max())
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert names == [str(index) for index in range(0, num_clients, 1 if num_clients == 4 else 5)]
    assert axes.get_title() == f"{num_clients} clients, 2,000 examples"


def test_bars_have_the_height_of_their_examples():
    data = clients_of(6, num_labels=3)
    _, counts = label_counts(data)
    (axes,) = plot_partition(data, kind="bars", title="Three labels").axes
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    np.testing.assert_array_equal(np.transpose(heights), counts)
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    np.testing.assert_array_equal(tops, data.client_sizes)
    assert axes.get_title() == "Three labels"


def test_of_many_clients_some_are_drawn():
    (axes,) = plot_partition(clients_of(400), most_clients=40).axes
    assert axes.get_title().startswith("40 of 400 clients")
    assert len({place for place, _ in axes.collections[0].get_offsets()}) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "pie"}, "kind must be one of .'bubbles', 'bars'., got 'pie'"),
        ({"column": "image"}, r"column must be one of \['label'\], got 'image'"),
        ({"most_clients": 0}, "most_clients must be at least 1"),
        ({"kind": "bars"}, "kind must be 'bubbles' for more than 20 labels, there are 30"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        plot_partition(clients_of(4, num_labels=30), **arguments)
    with pytest.raises(TypeError, match="data must be FederatedData, got list"):
        plot_partition([1])
    fractions = fc.FederatedData.from_arrays({"label": np.array([0.5, 1.0])}, offsets=[0, 2])
    with pytest.raises(ValueError, match="column 'label' must be integer labels"):
        plot_partition(fractions)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "fedcodist\[plot\]"'):
        plot_partition(clients_of(4))
