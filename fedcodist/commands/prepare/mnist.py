"""Prepares MNIST.

    fedcodist prepare mnist --source PATH --output data/mnist

The data set's card is datasets/mnist/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import mnist, preparation

ORIGIN = "The MNIST database of handwritten digits, Y. LeCun, C. Cortes, C. Burges"
LICENCE = "none in the files; usually given as CC BY-SA 3.0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare mnist",
        description="Prepares MNIST as a folder that fedcodist reads.",
    )
    parser.add_argument("--source", required=True, help="folder with the four idx files, or .gz")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="accept files other than the official ones, and say so in the manifest",
    )
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings),
        data_set="MNIST",
        source=ORIGIN,
        licence=LICENCE,
    )


def open_source(arguments: argparse.Namespace) -> preparation.Source:
    """Reads and checks the files, and says what the manifest records of them."""
    files = mnist.read_mnist(arguments.source, arguments.accept_unverified)

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        return {
            split: FederatedData.of_one_client(columns, split)
            for split, columns in files.splits.items()
        }

    recorded = {
        "source": "official files",
        "md5": files.md5s,
        "unverified": bool(files.unverified),
    }
    return preparation.Source(
        recorded, build, tuple(f"UNVERIFIED: {line}" for line in files.unverified)
    )
