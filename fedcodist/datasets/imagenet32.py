"""ImageNet at 32x32 pixels from its official files: ten batches, pickled or as NumPy archives.

Pickles are read without running any code (image_pickles.py), NumPy archives without pickles. Besides the
images that are kept, only one batch at a time is in memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedcodist.datasets.image_pickles import (
    IMAGE_SHAPE,
    image_array,
    images_of_rows,
    label_array,
    one_line,
    unpickled,
)
from fedcodist.datasets.preparation import Show, check_is_file, check_md5s

NUM_LABELS = 1000
NUM_IMAGES = 1_281_167
# The smallest of the ten files has so many images, and each gives as many.
MOST_DRAWN = 10 * 128_116
# The last of the ten has seven images more than the others.
LARGEST_BATCH = 128_123
# A pickled batch has 395 MB; a far larger one is malicious.
_LARGEST_FILE = 1 << 29
# md5 of the pickled batches and of the NumPy archives, by number; see datasets/imagenet32/README.md.
PICKLE_MD5S = (
    "dd6683a336ab645d336f7b47c67d8456",
    "b9b1f5ad237638a41e80944fc03b42af",
    "e33306a0f4234b5c5812a32845bfbd04",
    "4db6d81c460a5170a03ef03e1ddd21dd",
    "baa0f1d06099f55e5fe50d43fca4d334",
    "bba3bc6e83e0703df1ec7e277e0b6800",
    "48dd0fd4511b39d518dbabba2f5b36b7",
    "46583e44f926baaeacbf8c333dc6110f",
    "7c82c36ce028b457204f1080d1793669",
    "14e3a6ce19d584ba97208a1d9f551e63",
)
NPZ_MD5S = (
    "464fde20de6eb44c28cc1a8c11544bb1",
    "bdb56e71882c3fd91619d789d5dd7c79",
    "83ff36d76ea26867491a281ea6e1d03b",
    "98ff184fe109d5c2a0f6da63843880c7",
    "62b8803e13c3e6de9498da7aaaae57c8",
    "e0b06665f890b029f1d8d0a0db26e119",
    "9731f469aac1622477813c132c5a847a",
    "60aed934b9d26b7ee83a1a83bdcfbe0f",
    "b96328e6affd718660c2561a6fe8c14c",
    "1dc618d544c554220dd118f72975470c",
)


class Batches(NamedTuple):
    """The official files of a source.

    Attributes:
      source: a folder or a zip archive.
      read: file name -> () -> its bytes, in the order of the batches.
      md5s: file name -> md5 found.
      unverified: a line for each file that is missing or is not the official one.
    """

    source: Path
    read: Mapping[str, Callable[[], bytes]]
    md5s: Mapping[str, str]
    unverified: tuple[str, ...]


def open_batches(
    source: str | os.PathLike[str],
    accept_unverified: bool = False,
    show: Show = lambda text, fraction: None,
    known: Mapping[str, str] | None = None,
) -> Batches:
    """Finds and checks the ten training batches in a folder or in a zip archive.

    Args:
      source: the archive, or a folder with its files, pickled or as .npz.
      accept_unverified: whether to accept other files of the same layout, and missing ones.
      show: called with the present stage and the fraction that is done.
      known: file name -> md5 in place of the official ones.

    Raises:
      ValueError: a file is missing, is not the official one, or cannot be read.
    """
    source = Path(source)
    readers = _in_folder(source) if source.is_dir() else _in_archive(source)
    names = [f"train_data_batch_{number}" for number in range(1, 11)]
    for suffix, md5s in ((".npz", NPZ_MD5S), ("", PICKLE_MD5S)):
        expected = known or {f"{n}{suffix}": md5 for n, md5 in zip(names, md5s, strict=True)}
        present = {name: readers[name] for name in expected if name in readers}
        if present:
            break
    else:
        raise ValueError(f"--source {source} holds no {names[0]} to {names[-1]}, or as .npz")
    md5s_found = {}
    for number, (name, read) in enumerate(present.items()):
        show(name, number / len(present))
        md5s_found[name] = hashlib.md5(read(), usedforsecurity=False).hexdigest()
    unverified = check_md5s(source, md5s_found, expected, accept_unverified)
    return Batches(source, present, md5s_found, unverified)


def read_batches(
    batches: Batches,
    images: int | None = None,
    seed: int = 0,
    show: Show = lambda text, fraction: None,
) -> dict[str, np.ndarray]:
    """The images of all batches, or a random sample with equally many from each batch.

    Returns:
      `image` uint8 `[images, 32, 32, 3]` (height, width, channel) and `label` int32 `[images]` in
      0..999, in the order of the files.

    Raises:
      ValueError: names the file that is damaged, has another layout, or too few images.
    """
    count = len(batches.read)
    if images is not None and images < count:
        raise ValueError(f"--images must be at least {count}, one of each batch, got {images}")
    room = count * LARGEST_BATCH if images is None else images
    # The system allocates memory only when it is written to.
    image, label = np.empty((room, *IMAGE_SHAPE), np.uint8), np.empty(room, np.int32)
    end = 0
    for number, (name, read) in enumerate(batches.read.items()):
        show(f"reading {name}", number / count)
        own_images, own_labels = _columns(batches.source, name, read())
        chosen: np.ndarray | slice = slice(None)
        if images is not None:
            wanted = images * (number + 1) // count - images * number // count
            if wanted > len(own_images):
                raise ValueError(
                    f"--images {images} takes {wanted} of {name}, which has {len(own_images)}"
                )
            draw = np.random.default_rng([seed, number])
            chosen = np.sort(draw.permutation(len(own_images))[:wanted])
        start, end = end, end + len(own_labels[chosen])
        image[start:end], label[start:end] = own_images[chosen], own_labels[chosen]
    return {"image": image[:end], "label": label[:end]}


def _columns(source: Path, name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        image, label = (_of_npz if name.endswith(".npz") else _of_pickle)(content)
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(
            f"{source}: {name} is not a batch of ImageNet 32x32: {one_line(error)}"
        ) from None
    if len(image) > LARGEST_BATCH:
        raise ValueError(f"{source}: {name} has {len(image)} images, more than {LARGEST_BATCH}")
    return image, label - 1  # the official labels begin at 1


def _of_pickle(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    table = unpickled(content)
    image = image_array(table)
    return image, label_array(table, "labels", len(image), 1, NUM_LABELS)


def _of_npz(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        rows, label = (_array(archive, name) for name in ("data", "labels"))
    width = int(np.prod(IMAGE_SHAPE))
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise ValueError(f"'data' must be uint8 [images, {width}], it is {rows.dtype} {rows.shape}")
    if label.dtype.kind not in "iu" or label.shape != (len(rows),):
        raise ValueError(
            f"'labels' must be integers [{len(rows)}], they are {label.dtype} {label.shape}"
        )
    if label.min() < 1 or label.max() > NUM_LABELS:
        raise ValueError(f"labels must be in 1..{NUM_LABELS}")
    return images_of_rows(rows), label.astype(np.int32)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    try:
        member = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"it has no array {name!r}") from None
    with io.BytesIO(_content(archive, member)) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _in_folder(folder: Path) -> dict[str, Callable[[], bytes]]:
    """Files by name, in the folder or in a folder of the official name inside it."""
    readers: dict[str, Callable[[], bytes]] = {}
    for inner in ("", "Imagenet32_train", "Imagenet32_train_npz"):
        for path in sorted((folder / inner).glob("train_data_batch_*")):
            if path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                readers.setdefault(path.name, path.read_bytes)
    return readers


def _in_archive(source: Path) -> dict[str, Callable[[], bytes]]:
    check_is_file(source)
    try:
        with zipfile.ZipFile(source) as archive:
            members = {PurePosixPath(m.filename).name: m for m in archive.infolist()}
    except Exception as error:  # damaged archives raise nearly anything
        raise ValueError(f"{source} cannot be read as a .zip archive: {one_line(error)}") from None

    def reader(member: zipfile.ZipInfo) -> Callable[[], bytes]:
        def read() -> bytes:
            try:
                with zipfile.ZipFile(source) as archive:
                    return _content(archive, member)
            except (ValueError, OSError) as error:
                raise ValueError(f"{source}: {member.filename}: {error}") from None

        return read

    return {name: reader(member) for name, member in members.items()}


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a file in an archive, checksum compared. Raises ValueError for a damaged file."""
    if member.file_size > _LARGEST_FILE:
        raise ValueError(f"{member.filename} has more than {_LARGEST_FILE:,} bytes")
    try:
        return archive.read(member)
    except Exception as error:  # zip's compressors raise different errors
        raise ValueError(one_line(error)) from None
