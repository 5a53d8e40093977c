"""Reading official CIFAR files, on made-up ones of the same layout and on the real ones."""

import gzip
import hashlib
import io
import os
import pickle
import pickletools
import struct
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.datasets import cifar, image_pickles
from fedcodist.datasets.cifar import CIFAR10, CIFAR100, read_cifar

# Made-up files


def made_up_table(num_images, seed, names=b"image"):
    """What an official CIFAR-100 file holds, with a tree of 100 fine and 20 coarse labels."""
    rng = np.random.default_rng(seed)
    fine = rng.permutation(np.arange(num_images) % 100)
    return {
        b"filenames": [b"%s_%06d.png" % (names, row) for row in range(num_images)],
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": fine.tolist(),
        b"coarse_labels": (fine // 5).tolist(),
        b"data": rng.integers(0, 256, (num_images, 3072), dtype=np.uint8),
    }


def python2_pickle(value):
    """A pickle as the official files are: Python 2's cPickle, protocol 2, NumPy's old module."""
    return b"\x80\x02" + encoded(value) + b"."


def encoded(value):
    if isinstance(value, dict):
        items = b"".join(encoded(item) for pair in value.items() for item in pair)
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(encoded, value)) + b"e"
    if isinstance(value, bytes):
        short = len(value) < 256
        return (
            b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        ) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    height, width = value.shape
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01"
        + b"J%sJ%s\x86" % (struct.pack("<i", height), struct.pack("<i", width))
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        + b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89"
        + encoded(value.tobytes())
        + b"tb"
    )


def tar_gz(files):
    """A .tar.gz of name -> bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def as_archive(files, folder="cifar-100-python"):
    return tar_gz({f"{folder}/{name}": content for name, content in files.items()})


def write_folder(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def official_like(cifar, files):
    """The format with the checksums of these made-up files in place of the official ones."""
    return cifar._replace(
        md5s={name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    )


TRAIN, TEST = made_up_table(20, seed=1), made_up_table(10, seed=2)
META = python2_pickle({b"fine_label_names": [b"apple"], b"coarse_label_names": [b"fish"]})
FILES = {"train": python2_pickle(TRAIN), "test": python2_pickle(TEST), "meta": META}
FORMAT = official_like(CIFAR100, FILES)


def assert_holds(columns, table):
    assert columns["image"].dtype == np.uint8 and columns["image"].shape[1:] == (32, 32, 3)
    assert columns["label"].dtype == columns["coarse_label"].dtype == np.int32
    assert columns["label"].tolist() == table[b"fine_labels"]
    assert columns["coarse_label"].tolist() == table[b"coarse_labels"]
    assert len(columns["image"]) == len(table[b"data"])
    for image, planes in zip(columns["image"], table[b"data"], strict=True):
        for channel in range(3):
            plane = planes[1024 * channel : 1024 * (channel + 1)]
            np.testing.assert_array_equal(image[:, :, channel].ravel(), plane)


def refused(match, source, cifar=FORMAT, accept_unverified=False):
    with pytest.raises(ValueError, match=match) as error:
        read_cifar(cifar, source, accept_unverified)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def reads(tmp_path, train):
    """Reads a folder whose `train` is these bytes."""
    folder = tmp_path / "cifar-100-python"
    if not folder.exists():
        write_folder(folder, FILES)
    (folder / "train").write_bytes(train)
    return read_cifar(CIFAR100, folder, accept_unverified=True).splits["train"]


# What they hold


def test_the_made_up_pickle_is_what_plain_unpickling_reads():
    table = pickle.loads(FILES["train"], encoding="bytes")
    np.testing.assert_array_equal(table.pop(b"data"), TRAIN[b"data"])
    assert table == {key: value for key, value in TRAIN.items() if key != b"data"}


def test_archive_folder_and_parent_hold_the_same(tmp_path):
    folder = write_folder(tmp_path / "data" / "cifar-100-python", FILES)
    archive = tmp_path / "cifar-100-python.tar.gz"
    archive.write_bytes(as_archive(FILES))
    cifar = FORMAT._replace(archive_md5=hashlib.md5(archive.read_bytes()).hexdigest())
    for source in (folder, folder.parent, archive, str(archive)):
        files = read_cifar(cifar, source)
        assert files.unverified == ()
        assert files.md5s == cifar.md5s
        assert_holds(files.splits["train"], TRAIN)
        assert_holds(files.splits["test"], TEST)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_files_written_anew_by_python_3(tmp_path, protocol, order):
    table = {**TRAIN, b"data": np.asarray(TRAIN[b"data"], order=order)}
    assert_holds(reads(tmp_path, pickle.dumps(table, protocol)), TRAIN)
    text_keys = {key.decode(): value for key, value in table.items()}
    assert_holds(reads(tmp_path, pickle.dumps(text_keys, protocol)), TRAIN)


def test_cifar10_batches_in_order(tmp_path):
    tables = [{b"data": t[b"data"], b"labels": [row % 10 for row in t[b"fine_labels"]]} for t in
              (made_up_table(5, seed) for seed in range(6))]  # fmt: skip
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {name: python2_pickle(t) for name, t in zip(names, tables, strict=True)}
    folder = write_folder(tmp_path / "cifar-10-batches-py", files)
    cifar = official_like(CIFAR10, files)
    splits = read_cifar(cifar, folder).splits
    assert splits["train"]["label"].tolist() == [x for t in tables[:5] for x in t[b"labels"]]
    assert list(splits["train"]) == ["image", "label"]
    np.testing.assert_array_equal(splits["train"]["image"][13, :, :, 1].ravel(),
                                  tables[2][b"data"][3, 1024:2048])  # fmt: skip
    np.testing.assert_array_equal(splits["test"]["image"][4, :, :, 2].ravel(),
                                  tables[5][b"data"][4, 2048:])  # fmt: skip

    (folder / "data_batch_2").unlink()
    refused("data_batch_2 is missing; --accept-unverified", folder, cifar)
    files = read_cifar(cifar, folder, accept_unverified=True)
    assert files.unverified == ("data_batch_2 is missing",)
    assert len(files.splits["train"]["image"]) == 20
    (folder / "test_batch").unlink()
    refused("test_batch is missing", folder, cifar, accept_unverified=True)


# Checksums


def test_another_file_is_refused_with_both_checksums(tmp_path):
    folder = write_folder(tmp_path / "cifar-100-python", FILES)
    train = bytearray(FILES["train"])
    train[-1000] ^= 1  # inside the pixels: everything else stays sound
    (folder / "train").write_bytes(train)
    found = hashlib.md5(train).hexdigest()
    line = f"train has md5 {found}, the official file {FORMAT.md5s['train']}"
    assert line in refused("--accept-unverified", folder)
    files = read_cifar(FORMAT, folder, accept_unverified=True)
    assert files.unverified == (line,)
    changed = files.splits["train"]["image"] != read_image(TRAIN)
    assert changed.sum() == 1


def read_image(table):
    return table[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def test_another_archive_is_refused_with_both_checksums(tmp_path):
    archive = tmp_path / "mine.tar.gz"
    archive.write_bytes(as_archive(FILES))
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    message = refused("--accept-unverified", archive)
    assert str(archive) in message and found in message and FORMAT.archive_md5 in message
    # An archive that is packed again still holds the official files.
    assert read_cifar(FORMAT, archive, accept_unverified=True).unverified == ()


# Hostile and damaged files


class Hostile:
    def __init__(self, call, *arguments):
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [os.mkdir, eval, exec, np.save, getattr, bytearray, np.zeros])
def test_a_pickle_cannot_call_anything(tmp_path, monkeypatch, call, protocol):
    monkeypatch.chdir(tmp_path)
    argument = "__import__('os').mkdir('harm')" if call in (eval, exec) else "harm"
    arguments = (argument, 1) if call in (np.save, getattr) else (argument,)
    hostile = Hostile(call, *arguments) if call is not np.zeros else Hostile(call, 3)
    with pytest.raises(ValueError, match=r"train is not a CIFAR-100 file: .* refused") as error:
        reads(tmp_path, pickle.dumps({**TRAIN, b"filenames": hostile}, protocol))
    assert len(str(error.value).splitlines()) == 1
    assert not list(tmp_path.glob("harm*"))


@pytest.mark.parametrize(
    "store",
    [b"r\xff\xff\xff\xff", b"p4000000000\n", b"q\xff"],
    ids=["LONG_BINPUT", "PUT", "BINPUT"],
)
def test_a_pickle_cannot_ask_for_gigabytes(tmp_path, store):
    with pytest.raises(ValueError, match="it stores object"):
        reads(tmp_path, b"\x80\x02}" + store + b".")


def shared(kind, depth=60):
    """Two to the power of `depth` objects in a few hundred bytes."""
    value = kind([b"x"])
    for _ in range(depth):
        value = kind([value, value])
    return value


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("place", ["value", "shape"])
def test_a_pickle_of_shared_objects_ends(tmp_path, place, kind, protocol):
    class Array:
        def __reduce__(self):
            state = (1, shared(kind), np.dtype("u1"), False, b"")
            return (*np.zeros(0).__reduce__()[:2], state)

    content = pickle.dumps(
        {**TRAIN, b"data": Array() if place == "shape" else shared(kind)}, protocol
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match="train is not a CIFAR-100 file: ") as error:
        reads(tmp_path, content)
    assert time.monotonic() - start < 10 and len(str(error.value)) < 500


def test_the_hash_of_shared_tuples_is_not_taken(tmp_path):
    doubled = b"".join(b"q%ch%c\x86" % (index, index) for index in range(60))  # memo, again, a pair
    with pytest.raises(ValueError, match="it has a tuple of more than 1000 objects"):
        reads(tmp_path, b"\x80\x02})" + doubled + b"K\x01s.")


def test_a_pickle_that_repeats_what_lies_on_the_stack_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it has an object twice"):
        reads(tmp_path, b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.")


def test_a_pickle_cannot_write_into_what_reads_it(tmp_path):
    before = [dict(vars(value)) for value in image_pickles._ALLOWED.values()]
    assert all(isinstance(value, type) for value in image_pickles._ALLOWED.values())
    for module, name in image_pickles._ALLOWED:
        content = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"}U\x04evilK\x01sb."
        with pytest.raises(ValueError, match="train is not a CIFAR-100 file"):
            reads(tmp_path, content)
    assert [dict(vars(value)) for value in image_pickles._ALLOWED.values()] == before


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "_LARGEST_ARCHIVE", 1 << 20)
    for name, content in (
        ("behind.tar.gz", gzip.decompress(as_archive(FILES)) + bytes(1 << 21)),
        ("within.tar.gz", gzip.decompress(as_archive({"other": bytes(1 << 21), **FILES}))),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes"):
            read_cifar(FORMAT, tmp_path / name, accept_unverified=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1], "not a dictionary"),
        ({**TRAIN, 3: 4}, "it has a key that is no text"),
        ({}, "no array 'data'"),
        ({**TRAIN, b"data": [1, 2]}, "no array 'data'"),
        ({**TRAIN, b"data": TRAIN[b"data"].astype(np.float32)}, "'data' must be uint8"),
        ({**TRAIN, b"data": TRAIN[b"data"][:, :3071]}, r"\[images, 3072\], it is \(20, 3071\)"),
        ({**TRAIN, b"data": TRAIN[b"data"][:0]}, r"it is \(0, 3072\)"),
        ({**TRAIN, b"data": TRAIN[b"data"].ravel()}, r"it is \(61440,\)"),
        ({**TRAIN, b"fine_labels": TRAIN[b"fine_labels"][:-1]}, "19 fine_labels for 20 images"),
        ({**TRAIN, b"fine_labels": [100] * 20}, r"fine_labels must be in 0\.\.99"),
        ({**TRAIN, b"coarse_labels": [-1] * 20}, r"coarse_labels must be in 0\.\.19"),
        ({**TRAIN, b"fine_labels": [1.0] * 20}, "no list of integers 'fine_labels'"),
        ({**TRAIN, b"coarse_labels": None}, "no list of integers 'coarse_labels'"),
    ],
)
def test_files_of_another_content(tmp_path, table, message):
    with pytest.raises(ValueError, match=f"train is not a CIFAR-100 file: .*{message}"):
        reads(tmp_path, pickle.dumps(table, 2))


@settings(max_examples=200)
@given(st.data())
def test_damage_is_one_line_or_sound_columns(tmp_path_factory, data):
    """Bytes outside the pixels are damaged; a file that can still be read has the right form."""
    content = bytearray(FILES["train"])
    start = content.index(TRAIN[b"data"].tobytes())
    places = [*range(start), *range(start + TRAIN[b"data"].nbytes, len(content))]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.sampled_from(places))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    try:
        columns = reads(tmp_path_factory.getbasetemp() / "damaged", bytes(content))
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
        assert "train is not a CIFAR-100 file" in str(error)
    else:
        assert columns["image"].shape[1:] == (32, 32, 3) and columns["image"].dtype == np.uint8
        assert len(columns["label"]) == len(columns["coarse_label"]) == len(columns["image"])
        assert columns["label"].min() >= 0 and columns["label"].max() < 100


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.9, -1])
def test_truncated_archives(tmp_path, kept):
    archive = tmp_path / "cifar-100-python.tar.gz"
    content = as_archive(FILES)
    archive.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else kept])
    refused(r"cifar-100-python\.tar\.gz", archive, accept_unverified=True)


def test_a_damaged_archive_is_found_without_its_md5(tmp_path):
    archive = tmp_path / "cifar-100-python.tar.gz"
    files = {**FILES, "train": FILES["train"].replace(b"image_000003", b"image_000004")}
    content, other = as_archive(FILES), as_archive(files)
    # One archive's files with the other's gzip checksum, as after a flipped bit.
    archive.write_bytes(other[:-8] + content[-8:])
    refused("CRC check failed", archive, accept_unverified=True)


def test_archives_that_are_none(tmp_path):
    archive = tmp_path / "cifar.tar.gz"
    for content, message in (
        (b"not an archive", r"cannot be read as a \.tar\.gz archive"),
        (gzip.compress(b"not an archive"), r"cannot be read as a \.tar\.gz archive"),
        (tar_gz({}), "holds no cifar-100-python/ with train, test, meta"),
        (tar_gz({"other/train": b""}), "holds no cifar-100-python/"),
        (as_archive(FILES, "a/cifar-100-python"), "holds no cifar-100-python/"),
        (as_archive({"train": FILES["train"]}), "test is missing"),
    ):
        archive.write_bytes(content)
        refused(message, archive, accept_unverified=True)


@pytest.mark.parametrize("name", ["../train", "/tmp/train", "cifar-100-python/../../train"])
def test_archives_that_lead_elsewhere(tmp_path, name):
    archive = tmp_path / "inner" / "cifar.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(tar_gz({name: b"harm", "cifar-100-python/train": FILES["train"]}))
    refused("a path out of its folder", archive, accept_unverified=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", "cifar.tar.gz"]


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("cifar-100-python/train")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(buffer.getvalue())
    refused("cifar-100-python/train is not a file of at most", path, accept_unverified=True)


def test_sources_that_are_not_there(tmp_path):
    refused("does not exist", tmp_path / "nothing")
    refused("holds neither cifar-100-python/ nor its files train, test, meta", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refused("must be a file", tmp_path / "pipe")


# The real files


@pytest.fixture
def real():
    folder = os.environ.get("FEDCODIST_DATA")
    if not folder or not (Path(folder) / "cifar-100-python").is_dir():
        pytest.skip("needs the official CIFAR-100 in the folder that FEDCODIST_DATA names")
    return Path(folder) / "cifar-100-python"


def test_official_cifar100(real):
    files = read_cifar(CIFAR100, real)
    assert files.unverified == ()
    for split, per_label in (("train", 500), ("test", 100)):
        columns = files.splits[split]
        assert np.bincount(columns["label"]).tolist() == [per_label] * 100
        assert np.bincount(columns["coarse_label"]).tolist() == [5 * per_label] * 20
    with open(real / "test", "rb") as file:
        assert_holds(files.splits["test"], pickle.load(file, encoding="bytes"))


def test_the_made_up_files_are_built_like_the_official_ones(real):
    official = (real / "test").read_bytes()
    # Memo writes aside, and numbers and text that only a larger or a smaller file has.
    assert opcodes(FILES["test"]) <= opcodes(official)
    assert globals_of(FILES["test"]) == globals_of(official)


def opcodes(content):
    return {opcode.name for opcode, _, _ in pickletools.genops(content)}


def globals_of(content):
    return [a for opcode, a, _ in pickletools.genops(content) if opcode.name == "GLOBAL"]
