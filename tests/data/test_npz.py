import numpy as np
import pytest

from fedcodist.data import from_npz

IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


def archive(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_arrays_become_columns(tmp_path):
    path = archive(tmp_path / "a.npz", x_train=IMAGES, y_train=np.arange(4), x_test=IMAGES[:1])
    columns = from_npz(path, {"image": "x_train", "label": "y_train"})
    np.testing.assert_array_equal(columns["image"], IMAGES)
    assert columns["image"].dtype == np.uint8 and columns["label"].tolist() == [0, 1, 2, 3]
    assert set(from_npz(path, ["x_train", "y_train"])) == {"x_train", "y_train"}
    np.savez_compressed(tmp_path / "b.npz", image=IMAGES)
    assert list(from_npz(tmp_path / "b.npz")) == ["image"]


def test_other_files_are_one_line(tmp_path):
    path = archive(tmp_path / "a.npz", x=IMAGES, y=np.arange(3), name=np.array("text"))
    objects = archive(tmp_path / "o.npz", data=np.array({"x": 1}, object))
    np.save(tmp_path / "single.npy", IMAGES)
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "nothing").write_bytes(b"")
    whole = path.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "changed").write_bytes(whole.replace(bytes(range(12)), bytes(12)))
    for file, columns, message in (
        (path, ["x", "y"], "columns must have equal numbers of examples, got {'x': 4, 'y': 3}"),
        (path, ["z"], "columns: no array 'z'; the arrays are"),
        (path, [], "columns must not be empty"),
        (path, ["name"], "array 'name' must be"),
        (objects, None, "array 'data' holds Python objects"),
        (tmp_path / "single.npy", None, "it is a single array, no archive"),
        (tmp_path / "text", None, "it is not a NumPy archive"),
        (tmp_path / "nothing", None, "No data left in file"),
        (tmp_path / "cut", None, "File is not a zip file"),
        (tmp_path / "changed", ["x"], "Bad CRC-32"),
        (tmp_path / "none", None, "cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            from_npz(file, columns)
        assert str(file) in str(error.value) and "\n" not in str(error.value)
