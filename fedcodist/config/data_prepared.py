"""Prepared folders as configs name them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import load_prepared


def prepared_folder(setting: str, folder: str) -> dict[str, FederatedData]:
    """The splits of a folder, or one line that tells how to make it."""
    if not Path(folder).is_dir():
        raise ValueError(
            f"{setting} must be a prepared folder, there is no {folder}: a program "
            "datasets/*/prepare.py makes it, see datasets/README.md."
        )
    return load_prepared(folder)


def prepared_images(
    setting: str, folder: str, splits: Mapping[str, FederatedData]
) -> tuple[int, int, int]:
    """Height, width and channels of the images of all splits, or one line that tells what they are."""
    shape: tuple[int, ...] = ()
    for name, data in splits.items():
        image = data.columns.get("image")
        if image is None or image.dtype != np.uint8 or image.ndim != 4:
            found = "none" if image is None else f"{image.dtype} {list(image.shape[1:])}"
            raise ValueError(
                f"{setting} {folder} must have images, a column 'image' of uint8 [height, width, "
                f"channels], in split {name!r}, got {found}."
            )
        shape = shape or image.shape[1:]
        if image.shape[1:] != shape:
            raise ValueError(
                f"{setting} {folder} must have images of one shape, got {list(shape)} and, in split "
                f"{name!r}, {list(image.shape[1:])}."
            )
    height, width, channels = shape
    return height, width, channels
