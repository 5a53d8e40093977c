"""Reads the prepared folders that configs name."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.references import is_reference
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import MANIFEST, load_prepared, manifest


def prepared_folder(setting: str, folder: str) -> dict[str, FederatedData]:
    """Returns a folder's splits; raises ValueError that says how to make the folder."""
    if not Path(folder).is_dir():
        raise ValueError(
            f"{setting} must be a prepared folder, there is no {folder}: `fedcodist prepare` or a "
            "program datasets/*/prepare.py makes it."
        )
    return load_prepared(folder)


def check_columns(
    setting: str, folder: str, splits: Mapping[str, FederatedData], columns: Sequence[str]
) -> None:
    """Raises ValueError that names the split which lacks one of the columns."""
    for name, data in splits.items():
        if missing := set(columns) - set(data.columns):
            raise ValueError(
                f"{setting} {folder} must have a column {min(missing)!r} in split {name!r}, got "
                f"{sorted(data.columns)}."
            )


def prepared_images(
    setting: str, folder: str, splits: Mapping[str, FederatedData]
) -> tuple[int, int, int]:
    """Returns height, width and channels of the splits' images; raises ValueError where these differ."""
    shape: tuple[int, ...] = ()
    for name, data in splits.items():
        image = data.columns.get("image")
        if image is None or image.dtype != np.uint8 or image.ndim != 4:
            described = "none" if image is None else f"{image.dtype} {list(image.shape[1:])}"
            raise ValueError(
                f"{setting} {folder} must have images, a column 'image' of uint8 [height, width, "
                f"channels], in split {name!r}, got {described}."
            )
        shape = shape or image.shape[1:]
        if image.shape[1:] != shape:
            raise ValueError(
                f"{setting} {folder} must have images of one shape, got {list(shape)} and, in split "
                f"{name!r}, {list(image.shape[1:])}."
            )
    height, width, channels = shape
    return height, width, channels


def data_manifests(settings: ConfigDict) -> dict[str, dict[str, Any]]:
    """What the manifests of a config's prepared folders say.

    Returns:
      folder -> its source, whether the source was not verified, the seed by which examples were dealt to
      clients (or None), and each split's number of examples.

    Raises:
      PreparedDataError: a folder has no manifest, or one that was changed.
    """
    manifests = {folder: manifest(folder) for folder in _prepared_folders(settings)}
    return {
        folder: {
            "source": content["source"],
            "unverified": content["arguments"].get("unverified", False),
            "seed": content["arguments"].get("seed"),
            "num_examples": {
                split: entry["num_examples"] for split, entry in content["splits"].items()
            },
        }
        for folder, content in manifests.items()
    }


def data_checksums(settings: ConfigDict) -> dict[str, str]:
    """Folder -> checksum of its manifest, which holds the checksums of all files of the folder.

    The file that `data.encoder` names has its own checksum under this setting.

    Raises:
      PreparedDataError: a folder has no manifest, or one that was changed.
    """
    checksums = {folder: manifest(folder)["sha256"] for folder in _prepared_folders(settings)}
    encoder = settings.get("encoder")
    if isinstance(encoder, str) and Path(encoder).is_file():
        with Path(encoder).open("rb") as file:
            checksums["data.encoder"] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums


def _prepared_folders(settings: ConfigDict) -> list[str]:
    """The folders that the settings name; a loader of one's own may read one that was not prepared."""
    named = (settings.get(f"{kind}folder") for kind in ("", "unlabelled_", "public_"))
    folders = [folder for folder in named if folder is not None]
    if is_reference(settings.get("name")):
        folders = [folder for folder in folders if (Path(folder) / MANIFEST).is_file()]
    return folders
