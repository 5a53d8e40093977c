"""LEAF's JSON files, in the forms of FEMNIST, Shakespeare and the synthetic data set."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import from_leaf


def leaf(user_data, **differs):
    content = {
        "users": list(user_data),
        "num_samples": [len(examples["y"]) for examples in user_data.values()],
        "user_data": user_data,
    }
    return content | differs


def write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def images(count, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28, 1), np.uint8)
    flat = [[pixel / 255 for pixel in image.ravel().tolist()] for image in pixels]
    return pixels, {"x": flat, "y": list(range(count))}


def test_femnist_in_several_files(tmp_path):
    of_user = {"f2": images(2, 1), "f0": images(3, 2), "f1": images(1, 3)}
    for file, users in (("all_data_0", ["f2", "f0"]), ("all_data_1", ["f1"])):
        content = leaf({user: of_user[user][1] for user in users}, hierarchies=[])
        write(tmp_path / "train" / f"{file}.json", content)
    data = from_leaf(tmp_path / "train", image_shape=(28, 28, 1))
    assert data.client_ids.tolist() == ["f0", "f1", "f2"]
    assert data.columns["label"].dtype == np.int32
    for user, (pixels, examples) in of_user.items():
        np.testing.assert_array_equal(data.get_client(user)["image"], pixels)
        assert data.get_client(user)["label"].tolist() == examples["y"]
    with pytest.raises(ValueError, match=r"choose one of its folders \['train'\]"):
        from_leaf(tmp_path)


def test_pixels_are_rounded(tmp_path):
    table = {"a": {"x": [[0.5, 0.499, 1.0, 0.0]], "y": [1]}}
    data = from_leaf(write(tmp_path / "a.json", leaf(table)), image_shape=(2, 2, 1))
    assert data.columns["image"].ravel().tolist() == [128, 127, 255, 0]


def test_shakespeare(tmp_path):
    content = leaf(
        {
            "HAMLET": {"x": ["to be or", "not to b"], "y": [" ", "e"]},
            "OPHELIA": {"x": ["good my "], "y": ["l"]},
        }
    )
    data = from_leaf(write(tmp_path / "a.json", content))
    assert data.get_client("HAMLET")["x"].tolist() == ["to be or", "not to b"]
    assert data.get_client("HAMLET")["y"].tolist() == [" ", "e"]


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 9))),
    ),
)
def test_synthetic_numbers_come_back(tmp_path_factory, users):
    table = {
        user: {"x": [[first, 0.5] for first, _ in rows], "y": [label for _, label in rows]}
        for user, rows in users.items()
    }
    path = write(tmp_path_factory.mktemp("leaf") / "data.json", leaf(table))
    if not any(users.values()):
        with pytest.raises(ValueError, match="has no examples"):
            from_leaf(path, allow_empty=True)
        return
    data = from_leaf(path, allow_empty=True)
    assert data.client_ids.tolist() == sorted(users)
    for user, examples in table.items():
        client = data.get_client(user)
        assert client["x"].tolist() == examples["x"] and client["y"].tolist() == examples["y"]
    if not all(users.values()):
        with pytest.raises(ValueError, match="has no examples"):
            from_leaf(path)


def test_whole_numbers_of_one_user_are_floats_where_others_have_them(tmp_path):
    table = {"a": {"x": [[1, 2]], "y": [0]}, "b": {"x": [[0.5, 2]], "y": [1]}}
    data = from_leaf(write(tmp_path / "a.json", leaf(table)))
    assert data.columns["x"].dtype == np.float32 and data.columns["y"].dtype == np.int32


USER = {"a": {"x": [[0.1, 0.2]], "y": [1]}}


@pytest.mark.parametrize(
    ("content", "shape", "message"),
    [
        ("{", None, "a.json is not valid JSON"),
        ("[" * 100_000, None, "a.json is not valid JSON"),
        ([1], None, "is not LEAF's: it must have users, num_samples, user_data"),
        ({"users": ["a"]}, None, "is not LEAF's"),
        (leaf(USER, users="a"), None, "users and num_samples must be lists of one length"),
        (leaf(USER, users=["b"]), None, "user_data must have the examples of all users"),
        (leaf(USER, num_samples=[2]), None, "user 'a' has 1 x and 1 y, num_samples says 2"),
        (leaf({"a": {"x": [1, 2], "y": [1]}}), None, "user 'a' has 2 x and 1 y"),
        (leaf({"a": {"x": 3, "y": []}}), None, "user 'a' must have lists x and y"),
        (leaf({"a": {"x": [[1], [1, 2]], "y": [1, 2]}}), None, "x must be examples of one shape"),
        (leaf({"a": {"x": [["b", 1]], "y": [1]}}), None, "x must be all text where some is, got 1"),
        (leaf({"a": {"x": ["b\0"], "y": [1]}}), None, "x must not have text that ends in NUL"),
        (leaf({"a": {"x": [None], "y": [1]}}), None, "x must be numbers or text, got object"),
        (leaf({"a": {"x": [1], "y": [2**40]}}), None, "y must be whole numbers within 32 bits"),
        (leaf(USER), (3, 1, 1), "x must be 3 numbers for image_shape"),
        (leaf({"a": {"x": [[7, 255]], "y": [1]}}), (2, 1, 1), "x must be pixels of 0..1"),
        (leaf({"a": {"x": ["text"], "y": [1]}}), (2, 1, 1), "x must be 2 numbers for image_shape"),
        (leaf(USER), (2, 1), "image_shape must be .height, width, channels."),
        (leaf(USER | {"b": {"x": [[0.1]], "y": [1]}}), None, "client 'b': column 'x' is float32"),
    ],
)
def test_other_files_are_one_line(content, shape, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_leaf(write(tmp_path / "a.json", content), shape)
    assert "\n" not in str(error.value)


def test_a_user_in_two_files(tmp_path):
    write(tmp_path / "a.json", leaf(USER))
    write(tmp_path / "b.json", leaf(USER))
    with pytest.raises(
        ValueError, match=r"b.json: user 'a' is there twice, the first time in .*a.js"
    ):
        from_leaf(tmp_path)
    with pytest.raises(ValueError, match=r"must be a JSON file or a folder that holds some$"):
        from_leaf(tmp_path / "none")
