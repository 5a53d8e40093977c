"""Reading EMNIST's letters, on a small file of the official format, and its preparation program."""

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedcodist.data import load_prepared, manifest
from fedcodist.datasets import emnist
from fedcodist.datasets.emnist import read_emnist_letters

PROGRAM = Path(__file__).parents[2] / "datasets" / "emnist" / "prepare.py"


def made_up(count, seed, **changes):
    """A part of the official file: pixels run down the columns, labels and writers are doubles."""
    draw = np.random.default_rng(seed)
    upright = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    part = {
        "images": upright.transpose(0, 2, 1).reshape(count, 784),
        "labels": draw.integers(1, 27, (count, 1)).astype(np.float64),
        "writers": draw.integers(1, 5, (count, 1)).astype(np.float64),
    }
    return upright, part | changes


UPRIGHT, TRAIN = made_up(40, 0)
TESTS_UPRIGHT, TEST = made_up(9, 1)


def write(path, train=TRAIN, test=TEST):
    mapping = np.stack([np.arange(1, 27), np.arange(65, 91), np.arange(97, 123)], 1)
    dataset = {"train": train, "test": test, "mapping": mapping.astype(np.float64)}
    savemat(path, {"dataset": dataset}, do_compression=True)
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "emnist-letters.mat")


def refused(match, source, **options):
    with pytest.raises(ValueError, match=match) as error:
        read_emnist_letters(source, **options)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_letters_are_upright_and_have_writers(file, tmp_path, monkeypatch, packed):
    monkeypatch.setattr(emnist, "IMAGES_OF_SPLIT", {"train": 40, "test": 9})
    source = file
    if packed:
        source = tmp_path / "matlab.zip"
        with zipfile.ZipFile(source, "w") as archive:
            archive.write(file, "matlab/emnist-letters.mat")
    letters = read_emnist_letters(source)
    assert letters.unverified == () and len(letters.sha256) == 64
    for split, upright, part in (("train", UPRIGHT, TRAIN), ("test", TESTS_UPRIGHT, TEST)):
        columns = letters.splits[split]
        assert (columns["image"].dtype, columns["label"].dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(columns["image"][..., 0], upright)
        np.testing.assert_array_equal(columns["label"], part["labels"][:, 0] - 1)
        np.testing.assert_array_equal(columns["writer"], part["writers"][:, 0])


def test_other_numbers_of_images_are_refused(file):
    refused("train has 40 images, the official file 124800; --accept-unverified", file)
    assert len(read_emnist_letters(file, accept_unverified=True).unverified) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(images=np.zeros((40, 783), np.uint8)), r"'images' must be uint8 \[images, 784\]"),
        (dict(images=np.zeros((40, 784))), "'images' must be uint8"),
        (dict(labels=np.ones((39, 1))), "'labels' must be 40 whole numbers"),
        (dict(labels=np.zeros((40, 1))), r"labels must be in 1\.\.26"),
        (dict(labels=np.full((40, 1), 1.5)), "'labels' must be 40 whole numbers"),
        (dict(writers=np.ones(3)), "'writers' must be 40 whole numbers"),
    ],
)
def test_other_contents_are_one_line(tmp_path, changes, message):
    path = write(tmp_path / "emnist-letters.mat", TRAIN | changes)
    refused(f"is not EMNIST's emnist-letters.mat: .*{message}", path, accept_unverified=True)


def test_files_that_are_damaged_or_something_else(file, tmp_path, monkeypatch):
    refused("does not exist", tmp_path / "nothing.mat")
    content = file.read_bytes()
    for name, damaged in (("short", content[: len(content) // 2]), ("text", b"no matlab file")):
        (tmp_path / f"{name}.mat").write_bytes(damaged)
        refused("is not EMNIST's", tmp_path / f"{name}.mat", accept_unverified=True)
    (tmp_path / "text.zip").write_text("no archive")
    refused("cannot be read", tmp_path / "text.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("emnist-digits.mat", "")
    refused("holds no emnist-letters.mat", tmp_path / "other.zip")
    savemat(tmp_path / "else.mat", {"other": np.ones(3)})
    refused("is not EMNIST's", tmp_path / "else.mat", accept_unverified=True)
    monkeypatch.setattr(emnist, "_LARGEST_FILE", 1000)
    refused("more than 1,000 bytes", file)


def test_a_file_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    savemat(tmp_path / "bomb.mat", {"dataset": np.zeros(1 << 21)}, do_compression=True)
    monkeypatch.setattr(emnist, "_LARGEST_FILE", 1 << 20)
    refused("unpacks to more than 1,048,576 bytes", tmp_path / "bomb.mat", accept_unverified=True)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_damaged_archives_are_one_line(file, tmp_path, method):
    source = tmp_path / "matlab.zip"
    with zipfile.ZipFile(source, "w", method) as archive:
        archive.write(file, "emnist-letters.mat")
    content = bytearray(source.read_bytes())
    for place in range(60, len(content), 997):
        source.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"matlab\.zip") as error:
            read_emnist_letters(source)
        assert len(str(error.value).splitlines()) == 1


def test_the_program_makes_a_client_of_each_writer(file, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("prepare_emnist", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    arguments = ["--source", str(file), "--output", str(tmp_path / "out")]
    assert program.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert program.main([*arguments, "--accept-unverified"]) == 0
    assert "UNVERIFIED: train has 40 images" in capsys.readouterr().out
    assert manifest(tmp_path / "out")["arguments"]["unverified"]
    splits = load_prepared(tmp_path / "out")
    assert splits["test"].num_examples == 9
    writers = TRAIN["writers"][:, 0].astype(int)
    found = list(splits["train"].clients())
    assert [client for client, _ in found] == [str(w) for w in np.unique(writers)]
    for client, columns in found:
        rows = writers == int(client)
        np.testing.assert_array_equal(columns["image"][..., 0], UPRIGHT[rows])
        np.testing.assert_array_equal(columns["label"], TRAIN["labels"][rows, 0] - 1)
