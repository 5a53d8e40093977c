"""CIFAR-10 and CIFAR-100 from their official Python files, and common code to prepare both.

The official files are pickles, which image_pickles.py reads without running any code.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.tfds import from_tfds
from fedcodist.datasets import preparation
from fedcodist.datasets.image_pickles import (
    IMAGE_SHAPE,
    image_array,
    label_array,
    one_line,
    unpickled,
)
from fedcodist.datasets.preparation import Show, Source, check_is_file, file_checksum

LICENCE = "none stated by the authors, who ask to cite Krizhevsky (2009)"

# The largest official file has 155 MB; a far larger one is malicious.
_LARGEST_FILE = 1 << 29
# Of a whole unpacked archive; the official ones have 186 MB.
_LARGEST_ARCHIVE = 1 << 30


class Labels(NamedTuple):
    """A list of labels in an official file: its key, and the number of different labels."""

    key: str
    num_labels: int


class CifarFormat(NamedTuple):
    """Official file names, their md5 checksums, and the columns for their labels."""

    name: str
    folder: str
    archive: str
    archive_md5: str
    md5s: Mapping[str, str]
    files_of_split: Mapping[str, tuple[str, ...]]
    images_of_split: Mapping[str, int]
    labels: Mapping[str, Labels]


CIFAR10 = CifarFormat(
    name="CIFAR-10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    md5s={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    files_of_split={
        "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test": ("test_batch",),
    },
    images_of_split={"train": 50_000, "test": 10_000},
    labels={"label": Labels("labels", 10)},
)

CIFAR100 = CifarFormat(
    name="CIFAR-100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    md5s={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
    files_of_split={"train": ("train",), "test": ("test",)},
    images_of_split={"train": 50_000, "test": 10_000},
    labels={"label": Labels("fine_labels", 100), "coarse_label": Labels("coarse_labels", 20)},
)


@dataclass(frozen=True)
class CifarFiles:
    """The contents of official files.

    Attributes:
      splits: "train" and "test" -> columns: `image` uint8 `[images, 32, 32, 3]` (height, width,
        channel), `label` int32 `[images]` and, for CIFAR-100, `coarse_label` int32 `[images]`, in the
        order of the files.
      md5s: file name -> md5 found.
      unverified: a line for each file that is missing or is not the official one.
    """

    splits: dict[str, dict[str, np.ndarray]]
    md5s: dict[str, str]
    unverified: tuple[str, ...]


Tables = Mapping[str, Mapping[str, np.ndarray]]
"""Split ("train", "test") -> columns."""

Build = Callable[[Tables], Mapping[str, FederatedData]]
"""Makes the splits of a prepared folder of the columns."""


def read_cifar(
    cifar: CifarFormat,
    source: str | os.PathLike[str],
    accept_unverified: bool = False,
    show: Show = lambda text, fraction: None,
) -> CifarFiles:
    """Reads the official archive, the folder that it unpacks to, or that folder's parent.

    Args:
      cifar: which data set.
      source: archive or folder.
      accept_unverified: whether to accept files whose md5 is not the official one. They need the same
        layout; other numbers of images are accepted, and missing training files.
      show: called with the present stage and the fraction that is done.

    Raises:
      ValueError: names the file that is missing, not official, damaged, or a pickle that holds more than
        arrays and labels.
      OSError: the system cannot read a file.
    """
    source = Path(source)
    contents = _contents(cifar, source, accept_unverified, show)
    md5s = {
        name: hashlib.md5(content, usedforsecurity=False).hexdigest()
        for name, content in contents.items()
    }
    unverified = preparation.check_md5s(source, md5s, cifar.md5s, accept_unverified)
    splits = {}
    for number, (split, names) in enumerate(cifar.files_of_split.items()):
        show(f"reading {split}", (1 + number) / (1 + len(cifar.files_of_split)))
        present = [name for name in names if name in contents]
        if not present:
            raise ValueError(f"{source}: {names[0]} is missing")
        tables = [_columns(cifar, source, name, contents.pop(name)) for name in present]
        splits[split] = {
            column: np.concatenate([table[column] for table in tables]) for column in tables[0]
        }
    return CifarFiles(splits, md5s, unverified)


def file_source(
    cifar: CifarFormat, arguments: argparse.Namespace, show: Show, build: Build
) -> Source:
    """Opens the official files that `--source` names; `build` makes splits of their columns."""
    files = read_cifar(cifar, arguments.source, arguments.accept_unverified, show)
    images = {split: len(table["image"]) for split, table in files.splits.items()}
    counted = " and ".join(f"{count:,} {split}" for split, count in images.items())
    notices = (
        *(f"UNVERIFIED: {line}" for line in files.unverified),
        *((f"UNVERIFIED: using {counted} images all the same",) if files.unverified else ()),
    )
    recorded = {
        "source": "official files",
        "md5": files.md5s,
        "images": images,
        "unverified": bool(files.unverified),
    }
    return Source(recorded, lambda show: build(files.splits), notices)


def tfds_source(
    cifar: CifarFormat, name: str, arguments: argparse.Namespace, build: Build
) -> Source:
    """Opens TensorFlow Datasets' `name`; it is read only when its splits are made."""

    def read_and_build(show: Show) -> Mapping[str, FederatedData]:
        tables = {}
        for number, split in enumerate(cifar.images_of_split):
            show(f"reading {split} of TFDS", number / len(cifar.images_of_split))
            try:
                table = from_tfds(name, split, ["image", *cifar.labels], arguments.tfds_dir)
            except ImportError:
                raise
            except Exception as error:  # its download and readers raise many types
                raise ValueError(
                    f"TFDS cannot read {name}: {type(error).__name__}: {error}"
                ) from None
            tables[split] = checked_columns(cifar, split, table, arguments.accept_unverified)
        return build(tables)

    recorded = {"source": "tfds", "unverified": arguments.accept_unverified}
    return Source(recorded, read_and_build, unchecked_notices(arguments))


def unchecked_notices(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Notices for a source without checksums; none unless the numbers of images were not checked."""
    if not arguments.accept_unverified:
        return ()
    return ("UNVERIFIED: the numbers of images were not checked",)


def checked_columns(
    cifar: CifarFormat,
    split: str,
    columns: Mapping[str, np.ndarray],
    accept_unverified: bool = False,
) -> dict[str, np.ndarray]:
    """The columns with int32 labels.

    With `accept_unverified` the number of images may differ from the official one.

    Raises:
      ValueError: columns that cannot be images of this data set.
    """
    image = columns["image"]
    if image.dtype != np.uint8 or image.shape[1:] != IMAGE_SHAPE:
        raise ValueError(
            f"split {split!r}: images must be uint8 {list(IMAGE_SHAPE)}, "
            f"got {image.dtype} {list(image.shape[1:])}"
        )
    expected = cifar.images_of_split[split]
    if len(image) != expected and not accept_unverified:
        raise ValueError(
            f"split {split!r} has {len(image)} images, {cifar.name} has {expected}; "
            "--accept-unverified uses what is there all the same"
        )
    typed = {"image": image}
    for name, labels in cifar.labels.items():
        column = columns[name]
        if column.dtype.kind not in "iu" or column.ndim != 1:
            raise ValueError(f"split {split!r}: {name} must be integers, got {column.dtype}")
        if column.min() < 0 or column.max() >= labels.num_labels:
            raise ValueError(f"split {split!r}: {name} must be in 0..{labels.num_labels - 1}")
        typed[name] = column.astype(np.int32)
    return typed


def run_preparation(
    cifar: CifarFormat,
    arguments: argparse.Namespace,
    origin: str,
    open_source: Callable[[argparse.Namespace, Show], Source],
) -> int:
    """Prepares `--output` as `preparation.run` does; returns the exit status."""
    if arguments.tfds_dir is not None and arguments.source != "tfds":
        return preparation.refuse(ValueError("--tfds-dir goes with --source tfds only"))
    return preparation.run(
        arguments.output,
        lambda show: open_source(arguments, show),
        data_set=cifar.name,
        source=origin,
        licence=LICENCE,
    )


def add_arguments(parser: argparse.ArgumentParser, sources: str) -> None:
    """Adds the arguments that both programs have. `sources` describes `--source` for `--help`."""
    parser.add_argument("--source", required=True, help=sources)
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--tfds-dir", help="data_dir of TFDS, with --source tfds")
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="accept files other than the official ones, and say so in the manifest",
    )


def _contents(
    cifar: CifarFormat, source: Path, accept_unverified: bool, show: Show
) -> dict[str, bytes]:
    if source.is_dir():
        return _read_folder(cifar, source, show)
    check_is_file(source)
    show(source.name, 0.0)
    md5 = file_checksum(source, "md5")
    # With the flag only the files inside are checked: a repacked archive holds the same images.
    if md5 != cifar.archive_md5 and not accept_unverified:
        raise ValueError(
            f"{source} has md5 {md5}, the official {cifar.archive} {cifar.archive_md5}; "
            "--accept-unverified reads it all the same"
        )
    return _read_archive(cifar, source, show)


def _read_folder(cifar: CifarFormat, source: Path, show: Show) -> dict[str, bytes]:
    folder = source / cifar.folder if (source / cifar.folder).is_dir() else source
    present = [name for name in cifar.md5s if (folder / name).is_file()]
    if not present:
        raise ValueError(
            f"--source {source} holds neither {cifar.folder}/ nor its files {', '.join(cifar.md5s)}"
        )
    contents = {}
    for number, name in enumerate(present):
        show(name, number / len(present) / 3)
        contents[name] = (folder / name).read_bytes()
    return contents


def _read_archive(cifar: CifarFormat, source: Path, show: Show) -> dict[str, bytes]:
    # Nothing is unpacked to disk, so names in the archive cannot lead out of a folder.
    contents: dict[str, bytes] = {}
    try:
        with gzip.open(source) as unpacked:
            stream: Any = _Limited(unpacked, source)
            archive = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"{source} holds {member.name!r}, a path out of its folder")
                if path.parts[:-1] != (cifar.folder,) or path.name not in cifar.md5s:
                    continue
                if not member.isreg() or member.size > _LARGEST_FILE:
                    raise ValueError(
                        f"{source}: {member.name} is not a file of at most {_LARGEST_FILE:,} bytes"
                    )
                show(path.name, len(contents) / len(cifar.md5s) / 3)
                file = archive.extractfile(member)
                contents[path.name] = file.read() if file else b""
            while stream.read(1 << 20):  # to the end, where gzip's own checksum is compared
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{source} cannot be read as a .tar.gz archive: {error}") from None
    if not contents:
        raise ValueError(f"{source} holds no {cifar.folder}/ with {', '.join(cifar.md5s)}")
    return contents


class _Limited:
    """A stream that raises ValueError where an archive would unpack to too many bytes."""

    def __init__(self, stream: Any, source: Path) -> None:
        self._stream, self._source, self._left = stream, source, _LARGEST_ARCHIVE

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(
                f"{self._source} unpacks to more than {_LARGEST_ARCHIVE:,} bytes: refused"
            )
        return content


def _columns(cifar: CifarFormat, source: Path, name: str, content: bytes) -> dict[str, np.ndarray]:
    try:
        table = unpickled(content)
        columns = {"image": image_array(table)}
        for column, (key, num_labels) in cifar.labels.items():
            columns[column] = label_array(table, key, len(columns["image"]), 0, num_labels - 1)
        return columns
    except Exception as error:  # damaged pickles raise nearly anything
        text = one_line(error)
        raise ValueError(f"{source}: {name} is not a {cifar.name} file: {text}") from None
