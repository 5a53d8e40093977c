"""Prepares CIFAR-10.

    fedcodist prepare cifar10 --source PATH --output data/cifar10

The data set's card is datasets/cifar10/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import cifar, preparation

ORIGIN = "CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare cifar10",
        description="Prepares CIFAR-10 as a folder that fedcodist reads.",
    )
    cifar.add_arguments(
        parser,
        "cifar-10-python.tar.gz, its unpacked folder or that folder's parent; or 'tfds'",
    )
    settings = parser.parse_args(arguments)
    return cifar.run_preparation(cifar.CIFAR10, settings, ORIGIN, open_source)


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Checks the source, and says what the manifest records of it."""
    if arguments.source == "tfds":
        return cifar.tfds_source(cifar.CIFAR10, "cifar10", arguments, splits_of)
    return cifar.file_source(cifar.CIFAR10, arguments, show, splits_of)


def splits_of(tables: cifar.Tables) -> dict[str, FederatedData]:
    """Each split as a single client of the split's name."""
    return {split: FederatedData.of_one_client(table, split) for split, table in tables.items()}
