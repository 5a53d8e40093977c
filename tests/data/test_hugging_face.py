"""Data sets of Hugging Face, made here; nothing is downloaded."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcodist.data import dirichlet, from_hugging_face, hugging_face
from fedcodist.data.federated_data import FederatedData

# A folder `datasets`, as this checkout has one, is importable too but is not the package.
hf = pytest.importorskip("datasets")
if not hasattr(hf, "Dataset"):
    pytest.skip("Hugging Face's datasets is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
DRAWS = np.random.default_rng(0)
PICTURES = DRAWS.integers(0, 256, (12, 5, 4, 3), np.uint8)
GREY = DRAWS.integers(0, 256, (12, 5, 4), np.uint8)
LABELS = [0, 1, 2] * 4
USERS = ["ben", "anna", "cleo", "anna"] * 3


def pictures(arrays, **columns):
    features = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(names=["cat", "dog", "owl"])})
    features.update({name: hf.Value("string") for name in columns})
    rows = {"img": list(arrays), "label": LABELS[: len(arrays)], **columns}
    return hf.Dataset.from_dict(rows, features=features)


@pytest.mark.parametrize("arrays", [PICTURES, GREY])
def test_pictures_and_class_labels_become_columns(arrays):
    columns = from_hugging_face(pictures(arrays), columns={"image": "img", "label": "label"})
    assert columns["image"].dtype == np.uint8 and columns["label"].dtype == np.int32
    np.testing.assert_array_equal(columns["image"], arrays.reshape(12, 5, 4, -1))
    np.testing.assert_array_equal(columns["label"], LABELS)
    train = FederatedData.from_arrays(columns, partition=dirichlet(columns["label"], 3, 1.0, 0))
    assert train.num_examples == 12


def test_palettes_become_colours():
    image = pytest.importorskip("PIL.Image").fromarray(PICTURES[0] // 128 * 255).convert("P")
    features = hf.Features({"img": hf.Image()})
    columns = from_hugging_face(hf.Dataset.from_dict({"img": [image]}, features=features))
    np.testing.assert_array_equal(columns["img"][0], PICTURES[0] // 128 * 255)


@pytest.mark.parametrize(("mode", "channels"), [("PA", 4), ("CMYK", 3), ("YCbCr", 3)])
def test_other_modes_become_colours(mode, channels):
    pil = pytest.importorskip("PIL.Image")
    image = pil.fromarray(PICTURES[0] // 128 * 255)
    kept = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    array = hugging_face._image("img", kept, 0)
    assert array.shape == (5, 4, channels)
    if mode != "YCbCr":  # a rounded transform
        np.testing.assert_array_equal(array[..., :3], PICTURES[0] // 128 * 255)


def test_a_column_of_natural_clients():
    source = hf.DatasetDict({"train": pictures(PICTURES, user=USERS), "test": pictures(PICTURES)})
    data = from_hugging_face(source, "train", client_column="user")
    assert data.client_ids.tolist() == ["anna", "ben", "cleo"]
    assert set(data.columns) == {"img", "label"}
    for user in data.client_ids:
        own = [index for index, name in enumerate(USERS) if name == user]
        np.testing.assert_array_equal(data.get_client(user)["img"], PICTURES[own])
    numbered = hf.Dataset.from_dict({"x": [1.0, 2.0, 3.0], "user": [10, 9, 10]})
    assert from_hugging_face(numbered, client_column="user").get_client("10")["x"].tolist() == [
        1,
        3,
    ]


def test_values_keep_the_types_that_are_declared():
    features = hf.Features(
        {
            "half": hf.Value("float16"),
            "small": hf.Value("int8"),
            "yes": hf.Value("bool"),
            "text": hf.Value("string"),
            "matrix": hf.Array2D((2, 2), "uint8"),
            "several": hf.Sequence(hf.Value("float32"), length=3),
        }
    )
    rows = {
        "half": [0.5, 1.5],
        "small": [-1, 2],
        "yes": [True, False],
        "text": ["a", "longer"],
        "matrix": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        "several": [[1, 2, 3], [4, 5, 6]],
    }
    # A format that was set before changes nothing.
    dataset = hf.Dataset.from_dict(rows, features=features).with_format("numpy")
    columns = from_hugging_face(dataset)
    types = {name: column.dtype.name for name, column in columns.items() if name != "text"}
    assert types == dict(
        half="float16", small="int8", yes="bool", matrix="uint8", several="float32"
    )
    for name, expected in rows.items():
        assert columns[name].tolist() == expected


def test_many_examples_are_read_in_order():
    columns = from_hugging_face(
        hf.Dataset.from_dict({"x": range(2500), "y": ["a"] * 2499 + ["bc"]})
    )
    np.testing.assert_array_equal(columns["x"], np.arange(2500))
    assert columns["y"][-2:].tolist() == ["a", "bc"]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: pictures([PICTURES[0], GREY[0]]), {}, r"'img' of example 1 has shape \[5, 4, 1\]"),
        (lambda: pictures([PICTURES[0], None]), {}, "feature 'img' of example 1 has no value"),
        (
            lambda: pictures(PICTURES).cast_column("img", hf.Image(decode=False)),
            {},
            "feature 'img' of example 0 must be a decoded image, got dict; cast_column",
        ),
        (
            lambda: pictures(PICTURES),
            {"columns": ["image"]},
            "columns: no feature 'image'; the fea",
        ),
        (lambda: pictures(PICTURES), {"columns": []}, "columns must not be empty"),
        (lambda: pictures(PICTURES), {"client_column": "user"}, "client_column must be one of"),
        (lambda: pictures(PICTURES), {"client_column": "img"}, "'img' must be text or integers"),
        (
            lambda: pictures(PICTURES),
            {"name": "fine"},
            "name must be left out: only a name is load",
        ),
        (
            lambda: hf.DatasetDict(train=pictures(GREY)),
            {},
            r"split must be one of \['train'\], got",
        ),
        (
            lambda: pictures(GREY),
            {"split": "test"},
            "split must be left out for a Dataset, got 'test'",
        ),
        (lambda: pictures(PICTURES).select([]), {}, "source has no examples"),
        (lambda: pictures(PICTURES).to_iterable_dataset(), {}, "is read without streaming=True"),
        (
            lambda: hf.Dataset.from_dict({"x": [[1], [1, 2]]}),
            {},
            "'x' must have examples of one sha",
        ),
        (
            lambda: hf.Dataset.from_dict({"x": [{"a": 1}]}),
            {},
            "feature 'x' must be images, numbers",
        ),
        (
            lambda: hf.Dataset.from_dict({"x": [[True, False], [True, None]]}),
            {},
            "feature 'x' of example 1 has no value",
        ),
        (
            lambda: hf.Dataset.from_dict({"x": [[[1.0], [None]], [[1.0], [2.0]]]}),
            {},
            "feature 'x' of example 0 has no value",
        ),
        (
            lambda: hf.Dataset.from_dict({"x": ["a\0"]}),
            {},
            "feature 'x' must not have text that ends in NUL",
        ),
        (lambda: "cifar10", {}, "split must be given with the name of a data set, 'cifar10'"),
        (lambda: [1, 2], {}, "source must be a name, a datasets.Dataset or"),
    ],
)
def test_what_cannot_be_read_is_one_line(make, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_hugging_face(make(), **arguments)
    assert "\n" not in str(error.value)


def test_a_name_is_loaded(tmp_path):
    pictures(PICTURES, user=USERS).to_parquet(tmp_path / "train.parquet")
    data = from_hugging_face(str(tmp_path), "train", client_column="user", cache_dir=str(tmp_path))
    assert data.num_clients == 3 and data.columns["img"].shape == PICTURES.shape


def test_the_package_is_not_shadowed_by_the_folder_of_this_checkout():
    assert (ROOT / "datasets").is_dir() and str(ROOT) in map(os.path.abspath, sys.path)
    assert (ROOT / "datasets") not in Path(hf.__file__).parents
