"""Columns from a NumPy archive, `.npz`."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedcodist.data.column_choice import column_choice


def from_npz(
    path: str | os.PathLike[str], columns: Iterable[str] | Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Reads arrays of an archive as columns, `{column: array [examples, ...]}`, for a partitioner.

        columns = fc.from_npz("mnist.npz", {"image": "x_train", "label": "y_train"})
        columns["image"] = columns["image"][..., None]  # configs want an axis of channels

    Args:
      path: a file that `numpy.savez` wrote.
      columns: the arrays to read, or a mapping from column to array; all by default.

    Raises:
      ValueError: names the file or array. The file is damaged or not an archive, an array is unknown or
        holds Python objects (reading these could run code), or numbers of examples differ.
    """
    path = Path(path)
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array, no archive")
        with archive:
            names = column_choice(columns, archive.files, "array")
            arrays = {column: _array(archive, name) for column, name in names.items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        if "allow_pickle" in reason:  # NumPy takes a file that it does not know for a pickle
            reason = "it is not a NumPy archive"
        raise ValueError(f"{path}: {reason:.200}") from None
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{path}: columns must have equal numbers of examples, got {sizes}; choose some with "
            "columns=..."
        )
    return arrays


def _array(archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ValueError(
            f"array {name!r} holds Python objects, which are not read since that can run code; save "
            "arrays of numbers"
        ) from None
    if array.ndim == 0:
        raise ValueError(f"array {name!r} must be [examples, ...], got a single value")
    return array
