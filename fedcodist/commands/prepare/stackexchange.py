"""Prepares sites of the Stack Exchange data dump as text.

    fedcodist prepare stackexchange --source FOLDER --output data/stackexchange

The data set's card is datasets/stackexchange/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcodist.config.command_line import Parser
from fedcodist.datasets import preparation
from fedcodist.datasets.stackexchange import DOMAINS, read_posts
from fedcodist.datasets.text_preparation import add_arguments, check_values, source_of

NAME = "Stack Exchange"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare stackexchange",
        description=f"Prepares {NAME} as a folder that fedcodist reads.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--source",
        required=True,
        type=Path,
        help="Posts.xml of a site, a folder that has one, or a folder of such folders",
    )
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings, show),
        data_set=NAME,
        source="Stack Exchange Data Dump, https://archive.org/details/stackexchange",
        licence="CC BY-SA 2.5, 3.0 or 4.0 by date of the post; attribute author and site",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Reads the posts, and says what the manifest records of them."""
    check_values(arguments)
    posts = read_posts(arguments.source, show)
    recorded = {"posts": posts.read, "skipped": posts.skipped, "sha256": posts.sha256}
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in posts.skipped.items())
    notices = [f"{posts.read:,} posts; skipped: {skipped or 'none'}"]
    return source_of(posts.users, DOMAINS, arguments, recorded, notices)
