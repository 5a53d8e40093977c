"""Prepares EMNIST's letters, by writer.

    fedcodist prepare emnist --source PATH --output data/emnist

The data set's card is datasets/emnist/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import emnist, preparation

ORIGIN = "EMNIST, https://www.nist.gov/itl/products-and-services/emnist-dataset"
LICENCE = "none stated; made of NIST Special Database 19, a work of the United States' government"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare emnist",
        description="Prepares EMNIST's letters as a folder that fedcodist reads.",
    )
    parser.add_argument("--source", required=True, help=f"{emnist.FILE}, or matlab.zip with it")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="accept other numbers of images than the official ones, and say so in the manifest",
    )
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings),
        data_set="EMNIST letters",
        source=ORIGIN,
        licence=LICENCE,
    )


def open_source(arguments: argparse.Namespace) -> preparation.Source:
    """Reads and checks the file, and says what the manifest records of it."""
    letters = emnist.read_emnist_letters(arguments.source, arguments.accept_unverified)

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        test = letters.splits["test"]
        kept = {name: test[name] for name in ("image", "label")}
        return {
            "train": by_writer(letters.splits["train"]),
            "test": FederatedData.of_one_client(kept, "test"),
        }

    recorded = {
        "source": "official file",
        "sha256": letters.sha256,
        "unverified": bool(letters.unverified),
    }
    return preparation.Source(
        recorded, build, tuple(f"UNVERIFIED: {line}" for line in letters.unverified)
    )


def by_writer(columns: Mapping[str, np.ndarray]) -> FederatedData:
    """A client for each writer, in the order of their numbers; a writer's images in the file's order."""
    order = np.argsort(columns["writer"], kind="stable")
    writers, counts = np.unique(columns["writer"], return_counts=True)
    return FederatedData.from_arrays(
        {name: columns[name][order] for name in ("image", "label")},
        offsets=np.cumsum([0, *counts]),
        client_ids=[str(writer) for writer in writers],
    )
