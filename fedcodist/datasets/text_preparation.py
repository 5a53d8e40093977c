"""Common code of the preparation programs of text: their arguments, and splits of a source's users."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.text import SPLITS, Users, check_shares, text_splits
from fedcodist.datasets import preparation

_SHARES = (0.6, 0.2, 0.1, 0.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all programs have."""
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--vocabulary", type=int, default=10_000, help="most frequent words (default: 10,000)"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs=len(SPLITS),
        default=_SHARES,
        metavar=tuple(name.upper() for name in SPLITS),
        help=f"of the users (default: {' '.join(map(str, _SHARES))})",
    )
    parser.add_argument(
        "--max-examples", type=int, help="most sentences per user and domain (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the deal (default: 0)")


def check_values(arguments: argparse.Namespace) -> None:
    """Raises ValueError that names an argument out of range; to be called before reading."""
    if not 1 <= arguments.vocabulary < 1 << 16:
        raise ValueError(f"--vocabulary must be in 1..65535, got {arguments.vocabulary}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must not be negative, got {arguments.seed}")
    check_shares("--shares", arguments.shares)
    if arguments.max_examples is not None and arguments.max_examples < 1:
        raise ValueError(f"--max-examples must be at least 1, got {arguments.max_examples}")


def source_of(
    users: Users,
    domains: Sequence[str],
    arguments: argparse.Namespace,
    recorded: Mapping[str, Any],
    notices: Sequence[str] = (),
) -> preparation.Source:
    """A source whose splits are dealt as the arguments say.

    Args:
      users: user -> domain -> sentences of words.
      domains: their names, written into the manifest.
      arguments: those of `add_arguments`.
      recorded: other descriptions of the source for the manifest.
      notices: lines that the user must see.
    """

    def build(show: preparation.Show) -> dict[str, FederatedData]:
        return text_splits(
            users,
            domains,
            arguments.shares,
            arguments.vocabulary,
            arguments.max_examples,
            arguments.seed,
        )

    dealing = {
        "domains": list(domains),
        "vocabulary": arguments.vocabulary,
        "shares": dict(zip(SPLITS, arguments.shares, strict=True)),
        "max_examples": arguments.max_examples,
        "seed": arguments.seed,
    }
    return preparation.Source({**recorded, **dealing}, build, tuple(notices))
