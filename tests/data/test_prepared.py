import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedcodist.data import (
    FederatedData,
    PreparedDataError,
    load_prepared,
    manifest,
    prepared,
    save_prepared,
)

ABOUT = {"source": "made up", "licence": "CC0-1.0", "arguments": {"seed": 3, "sizes": (1, 2)}}


def make_splits():
    train = FederatedData.from_arrays(
        {
            "image": np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2),
            "label": np.array([0, 1, 2, 0, 1, 2], np.int32),
            "text": np.array(["a", "bc", "ä", "", "e", "f"]),
        },
        client_of_row=np.array(["u2", "u1", "u2", "u3", "u3", "u1"]),
    )
    return {"train": train, "distillation": train.keep("image").select([0])}


def save(folder):
    save_prepared(folder, make_splits(), **ABOUT)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "data" / "prepared")


def assert_equal(first, second):
    assert first.client_ids.tolist() == second.client_ids.tolist()
    np.testing.assert_array_equal(first.offsets, second.offsets)
    assert set(first.columns) == set(second.columns)
    for name, column in first.columns.items():
        assert column.dtype == second.columns[name].dtype
        np.testing.assert_array_equal(column, second.columns[name])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_round_trip(folder, mmap, verify):
    loaded = load_prepared(folder, mmap=mmap, verify=verify)
    assert set(loaded) == {"train", "distillation"}
    for name, data in make_splits().items():
        assert_equal(loaded[name], data)
    column = loaded["train"].columns["image"]
    assert isinstance(column, np.memmap) == mmap
    if mmap:
        assert not column.flags.writeable


def test_manifest_says_what_is_there(folder):
    content = manifest(str(folder))
    assert content["source"] == "made up" and content["licence"] == "CC0-1.0"
    assert content["arguments"] == {"seed": 3, "sizes": [1, 2]}
    train = content["splits"]["train"]
    assert (train["num_clients"], train["num_examples"]) == (3, 6)
    assert train["files"]["image"]["shape"] == [6, 2, 2]
    assert train["files"]["image"]["dtype"] == "|u1"
    path = folder / "train" / "image.npy"
    assert train["files"]["image"]["bytes"] == path.stat().st_size


def test_the_same_input_gives_the_same_bytes(tmp_path):
    first, second = save(tmp_path / "first"), save(tmp_path / "second")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 1 + 5 + 3
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for path in files:
        assert (first / path).read_bytes() == (second / path).read_bytes()


def test_clients_without_examples_and_views_survive(tmp_path):
    wide = np.arange(24).reshape(4, 6)[:, ::2]
    data = FederatedData.from_arrays({"x": wide}, offsets=[0, 4, 4], allow_empty=True)
    nobody = data.select([1])
    save_prepared(tmp_path / "p", {"all": data, "none": nobody}, **ABOUT)
    loaded = load_prepared(tmp_path / "p")
    assert_equal(loaded["all"], data)
    assert_equal(loaded["none"], nobody)


def test_a_memory_mapped_data_set_can_be_saved_again(folder, tmp_path):
    save_prepared(tmp_path / "again", load_prepared(folder), **ABOUT)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (
        folder / "manifest.json"
    ).read_bytes()


def test_existing_folders_are_not_touched(folder, tmp_path):
    with pytest.raises(PreparedDataError, match="exists already"):
        save(folder)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PreparedDataError, match="exists already"):
        save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("after", range(9))
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, after):
    """The disk is full at the n-th of the nine files."""
    flushed = []

    def flush(file):
        if len(flushed) == after:
            raise OSError(28, "No space left on device", file.name)
        flushed.append(file.name)

    monkeypatch.setattr(prepared, "_flush", flush)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "prepared")
    assert list(tmp_path.iterdir()) == []


ALL_FILES = [
    *[f"train/{name}.npy" for name in ("image", "label", "text", "offsets", "client_ids")],
    *[f"distillation/{name}.npy" for name in ("image", "offsets", "client_ids")],
    "manifest.json",
]


def one_line_error(folder, name, **options):
    with pytest.raises(PreparedDataError) as error:
        load_prepared(folder, **options)
    message = str(error.value)
    assert str(folder / name) in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("verify", [True, False])
def test_missing_and_truncated_files_are_named(folder, name, verify):
    path = folder / name
    content = path.read_bytes()
    for length in (0, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        if name == "manifest.json" and length == len(content) - 1:
            load_prepared(folder, verify=verify)  # only the last line break is missing
        else:
            one_line_error(folder, name, verify=verify)
    path.write_bytes(content + b"x")
    one_line_error(folder, name, verify=verify)
    path.unlink()
    one_line_error(folder, name, verify=verify)
    path.mkdir()
    one_line_error(folder, name, verify=verify)


@settings(max_examples=40)
@given(st.sampled_from(ALL_FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_flipped_bit_is_named(tmp_path_factory, name, where, flip):
    folder = tmp_path_factory.mktemp("flipped") / "p"
    save(folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= flip
    path.write_bytes(content)
    try:
        loaded = load_prepared(folder)
    except PreparedDataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:  # white space in the manifest does not matter
        assert name == "manifest.json" and chr(content[int(where * len(content))]).isspace()
        assert_equal(loaded["train"], make_splits()["train"])
    shutil.rmtree(folder)


@settings(max_examples=60)
@given(st.sampled_from(["image", "text", "offsets"]), st.integers(0, 127), st.integers(1, 255))
@example("offsets", 8, 2)  # a shorter header, so values from two bytes before theirs
@example("image", 8, 2)
def test_damaged_headers_are_found_without_checksums(tmp_path_factory, name, where, flip):
    folder = tmp_path_factory.mktemp("headers") / "p"
    save(folder)
    path = folder / "train" / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[where] ^= flip
    path.write_bytes(content)
    try:
        loaded = load_prepared(folder, verify=False)
    except PreparedDataError as error:
        assert str(path) in str(error)
    else:  # padding, or another spelling of the same header
        assert_equal(loaded["train"], make_splits()["train"])
    shutil.rmtree(folder)


def test_checksums_find_an_edit_of_the_same_size(folder):
    path = folder / "train" / "label.npy"
    labels = np.load(path)
    labels[0] = 2
    np.save(path, labels)
    assert "sha256" in one_line_error(folder, "train/label.npy")
    load_prepared(folder, verify=False)


def test_an_edited_manifest_is_found(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("CC0-1.0", "MIT"))
    assert "changed after it was written" in one_line_error(folder, "manifest.json")


def rewrite_manifest(folder, edit):
    """Edits the manifest and updates its checksum, as an attacker could."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    edit(content)
    content["sha256"] = prepared._content_sha256(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("edit", "name", "message"),
    [
        (lambda m: m.update(format_version=2), "manifest.json", "format_version 2"),
        (lambda m: m.update(splits=[]), "manifest.json", "not described"),
        (lambda m: m["splits"].update(train=3), "manifest.json", "not described"),
        (lambda m: m["splits"]["train"].pop("files"), "manifest.json", "not described"),
        (lambda m: m["splits"]["train"].pop("allow_empty"), "manifest.json", "not described"),
        (lambda m: m["splits"]["train"]["files"].pop("offsets"), "manifest.json", "not described"),
        (lambda m: m["splits"]["train"]["files"].update(image={}), "manifest.json", "described"),
        (lambda m: m["splits"].update({"../train": {}}), "manifest.json", "not described"),
        (
            lambda m: m["splits"]["train"]["files"]["image"].update(shape=[3, 2, 2]),
            "train/image.npy",
            "holds",
        ),
        (
            lambda m: m["splits"]["train"]["files"]["image"].update(dtype="|i1"),
            "train/image.npy",
            "holds",
        ),
        (lambda m: m["splits"]["train"]["files"].pop("text"), "train/text.npy", "not listed"),
    ],
)
def test_a_manifest_that_disagrees_with_the_files(folder, edit, name, message, verify):
    rewrite_manifest(folder, edit)
    assert message in one_line_error(folder, name, verify=verify)


def test_arrays_that_do_not_fit_together_are_found(folder):
    shutil.copy(folder / "distillation/image.npy", folder / "train/image.npy")

    def edit(content):
        splits = content["splits"]
        splits["train"]["files"]["image"] = splits["distillation"]["files"]["image"]

    rewrite_manifest(folder, edit)
    assert "equal numbers of examples" in one_line_error(folder, "train")


def test_pickles_are_never_loaded(folder):
    path = folder / "train" / "label.npy"
    np.save(path, np.array([os.getcwd], dtype=object), allow_pickle=True)
    size, digest = path.stat().st_size, prepared._file_sha256(path)
    rewrite_manifest(
        folder, lambda m: m["splits"]["train"]["files"]["label"].update(bytes=size, sha256=digest)
    )
    assert "cannot be read as an array" in one_line_error(folder, "train/label.npy")


def test_other_json_and_no_folder(tmp_path):
    assert "is this a prepared folder?" in one_line_error(tmp_path, "manifest.json")
    for text in ("[1]", "{}", "nul", "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        one_line_error(tmp_path, "manifest.json")


def test_plain_columns_are_a_split_of_one_client(tmp_path):
    save_prepared(tmp_path / "p", {"train": {"a": np.arange(3)}}, **ABOUT)
    train = load_prepared(tmp_path / "p")["train"]
    assert train.client_ids.tolist() == ["train"] and train.columns["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": {}}, "splits must not be empty"),
        ({"splits": {"../up": make_splits()["train"]}}, r"split name '\.\./up'"),
        ({"splits": {"a": make_splits()["train"], "A": make_splits()["train"]}}, "upper and lower"),
        ({"arguments": {"x": object()}}, "arguments must be what JSON can hold"),
        ({"arguments": {"x": float("nan")}}, "arguments must be what JSON can hold"),
        ({"splits": {"train": 3}}, r"splits\['train'\] must be FederatedData, or columns"),
        (
            {"splits": {"train": {"x": np.ma.masked_equal([1, 2], 2)}}},
            r"splits\['train'\]: column 'x' must not be masked",
        ),
        ({"source": ""}, "source must be a non-empty string"),
        ({"licence": None}, "licence must be a non-empty string"),
    ],
)
def test_clear_errors_before_writing(tmp_path, change, message):
    arguments = {"splits": make_splits(), **ABOUT, **change}
    with pytest.raises(PreparedDataError, match=message):
        save_prepared(tmp_path / "p", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["offsets", "client_ids", "a/b", ".hidden", ""])
def test_column_names_must_be_file_names(tmp_path, name):
    column = {name or "x" * 101: np.arange(2)}
    data = FederatedData.from_arrays(column, offsets=[0, 2])
    with pytest.raises(PreparedDataError, match="column"):
        save_prepared(tmp_path / "p", {"train": data}, **ABOUT)
