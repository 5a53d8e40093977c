"""Reading MNIST, on small files of the official format and on the real ones, and its program."""

import gzip
import hashlib
import importlib.util
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.data import load_prepared, manifest
from fedcodist.datasets import mnist
from fedcodist.datasets.mnist import idx_array, read_mnist

PROGRAM = Path(__file__).parents[2] / "datasets" / "mnist" / "prepare.py"
DRAW = np.random.default_rng(0)
ARRAYS = {
    "train-images-idx3-ubyte": DRAW.integers(0, 256, (7, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": DRAW.integers(0, 10, 7, dtype=np.uint8),
    "t10k-images-idx3-ubyte": DRAW.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": DRAW.integers(0, 10, 3, dtype=np.uint8),
}


def idx(array):
    """By the format's description: two zeros, the type, the dimensions, their lengths, the values."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


FILES = {name: idx(array) for name, array in ARRAYS.items()}


@pytest.fixture
def folder(tmp_path):
    """Two files packed, two not."""
    (tmp_path / "mnist").mkdir()
    for name, content in FILES.items():
        if "images" in name:
            (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / "mnist" / name).write_bytes(content)
    return tmp_path / "mnist"


def refused(match, source, **options):
    with pytest.raises(ValueError, match=match) as error:
        read_mnist(source, **options)
    assert len(str(error.value).splitlines()) == 1


def test_packed_and_unpacked_files(folder, monkeypatch):
    md5s = {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(mnist, "MD5S", md5s)
    files = read_mnist(folder)
    assert (files.unverified, files.md5s) == ((), md5s)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        columns = files.splits[split]
        image, label = columns["image"], columns["label"]
        assert (image.dtype, label.dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(image[..., 0], ARRAYS[f"{prefix}-images-idx3-ubyte"])
        np.testing.assert_array_equal(label, ARRAYS[f"{prefix}-labels-idx1-ubyte"])


def test_other_files_are_refused(folder):
    refused("train-images-idx3-ubyte has md5 .*, the official file 6bbc.*--accept-unv", folder)
    assert len(read_mnist(folder, accept_unverified=True).unverified) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-labels-idx1-ubyte", None, "has no train-labels-idx1-ubyte, nor"),
        ("train-labels-idx1-ubyte", b"", "not an idx file of 1-dimensional"),
        ("train-labels-idx1-ubyte", idx(np.zeros((7, 1), np.uint8)), "not an idx file of 1-d"),
        ("train-labels-idx1-ubyte", FILES["train-labels-idx1-ubyte"][:-1], "6 values, .* says 7"),
        ("train-labels-idx1-ubyte", idx(np.zeros(8, np.uint8)), r"labels must be 7 numbers in 0"),
        ("train-labels-idx1-ubyte", idx(np.full(7, 10, np.uint8)), r"numbers in 0\.\.9"),
        ("train-images-idx3-ubyte", idx(np.zeros((7, 28, 27), np.uint8)), r"images, 28, 28\]"),
        ("train-images-idx3-ubyte.gz", b"no gzip", "train-images-idx3-ubyte cannot be read"),
    ],
)
def test_damaged_files_are_one_line(folder, name, content, message):
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    refused(message, folder, accept_unverified=True)


def test_sources_that_are_no_folder_or_too_large(folder, tmp_path, monkeypatch):
    refused("is not a folder", tmp_path / "nothing")
    monkeypatch.setattr(mnist, "_LARGEST_FILE", 1000)
    refused("train-images-idx3-ubyte has more than 1,000 bytes", folder)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_array_or_one_line(content):
    try:
        found = idx_array(content, 1)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert idx(found) == content


def program():
    spec = importlib.util.spec_from_file_location("prepare_mnist", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_writes_what_configs_read(folder, tmp_path, capsys):
    arguments = ["--source", str(folder), "--output", str(tmp_path / "out")]
    assert program().main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for done in ("prepared", "nothing is left to do"):
        assert program().main([*arguments, "--accept-unverified"]) == 0
        printed = capsys.readouterr().out
        assert done in printed and "UNVERIFIED" in printed
    splits = load_prepared(tmp_path / "out")
    assert {name: data.num_examples for name, data in splits.items()} == {"train": 7, "test": 3}
    assert manifest(tmp_path / "out")["arguments"]["unverified"]


def test_the_card_has_the_checksums():
    card = (PROGRAM.parent / "README.md").read_text()
    assert dict(re.findall(r"^\| `(\S+)` \| `(\w{32})` \|$", card, re.MULTILINE)) == mnist.MD5S


def test_the_official_files():
    source = Path(os.environ.get("FEDCODIST_DATA", "nowhere")) / "mnist"
    if not source.is_dir():
        pytest.skip("needs MNIST's files in the folder `mnist` of what FEDCODIST_DATA names")
    files = read_mnist(source)
    for split, count in (("train", 60_000), ("test", 10_000)):
        assert files.splits[split]["image"].shape == (count, 28, 28, 1)
    assert files.splits["train"]["label"][:5].tolist() == [5, 0, 4, 1, 9]
