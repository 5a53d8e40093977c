"""Prepares CIFAR-10: see README.md beside this program.

python datasets/cifar10/prepare.py --source PATH --output data/cifar10
"""

from __future__ import annotations

import argparse
import sys

from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import cifar, preparation

ORIGIN = "CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html"


def main(argv: list[str] | None = None) -> int:
    parser = cifar.argument_parser(
        cifar.CIFAR10,
        "cifar-10-python.tar.gz, its unpacked folder or that folder's parent; or 'tfds'",
    )
    arguments = parser.parse_args(argv)
    return cifar.run_preparation(cifar.CIFAR10, arguments, ORIGIN, open_source)


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    if arguments.source == "tfds":
        return cifar.tfds_source(cifar.CIFAR10, "cifar10", arguments, splits_of)
    return cifar.file_source(cifar.CIFAR10, arguments, show, splits_of)


def splits_of(tables: cifar.Tables) -> dict[str, FederatedData]:
    """Each split as a single client of the split's name."""
    return {
        split: FederatedData.from_arrays(
            table, offsets=[0, len(table["image"])], client_ids=[split]
        )
        for split, table in tables.items()
    }


if __name__ == "__main__":
    sys.exit(main())
