"""Prepared folders as configs name them."""

from pathlib import Path

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
