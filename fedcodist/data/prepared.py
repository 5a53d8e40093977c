"""Prepared data sets: a folder of `.npy` columns, written once and memory-mapped afterwards.

    manifest.json               splits, dtypes, shapes, sizes, sha256, source, licence
    <split>/<column>.npy        examples of all clients, client by client
    <split>/offsets.npy         int64 [num_clients + 1]
    <split>/client_ids.npy      text [num_clients]

The manifest holds a checksum of every file and of itself. The same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.splits import federated_split

FORMAT_VERSION = 1

MANIFEST = "manifest.json"
_OFFSETS = "offsets"
_CLIENT_IDS = "client_ids"
# Names become file names: nothing that leaves the folder or that some file system cannot hold.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

# What NumPy's header parser and reader raise for damaged files.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    OverflowError,
    MemoryError,
    tokenize.TokenError,
)


class PreparedDataError(ValueError):
    """A prepared folder cannot be written, or does not hold what its manifest says."""


def save_prepared(
    folder: str | os.PathLike[str],
    splits: Mapping[str, FederatedData | Mapping[str, Any]],
    *,
    source: str,
    licence: str,
    arguments: Mapping[str, Any],
) -> None:
    """Writes splits as a prepared folder, completely or not at all, so that configs can read arrays.

    For a config whose `data.name` is "prepared" and whose `data.folder` is this folder:

        columns = {"image": images, "label": labels}  # uint8 [examples, height, width, channels], int32
        train = fc.FederatedData.from_arrays(columns, client_of_row=users)
        test = fc.FederatedData.of_one_client(test_columns)
        fc.save_prepared(
            "data/mine",
            {"train": train, "distillation": unlabelled, "held_out": held_out, "test": test},
            source="my camera", licence="none", arguments={"mean": [0.5], "deviation": [0.25]},
        )

    `train` has the clients; with `data.partition` their examples are dealt anew. `held_out` and `test`
    may be missing if `evaluation` does not name them. `distillation` has images without labels for
    methods that distil; `data.unlabelled_folder` may name another folder instead. Configs read the
    arguments `mean` and `deviation` of each channel (of pixels divided by 255). They also read
    `num_classes`, which is needed if there are more classes than the labels show.

    Everything is written into a hidden temporary folder beside `folder`, which is then renamed.

    Args:
      folder: must not exist yet, or be empty. Its parents are made.
      splits: name -> data, or plain columns, which become those of one client with the split's name.
      source: where the data come from.
      licence: how they may be used.
      arguments: those of the preparation program, anything that JSON can hold.

    Raises:
      PreparedDataError: names that cannot be file names, arguments that JSON cannot hold, or a folder
        that is in use.
      OSError: writing fails, such as on a full disk.
    """
    folder = Path(folder)
    for name, text in (("source", source), ("licence", licence)):
        if not isinstance(text, str) or not text:
            raise PreparedDataError(f"{name} must be a non-empty string, got {text!r}")
    _check_names("split", splits)
    federated = {split: _federated(split, data) for split, data in splits.items()}
    for split, data in federated.items():
        _check_names(f"split {split!r}: column", data.columns)
        for reserved in (_OFFSETS, _CLIENT_IDS):
            if reserved in data.columns:
                raise PreparedDataError(f"split {split!r}: a column cannot be named {reserved!r}")
    try:
        arguments = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PreparedDataError(f"arguments must be what JSON can hold: {error}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PreparedDataError(f"{folder} exists already; remove it or choose another folder")

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial-{secrets.token_hex(8)}"
    partial.mkdir()
    try:
        entries = {split: _write_split(partial / split, data) for split, data in federated.items()}
        content = {
            "format_version": FORMAT_VERSION,
            "source": source,
            "licence": licence,
            "arguments": arguments,
            "splits": entries,
        }
        content["sha256"] = _content_sha256(content)
        with open(partial / MANIFEST, "w", encoding="utf-8", newline="\n") as file:
            json.dump(content, file, indent=2, sort_keys=True)
            file.write("\n")
            _flush(file)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_prepared(
    folder: str | os.PathLike[str], mmap: bool = True, verify: bool = True
) -> dict[str, FederatedData]:
    """Reads a prepared folder.

    Existence, size in bytes, dtype and shape of every file are always compared with the manifest.

    Args:
      folder: the prepared folder.
      mmap: whether columns are memory-mapped, read-only.
      verify: whether checksums are compared too, which reads every byte once. Skip it for very large
        folders that were verified before.

    Returns:
      split -> data.

    Raises:
      PreparedDataError: names the file that is missing, cut off, changed, or beside a split's files but
        not in the manifest.
    """
    folder = Path(folder)
    entries = manifest(folder)["splits"]
    result = {}
    for split, entry in entries.items():
        try:
            files, allow_empty = entry["files"], entry["allow_empty"]
            arrays = {
                name: _read_array(folder / split / f"{name}.npy", described, mmap, verify)
                for name, described in files.items()
            }
            offsets, client_ids = arrays.pop(_OFFSETS), arrays.pop(_CLIENT_IDS)
        except (KeyError, TypeError, AttributeError) as error:
            raise PreparedDataError(
                f"{folder / MANIFEST}: split {split!r} is not described as expected ({error!r})"
            ) from None
        extra = {path.stem for path in (folder / split).glob("*.npy")} - set(files)
        if extra:
            path = folder / split / f"{min(extra)}.npy"
            raise PreparedDataError(f"{path} is not listed in {MANIFEST}")
        try:
            result[split] = FederatedData(arrays, offsets, client_ids, allow_empty)
        except (TypeError, ValueError) as error:
            raise PreparedDataError(f"{folder / split}: {error}") from None
    return result


def manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a prepared folder: source, licence, arguments, contents of each split, checksum.

    Raises:
      PreparedDataError: it is missing, cannot be read, was edited or has another version.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PreparedDataError(
            f"{path} cannot be read ({error.strerror}): is this a prepared folder?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PreparedDataError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or "format_version" not in content:
        raise PreparedDataError(f"{path} is not the manifest of a prepared folder")
    if content["format_version"] != FORMAT_VERSION:
        raise PreparedDataError(
            f"{path} has format_version {content['format_version']!r}, "
            f"this version of the library reads {FORMAT_VERSION}"
        )
    checksum = content.pop("sha256", None)
    if checksum != _content_sha256(content):
        raise PreparedDataError(f"{path} was changed after it was written: its sha256 differs")
    splits = content.get("splits")
    if not isinstance(splits, dict) or not all(map(_is_split_entry, splits, splits.values())):
        raise PreparedDataError(f"{path}: its splits are not described as expected")
    return content | {"sha256": checksum}


def _is_split_entry(split: str, entry: Any) -> bool:
    files = entry.get("files") if isinstance(entry, dict) else None
    return isinstance(files, dict) and all(_FILE_NAME.fullmatch(name) for name in (split, *files))


def _check_names(what: str, names: Mapping[str, Any]) -> None:
    if not names:
        raise PreparedDataError(f"{what}s must not be empty")
    for name in names:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise PreparedDataError(
                f"{what} name {name!r} cannot be a file name: use letters, digits, '_', '-', '.'"
            )
    folded = [name.casefold() for name in names]
    if len(set(folded)) < len(folded):
        raise PreparedDataError(f"{what} names {sorted(names)} differ only in upper and lower case")


def _federated(split: str, data: Any) -> FederatedData:
    try:
        return federated_split(f"splits[{split!r}]", split, data)
    except (TypeError, ValueError) as error:
        raise PreparedDataError(str(error)) from None


def _write_split(folder: Path, data: FederatedData) -> dict[str, Any]:
    folder.mkdir()
    arrays = {**data.columns, _OFFSETS: data.offsets, _CLIENT_IDS: data.client_ids}
    return {
        "num_clients": data.num_clients,
        "num_examples": data.num_examples,
        "allow_empty": data.allow_empty,
        "files": {name: _write_array(folder / f"{name}.npy", a) for name, a in arrays.items()},
    }


def _write_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    with open(path, "wb") as file:
        np.lib.format.write_array(
            file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False
        )
        _flush(file)
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": path.stat().st_size,
        "sha256": _file_sha256(path),
    }


def _read_array(path: Path, described: dict[str, Any], mmap: bool, verify: bool) -> np.ndarray:
    if not path.is_file():
        raise PreparedDataError(f"{path} is missing")
    size = path.stat().st_size
    if size != described["bytes"]:
        raise PreparedDataError(
            f"{path} has {size} bytes, {MANIFEST} says {described['bytes']}: truncated or edited"
        )
    try:
        if verify and _file_sha256(path) != described["sha256"]:
            raise PreparedDataError(
                f"{path} differs from its sha256 in {MANIFEST}: corrupt or edited"
            )
        map_it = mmap and 0 not in described["shape"]  # nothing to map in an array of no elements
        array = np.load(path, mmap_mode="r" if map_it else None, allow_pickle=False)
        start = _values_start(path)
    except PreparedDataError:
        raise
    except _UNREADABLE as error:
        raise PreparedDataError(f"{path} cannot be read as an array: {error}") from None
    if array.dtype.str != described["dtype"] or list(array.shape) != described["shape"]:
        raise PreparedDataError(
            f"{path} holds {array.dtype.str} {list(array.shape)}, {MANIFEST} says "
            f"{described['dtype']} {described['shape']}"
        )
    if start + array.nbytes != size:  # NumPy reads a file that is longer than its header says
        raise PreparedDataError(
            f"{path} holds {size - start} bytes after its header, which says {array.nbytes}: edited"
        )
    return array


def _values_start(path: Path) -> int:
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return file.tell()


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_sha256(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _flush(file: Any) -> None:
    # Renaming a folder whose files are still in the cache could leave empty files after a crash.
    file.flush()
    os.fsync(file.fileno())
