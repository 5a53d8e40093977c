import sys
import types

import numpy as np
import pytest

from fedcodist.data import from_tfds


class DataSource:
    """A random-access data source as `tfds.data_source` returns it: length, items, no slices."""

    def __init__(self, examples):
        self._examples = examples

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        return self._examples[int(index)]


def example(value):
    return {
        "id": b"train_%d" % value,
        "image": np.full((4, 4, 3), value, np.uint8),
        "label": np.int64(value % 10),
        "coarse_label": value % 5,
    }


SOURCE = DataSource([example(value) for value in range(12)])


def test_data_source_to_columns():
    columns = from_tfds(SOURCE)
    assert set(columns) == {"id", "image", "label", "coarse_label"}
    assert columns["image"].shape == (12, 4, 4, 3) and columns["image"].dtype == np.uint8
    np.testing.assert_array_equal(columns["image"][:, 0, 0, 0], np.arange(12))
    np.testing.assert_array_equal(columns["label"], np.arange(12) % 10)
    assert columns["id"][11] == b"train_11"


def test_choosing_and_renaming_columns():
    assert list(from_tfds(SOURCE, columns=["image"])) == ["image"]
    columns = from_tfds(SOURCE, columns={"image": "image", "label": "coarse_label"})
    np.testing.assert_array_equal(columns["label"], np.arange(12) % 5)


def test_splits_of_a_mapping():
    source = {"train": SOURCE, "test": DataSource([example(3)])}
    assert len(from_tfds(source, "test")["label"]) == 1
    with pytest.raises(ValueError, match=r"split must be one of \['test', 'train'\], got 'dev'"):
        from_tfds(source, "dev")


def test_a_name_goes_to_the_library(monkeypatch):
    asked = []

    def data_source(name, *, split, data_dir):
        asked.append((name, split, data_dir))
        return SOURCE

    module = types.SimpleNamespace(data_source=data_source)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    assert len(from_tfds("cifar100", "train", columns="label", data_dir="/data")["label"]) == 12
    assert asked == [("cifar100", "train", "/data")]
    with pytest.raises(ValueError, match="split must be given"):
        from_tfds("cifar100")


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'fedcodist\[tfds\]'") as error:
        from_tfds("cifar100", "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (3, {}, "source must be a name"),
        (iter([]), {}, "source must be a name"),
        ([], {}, "no examples"),
        ([1], {}, "dicts of features"),
        (SOURCE, {"split": "train"}, "split must be left out"),
        (SOURCE, {"columns": ["z"]}, "no feature 'z'"),
        (SOURCE, {"columns": []}, "columns must not be empty"),
        ([{"a": {"b": 1}}], {}, "feature 'a' is not an array"),
        ([{"a": [1, 2]}, {"a": [1]}], {}, "feature 'a' of example 1"),
        ([{"a": [1, 2]}, {"a": [1, 2.5]}], {}, "feature 'a' of example 1 is float64"),
        ([{"a": 1}, {"a": b"x"}], {}, "feature 'a' of example 1"),
        ([{"a": 1}, {}], {}, "example 1 has no feature 'a'"),
    ],
)
def test_clear_errors(source, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_tfds(source, **arguments)
    assert "\n" not in str(error.value)
