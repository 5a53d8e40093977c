"""MNIST from its official files: four arrays in the idx format, gzipped or unpacked."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcodist.datasets.preparation import check_md5s

NUM_LABELS = 10
SIDE = 28
# Split -> file of the images, file of the labels.
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# Of the unpacked files: gzip's bytes depend on the program that packed them.
MD5S = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# The largest official file has 47 MB; a far larger one is malicious.
_LARGEST_FILE = 1 << 28


class MnistFiles(NamedTuple):
    """The contents of the files.

    Attributes:
      splits: 'train' and 'test' -> columns: `image` uint8 [images, 28, 28, 1], `label` int32 [images]
        in 0..9, in the order of the files.
      md5s: file name -> md5 of the unpacked file.
      unverified: a line for each file that is not the official one.
    """

    splits: dict[str, dict[str, np.ndarray]]
    md5s: dict[str, str]
    unverified: tuple[str, ...]


def read_mnist(source: str | os.PathLike[str], accept_unverified: bool = False) -> MnistFiles:
    """Reads a folder with the four files, gzipped (.gz) or not.

    Args:
      source: the folder.
      accept_unverified: whether to accept other files of the same format.

    Raises:
      ValueError: a file is missing, not the official one, or cannot be read.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is not a folder; it must hold MNIST's four files")
    contents = {name: _content(folder, name) for name in MD5S}
    md5s = {
        name: hashlib.md5(content, usedforsecurity=False).hexdigest()
        for name, content in contents.items()
    }
    unverified = check_md5s(folder, md5s, MD5S, accept_unverified)
    splits = {}
    for split, (images, labels) in FILES.items():
        try:
            image, label = idx_array(contents[images], 3), idx_array(contents[labels], 1)
            if image.shape[1:] != (SIDE, SIDE) or not len(image):
                raise ValueError(f"images must be [images, {SIDE}, {SIDE}], they are {image.shape}")
            if len(label) != len(image) or label.max() >= NUM_LABELS:
                raise ValueError(f"labels must be {len(image)} numbers in 0..{NUM_LABELS - 1}")
        except ValueError as error:
            raise ValueError(f"{folder}: {images} and {labels}: {error}") from None
        splits[split] = {"image": image[..., np.newaxis], "label": label.astype(np.int32)}
    return MnistFiles(splits, md5s, unverified)


def idx_array(content: bytes, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in a file of the idx format.

    The file has two bytes 0, the type (8: unsigned bytes), the number of dimensions, their lengths as
    big-endian 32-bit numbers, and the values in row-major order.

    Raises:
      ValueError: another type or number of dimensions, or a wrong number of values.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"it is not an idx file of {dimensions}-dimensional unsigned bytes")
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    expected = int(np.prod(shape, dtype=object))
    if len(content) - start != expected:
        raise ValueError(f"it has {len(content) - start} values, its header says {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(folder: Path, name: str) -> bytes:
    """A file's bytes, unpacked."""
    plain, packed = folder / name, folder / f"{name}.gz"
    try:
        if plain.is_file():
            with open(plain, "rb") as file:
                content = file.read(_LARGEST_FILE + 1)
        elif packed.is_file():
            with gzip.open(packed) as file:
                content = file.read(_LARGEST_FILE + 1)
        else:
            raise ValueError(f"{folder} has no {name}, nor {name}.gz")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{folder}: {name} cannot be read: {error}") from None
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"{folder}: {name} has more than {_LARGEST_FILE:,} bytes")
    return content
