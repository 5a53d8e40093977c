"""Prepares MNIST: see README.md beside this program.

python datasets/mnist/prepare.py --source PATH --output data/mnist
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import mnist, preparation

ORIGIN = "The MNIST database of handwritten digits, Y. LeCun, C. Cortes, C. Burges"
LICENCE = "none in the files; usually given as CC BY-SA 3.0"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Prepares MNIST as a folder that fedcodist reads.", allow_abbrev=False
    )
    parser.add_argument("--source", required=True, help="folder with the four idx files, or .gz")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="accept files other than the official ones, and say so in the manifest",
    )
    arguments = parser.parse_args(argv)
    return preparation.run(
        arguments.output,
        lambda show: open_source(arguments),
        data_set="MNIST",
        source=ORIGIN,
        licence=LICENCE,
    )


def open_source(arguments: argparse.Namespace) -> preparation.Source:
    """Reads and checks the files, and says what the manifest records of them."""
    files = mnist.read_mnist(arguments.source, arguments.accept_unverified)

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        return {
            split: FederatedData.from_arrays(
                columns, offsets=[0, len(columns["label"])], client_ids=[split]
            )
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


if __name__ == "__main__":
    sys.exit(main())
