"""Reading ImageNet 32x32, on small files of the official layouts, and its preparation program."""

import hashlib
import importlib.util
import io
import pickle
import re
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import load_prepared, manifest
from fedcodist.datasets import imagenet32
from fedcodist.datasets.imagenet32 import open_batches, read_batches

PROGRAM = Path(__file__).parents[2] / "datasets" / "imagenet32" / "prepare.py"


def made_up(number):
    """A batch: 3 to 12 images, labels from 1."""
    draw = np.random.default_rng(number)
    count = 2 + number
    return {
        "data": draw.integers(0, 256, (count, 3072), dtype=np.uint8),
        "labels": draw.integers(1, 1001, count).tolist(),
        "mean": draw.normal(size=3072),
    }


TABLES = {f"train_data_batch_{number}": made_up(number) for number in range(1, 11)}


def as_npz(table):
    stream = io.BytesIO()
    np.savez(stream, **{name: np.asarray(value) for name, value in table.items()})
    return stream.getvalue()


FILES = {
    "pickle": {name: pickle.dumps(table, 2) for name, table in TABLES.items()},
    "npz": {f"{name}.npz": as_npz(table) for name, table in TABLES.items()},
}


def md5s(files):
    return {name: hashlib.md5(content).hexdigest() for name, content in files.items()}


def write(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def zipped(path, files, inside="Imagenet32_train/"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(inside + name, content)
    return path


def refused(match, source, **options):
    with pytest.raises(ValueError, match=match) as error:
        read_batches(open_batches(source, **options))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("packed", ["folder", "parent", "zip"])
def test_all_layouts_hold_the_same_images(tmp_path, kind, packed):
    files = FILES[kind]
    inside = "Imagenet32_train_npz" if kind == "npz" else "Imagenet32_train"
    if packed == "zip":
        source = zipped(tmp_path / "any.zip", files, f"{inside}/")
    else:
        folder = write(tmp_path / inside, files)
        source = folder if packed == "folder" else tmp_path
    batches = open_batches(source, known=md5s(files))
    assert (batches.unverified, dict(batches.md5s)) == ((), md5s(files))
    columns = read_batches(batches)
    labels = [label - 1 for table in TABLES.values() for label in table["labels"]]
    assert columns["label"].tolist() == labels and columns["label"].dtype == np.int32
    rows = np.concatenate([table["data"] for table in TABLES.values()])
    assert columns["image"].shape == (len(rows), 32, 32, 3)
    for channel in range(3):
        planes = columns["image"][..., channel].reshape(len(rows), -1)
        np.testing.assert_array_equal(planes, rows[:, 1024 * channel : 1024 * (channel + 1)])


def test_ten_batches_come_in_the_order_of_their_numbers():
    assert list(open_batches_of("npz").read)[-1] == "train_data_batch_10.npz"
    assert imagenet32.NUM_IMAGES == 9 * 128_116 + imagenet32.LARGEST_BATCH


def open_batches_of(kind):
    """Without a folder: the batches themselves."""
    read = {name: (lambda content=content: content) for name, content in FILES[kind].items()}
    return imagenet32.Batches(Path("made up"), read, {}, ())


@settings(max_examples=20)
@given(st.integers(10, 30), st.integers(0, 5))
def test_some_images_are_drawn_equally_from_all_batches(count, seed):
    batches, everything = open_batches_of("npz"), read_batches(open_batches_of("npz"))
    columns = read_batches(batches, images=count, seed=seed)
    place = {image.tobytes(): row for row, image in enumerate(everything["image"])}
    rows = [place[image.tobytes()] for image in columns["image"]]
    assert len(rows) == count and rows == sorted(set(rows))
    assert columns["label"].tolist() == everything["label"][rows].tolist()
    ends = np.cumsum([len(table["labels"]) for table in TABLES.values()])
    shares = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=10)
    assert shares.max() - shares.min() <= 1
    again = read_batches(batches, images=count, seed=seed)
    np.testing.assert_array_equal(again["image"], columns["image"])


def test_too_many_or_too_few_images_are_refused():
    with pytest.raises(ValueError, match="takes 4 of train_data_batch_1, which has 3"):
        read_batches(open_batches_of("pickle"), images=40)
    with pytest.raises(ValueError, match="--images must be at least 10, one of each batch, got 9"):
        read_batches(open_batches_of("pickle"), images=9)


def test_other_files_are_refused_with_both_checksums(tmp_path):
    folder = write(tmp_path / "files", FILES["pickle"])
    first = hashlib.md5(FILES["pickle"]["train_data_batch_1"]).hexdigest()
    line = f"train_data_batch_1 has md5 {first}, the official file {imagenet32.PICKLE_MD5S[0]}"
    assert line in refused("--accept-unverified", folder)
    assert open_batches(folder, accept_unverified=True).unverified[0] == line
    (folder / "train_data_batch_3").unlink()
    known = md5s(FILES["pickle"])
    refused("train_data_batch_3 is missing", folder, known=known)
    batches = open_batches(folder, accept_unverified=True, known=known)
    assert batches.unverified == ("train_data_batch_3 is missing",)
    assert len(read_batches(batches)["label"]) == sum(range(3, 13)) - 5


class Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


GOOD = TABLES["train_data_batch_1"]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "no array 'data'|'data' must be uint8|allow_pickle"),
        ({"data": GOOD["data"].astype(np.int32)}, "'data' must be uint8"),
        ({"data": GOOD["data"][:, :3071]}, r"\[images, 3072\], it is .*\(3, 3071\)"),
        ({"data": GOOD["data"].reshape(3, 32, 32, 3)}, r"\[images, 3072\], it is"),
        ({"data": GOOD["data"][:0]}, r"it is .*\(0, 3072\)"),
        ({"labels": [1, 2]}, r"2 labels for 3 images|integers \[3\], they are int64 \(2,\)"),
        ({"labels": [0, 1, 2]}, r"labels must be in 1\.\.1000"),
        ({"labels": [1, 1001, 2]}, r"labels must be in 1\.\.1000"),
        ({"labels": [1.5, 2.0, 3.0]}, "no list of integers|must be integers"),
        ({"labels": None}, "no list of integers 'labels'|must be integers|allow_pickle"),
        ({"labels": Harm()}, "refused|allow_pickle"),
    ],
)
def test_files_of_another_content(tmp_path, monkeypatch, kind, change, message):
    monkeypatch.chdir(tmp_path)
    table = {**GOOD, **change}
    content = pickle.dumps(table, 2) if kind == "pickle" else as_npz(table)
    files = {**FILES[kind], next(iter(FILES[kind])): content}
    line = refused(message, write(tmp_path / "files", files), accept_unverified=True)
    assert "train_data_batch_1" in line and "is not a batch of ImageNet 32x32" in line
    assert not (tmp_path / "harm").exists()


def test_arrays_that_a_file_lacks(tmp_path):
    files = {**FILES["npz"], "train_data_batch_2.npz": as_npz({"data": GOOD["data"]})}
    refused("it has no array 'labels'", write(tmp_path / "f", files), accept_unverified=True)


def test_batches_larger_than_any(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet32, "LARGEST_BATCH", 11)
    folder = write(tmp_path / "f", FILES["npz"])
    refused("train_data_batch_10.npz has 12 images, more than 11", folder, accept_unverified=True)


@settings(max_examples=100)
@given(st.data())
def test_damaged_npz_is_one_line_or_sound_columns(data):
    name, content = "train_data_batch_1.npz", bytearray(FILES["npz"]["train_data_batch_1.npz"])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    batches = imagenet32.Batches(Path("made up"), {name: lambda: bytes(content)}, {}, ())
    try:
        columns = read_batches(batches)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and name in str(error)
    else:
        np.testing.assert_array_equal(columns["label"] + 1, GOOD["labels"])
        assert columns["image"].shape == (3, 32, 32, 3)


def test_an_archive_cannot_ask_for_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet32, "_LARGEST_FILE", 1000)
    source = zipped(tmp_path / "a.zip", FILES["pickle"])
    refused("train_data_batch_1 has more than 1,000 bytes", source, accept_unverified=True)
    refused("holds no train_data_batch_1", write(tmp_path / "f", FILES["npz"]))
    monkeypatch.setattr(imagenet32, "_LARGEST_FILE", 1 << 29)
    # A header that declares an array that the file does not hold.
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999, 3072), }\n"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
        archive.writestr("data.npy", head + b"x" * 100)
        archive.writestr("labels.npy", head)
    files = {**FILES["npz"], "train_data_batch_1.npz": stream.getvalue()}
    refused("is not a batch", write(tmp_path / "g", files), accept_unverified=True)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_archives_of_other_methods_are_one_line(tmp_path, method):
    source = tmp_path / "a.zip"
    with zipfile.ZipFile(source, "w", method) as archive:
        archive.writestr("train_data_batch_1", FILES["pickle"]["train_data_batch_1"])
    content = source.read_bytes()
    source.write_bytes(content[:60] + bytes([content[60] ^ 255, content[61] ^ 255]) + content[62:])
    refused("train_data_batch_1", source, accept_unverified=True)


def test_sources_that_are_not_archives(tmp_path):
    refused("does not exist", tmp_path / "nothing.zip")
    refused("holds no train_data_batch_1 to train_data_batch_10, or as .npz", tmp_path)
    (tmp_path / "text.zip").write_text("no archive")
    refused(r"cannot be read as a \.zip archive", tmp_path / "text.zip")
    whole = zipped(tmp_path / "whole.zip", FILES["pickle"]).read_bytes()
    (tmp_path / "short.zip").write_bytes(whole[:-1000])
    refused(r"cannot be read as a \.zip archive", tmp_path / "short.zip")
    place = whole.index(b"train_data_batch_5") + 500
    damaged = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
    (tmp_path / "damaged.zip").write_bytes(damaged)
    refused("train_data_batch_5", tmp_path / "damaged.zip", accept_unverified=True)


@pytest.fixture
def prepare(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("prepare_imagenet32", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def run(*arguments):
        status = program.main([*arguments, "--output", str(tmp_path / "out")])
        return status, capsys.readouterr()

    return run


def test_the_program_writes_what_configs_read(prepare, tmp_path):
    source = str(zipped(tmp_path / "Imagenet32_train.zip", FILES["pickle"]))
    status, printed = prepare("--source", source)
    assert status == 2 and printed.err.count("\n") == 1 and "has md5" in printed.err
    status, printed = prepare("--source", source, "--accept-unverified", "--images", "20")
    assert status == 0 and "UNVERIFIED" in printed.out
    train = load_prepared(tmp_path / "out")["train"]
    assert train.num_examples == 20 and train.columns["image"].shape == (20, 32, 32, 3)
    recorded = manifest(tmp_path / "out")["arguments"]
    assert recorded["unverified"] and recorded["images"] == 20 and len(recorded["md5"]) == 10
    status, printed = prepare("--source", source, "--accept-unverified", "--images", "20")
    assert status == 0 and "nothing is left to do" in printed.out
    status, printed = prepare("--source", source, "--accept-unverified", "--seed", "-1")
    assert status == 2 and "--seed must not be negative" in printed.err
    for images in ("9", "1281161"):
        status, printed = prepare("--source", source, "--images", images)
        assert status == 2 and "--images must be between 10 and 1,281,160" in printed.err


def test_the_card_has_the_checksums():
    card = (PROGRAM.parent / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w{32})` \| `(\w{32})` \|$", card, re.MULTILINE)
    expected = zip(imagenet32.PICKLE_MD5S, imagenet32.NPZ_MD5S, strict=True)
    assert [(int(n), a, b) for n, a, b in rows] == [
        (number, *both) for number, both in enumerate(expected, start=1)
    ]
