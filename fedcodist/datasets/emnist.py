"""EMNIST's letters from the official MATLAB file, which has the writer of each image."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from fedcodist.datasets.image_pickles import one_line
from fedcodist.datasets.preparation import check_counts, check_is_file

NUM_LABELS = 26
SIDE = 28
FILE = "emnist-letters.mat"
IMAGES_OF_SPLIT = {"train": 124_800, "test": 20_800}
# The official file has 32 MB packed and 115 MB of pixels; a far larger one is malicious.
_LARGEST_FILE = 1 << 28
_PACKED = 15  # MATLAB's type of an element that zlib has packed


class EmnistLetters(NamedTuple):
    """The contents of the file.

    Attributes:
      splits: 'train' and 'test' -> columns: `image` uint8 [images, 28, 28, 1] upright, `label` int32
        [images] in 0..25 (a, b, ..., small and capital letters together) and `writer` int32 [images],
        in the order of the file.
      sha256: of the file.
      unverified: a line for each number of images that is not the official one.
    """

    splits: dict[str, dict[str, np.ndarray]]
    sha256: str
    unverified: tuple[str, ...]


def read_emnist_letters(
    source: str | os.PathLike[str], accept_unverified: bool = False
) -> EmnistLetters:
    """Reads `emnist-letters.mat`, or the archive `matlab.zip` that contains it.

    No official checksum is known, so the numbers of images are checked.

    Args:
      source: the file or the archive.
      accept_unverified: whether to accept other numbers of images.

    Raises:
      ValueError: it cannot be read, has another layout, or other numbers of images.
    """
    from scipy.io import loadmat

    source = Path(source)
    check_is_file(source)
    content = _content(source)
    try:
        _check_unpacked(content)
        # SciPy comes with JAX. It reads this format (version 5) without running anything.
        data: Any = loadmat(io.BytesIO(content), variable_names=["dataset"])["dataset"][0, 0]
        splits = {split: _columns(data[split][0, 0]) for split in IMAGES_OF_SPLIT}
    except Exception as error:  # damaged files raise nearly anything
        raise ValueError(f"{source} is not EMNIST's {FILE}: {one_line(error)}") from None
    counts = {split: len(columns["label"]) for split, columns in splits.items()}
    unverified = check_counts(source, counts, IMAGES_OF_SPLIT, accept_unverified)
    return EmnistLetters(splits, hashlib.sha256(content).hexdigest(), unverified)


def _check_unpacked(content: bytes) -> None:
    """Raises ValueError where the file would unpack to more bytes than any official file."""
    order = ">" if content[126:128] == b"MI" else "<"
    position, total = 128, 0  # elements follow the header: type, size and content
    while position + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, position)
        position += 8
        if kind == _PACKED:
            stream, waiting = zlib.decompressobj(), content[position : position + size]
            while waiting and not stream.eof:
                total += len(stream.decompress(waiting, 1 << 20))
                waiting = stream.unconsumed_tail
                if total > _LARGEST_FILE:
                    raise ValueError(f"it unpacks to more than {_LARGEST_FILE:,} bytes")
        position += size


def _columns(part: Any) -> dict[str, np.ndarray]:
    pixels, labels, writers = (part[name] for name in ("images", "labels", "writers"))
    count, width = len(pixels), SIDE * SIDE
    if pixels.dtype != np.uint8 or pixels.shape != (count, width) or not count:
        raise ValueError(f"'images' must be uint8 [images, {width}], it is {pixels.shape}")
    columns = {}
    for name, values in (("label", labels), ("writer", writers)):
        if values.shape != (count, 1) or not np.array_equal(values, np.round(values)):
            raise ValueError(f"'{name}s' must be {count} whole numbers, it is {values.shape}")
        columns[name] = values[:, 0].astype(np.int32)
    if columns["label"].min() < 1 or columns["label"].max() > NUM_LABELS:
        raise ValueError(f"labels must be in 1..{NUM_LABELS}")
    # MATLAB's arrays run down the columns of an image first.
    image = pixels.reshape(count, SIDE, SIDE).transpose(0, 2, 1)[..., np.newaxis]
    return columns | {"image": np.ascontiguousarray(image), "label": columns["label"] - 1}


def _content(source: Path) -> bytes:
    content: bytes | None
    try:
        if source.suffix != ".zip":
            with open(source, "rb") as file:
                content = file.read(_LARGEST_FILE + 1)
        else:
            with zipfile.ZipFile(source) as archive:
                members = {PurePosixPath(m.filename).name: m for m in archive.infolist()}
                content = None
                if FILE in members:
                    with archive.open(members[FILE]) as file:
                        content = file.read(_LARGEST_FILE + 1)
    except Exception as error:  # damaged archives raise nearly anything
        raise ValueError(f"{source} cannot be read: {one_line(error)}") from None
    if content is None:
        raise ValueError(f"{source} holds no {FILE}")
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"{source} has more than {_LARGEST_FILE:,} bytes")
    return content
