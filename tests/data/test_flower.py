"""Partitioners of flwr-datasets, and objects with their interface."""

import numpy as np
import pytest

from fedcodist.data import from_flower, from_hugging_face

X = np.arange(10)


class Partitioner:
    def __init__(self, parts):
        self.parts = parts

    @property
    def num_partitions(self):
        return len(self.parts)

    def load_partition(self, partition_id):
        return self.parts[partition_id]


def tables(*parts):
    return Partitioner([{"x": X[part], "label": X[part] % 2} for part in parts])


def test_partitions_become_clients_in_their_order():
    data = from_flower(tables([3, 1], [2], [0, 4, 5]), {"feature": "x"})
    assert data.client_ids.tolist() == ["0", "1", "2"] and set(data.columns) == {"feature"}
    assert [client["feature"].tolist() for _, client in data.clients()] == [[3, 1], [2], [0, 4, 5]]


def test_partitions_without_examples():
    with pytest.raises(ValueError, match="client '1' has no examples"):
        from_flower(tables([0], []))
    data = from_flower(tables([], [0, 1]), allow_empty=True)
    assert data.client_sizes.tolist() == [0, 2]
    with pytest.raises(ValueError, match="no examples in any partition"):
        from_flower(tables([], []), allow_empty=True)


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (3, "must have num_partitions and load_partition"),
        (Partitioner([]), "num_partitions must be at least 1"),
        (Partitioner([[1, 2]]), "partition 0: must be a datasets.Dataset or a mapping"),
        (Partitioner([{"y": X}, {"x": X}]), "client '1' has columns"),
        (
            Partitioner([{"x": np.ma.masked_equal(X, 2)}]),
            "partition 0: column 'x' must not be masked",
        ),
    ],
)
def test_what_is_no_partitioner_is_one_line(partitioner, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_flower(partitioner)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="partition 0: columns: no column 'z'; the columns are"):
        from_flower(tables([0]), columns="z")


def test_the_partitioners_of_flwr_datasets():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features(
        {"x": Value("int64"), "label": ClassLabel(num_classes=4), "who": Value("string")}
    )
    rows = {"x": range(80), "label": [i % 4 for i in range(80)], "who": ["b", "a"] * 40}
    dataset = Dataset.from_dict(rows, features=features)
    for partitioner in (
        partitioners.IidPartitioner(num_partitions=8),
        partitioners.PathologicalPartitioner(8, "label", num_classes_per_partition=2),
    ):
        partitioner.dataset = dataset
        data = from_flower(partitioner)
        assert data.num_clients == 8
        assert sorted(data.columns["x"].tolist()) == list(range(80))
        for index in range(8):
            of_flower = from_hugging_face(partitioner.load_partition(index))
            np.testing.assert_array_equal(data.client(index)["x"], of_flower["x"])
    natural = partitioners.NaturalIdPartitioner(partition_by="who")
    with pytest.raises(TypeError, match="num_partitions and a data set assigned"):
        from_flower(natural)
    natural.dataset = dataset
    data = from_flower(natural, ["x"])
    assert data.client_ids.tolist() == ["a", "b"]
    assert data.get_client("a")["x"].tolist() == list(range(1, 80, 2))
