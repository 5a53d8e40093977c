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
    assert from_tfds([{"a": 1}, {"a": 2, "b": 1}], columns="a")["a"].tolist() == [1, 2]
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

    builder = lambda name, data_dir: types.SimpleNamespace(is_prepared=lambda: True)
    module = types.SimpleNamespace(data_source=data_source, builder=builder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    assert len(from_tfds("cifar100", "train", columns="label", data_dir="/data")["label"]) == 12
    assert asked == [("cifar100", "train", "/data")]
    with pytest.raises(ValueError, match="split must be given"):
        from_tfds("cifar100")


@pytest.fixture(scope="module")
def tfds():
    """TensorFlow Datasets with a data set of three features, and features that are no numbers."""
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")

    class ThreeFeatures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # looked up with importlib_resources, which TFDS forgets to ask for

        def _info(self):
            features = {
                "pixels": tfds.features.Tensor(shape=(2, 2, 1), dtype=np.uint8),
                "score": tfds.features.Scalar(dtype=np.float32),
                "byte": tfds.features.Scalar(dtype=np.uint8),
                "label": tfds.features.ClassLabel(num_classes=3),
                "flag": tfds.features.Scalar(dtype=np.bool_),
                "text": tfds.features.Text(),
                "sequence": tfds.features.Sequence(np.float32, length=3),
                "nested": {"a": tfds.features.Scalar(dtype=np.int8)},
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for row in range(5):
                yield (
                    row,
                    {
                        "pixels": np.full((2, 2, 1), row, np.uint8),
                        "score": row / 2,
                        "byte": row,
                        "label": row % 3,
                        "flag": row % 2 == 1,
                        "text": "a" * row,
                        "sequence": [row, row, 0.5],
                        "nested": {"a": row},
                    },
                )

    return tfds


COLUMNS = {
    "pixels": np.uint8,
    "score": np.float32,
    "byte": np.uint8,
    "label": np.int64,
    "flag": np.bool_,
    "sequence": np.float32,
}


def test_a_real_builder_has_the_dtypes_that_it_declares(tfds, tmp_path):
    """Its examples hold Python numbers; nothing is prepared in the folder yet."""
    folder = str(tmp_path / "new")
    for _ in range(2):  # prepared, and read again
        columns = from_tfds("three_features", "train", [*COLUMNS, "text"], data_dir=folder)
        assert {n: columns[n].dtype for n in COLUMNS} == {
            n: np.dtype(d) for n, d in COLUMNS.items()
        }
        rows = columns["byte"].astype(int)
        assert sorted(rows) == list(range(5))
        np.testing.assert_array_equal(columns["score"], rows / 2)
        np.testing.assert_array_equal(columns["label"], rows % 3)
        np.testing.assert_array_equal(columns["flag"], rows % 2 == 1)
        np.testing.assert_array_equal(columns["pixels"][:, 1, 1, 0], rows)
        np.testing.assert_array_equal(columns["sequence"][:, 0], rows)
        assert [len(text) for text in columns["text"]] == rows.tolist()
    source = tfds.data_source("three_features", split="train", data_dir=folder)
    assert from_tfds(source, columns="score")["score"].dtype == np.float32
    assert from_tfds({"train": source}, "train", {"x": "byte"})["x"].dtype == np.uint8
    with pytest.raises(TypeError, match="feature 'nested' is not an array of numbers or text"):
        from_tfds(source, columns="nested")


def test_a_real_builder_that_is_prepared_in_another_format(tfds, tmp_path, monkeypatch):
    builder = tfds.builder("three_features", data_dir=str(tmp_path), file_format="parquet")
    builder.download_and_prepare()
    columns = from_tfds("three_features", "train", ["score"], data_dir=str(tmp_path))
    assert columns["score"].dtype == np.float32

    def refuse(*arguments, **keywords):
        raise NotImplementedError("Random access data source is not supported:\n\t* for TFRecord")

    monkeypatch.setattr(tfds, "data_source", refuse)
    with pytest.raises(ValueError, match="choose another one, where it is prepared anew") as error:
        from_tfds("three_features", "train", data_dir=str(tmp_path))
    assert "\n" not in str(error.value)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r'pip install "fedcodist\[tfds\]"') as error:
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
        ([{"a": np.ma.masked_equal([1, 2], 2)}], {}, "feature 'a' must not be masked"),
        ([{"a": b"x\0"}], {}, "feature 'a' must not have text that ends in NUL.* got b'x"),
        ([{"a": "b"}, {"a": ["x\0"]}], {}, "feature 'a' must not have text that ends in NUL"),
        ([{"a": ["b", 1]}], {}, "feature 'a' must be all text where some is, got 1"),
        ([{"a": [1, 2]}, {"a": [1]}], {}, "feature 'a' of example 1"),
        ([{"a": [1, 2]}, {"a": [1, 2.5]}], {}, "feature 'a' of example 1 is float64"),
        ([{"a": 1}, {"a": b"x"}], {}, "feature 'a' of example 1"),
        ([{"a": 1}, {}], {}, "example 1 has no feature 'a'"),
        ([{"a": 1}, {"a": 2, "b": 1}], {}, "example 1 has feature 'b', which example 0 lacks"),
    ],
)
def test_clear_errors(source, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_tfds(source, **arguments)
    assert "\n" not in str(error.value)
