"""Prepares sites of the Stack Exchange data dump as text: see README.md beside this program.

python datasets/stackexchange/prepare.py --source FOLDER --output data/stackexchange
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedcodist.datasets import preparation
from fedcodist.datasets.stackexchange import DOMAINS, read_posts
from fedcodist.datasets.text_preparation import argument_parser, source_of

NAME = "Stack Exchange"


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(NAME)
    parser.add_argument(
        "--source",
        required=True,
        type=Path,
        help="Posts.xml of a site, a folder that has one, or a folder of such folders",
    )
    arguments = parser.parse_args(argv)
    return preparation.run(
        arguments.output,
        lambda show: open_source(arguments, show),
        data_set=NAME,
        source="Stack Exchange Data Dump, https://archive.org/details/stackexchange",
        licence="CC BY-SA 2.5, 3.0 or 4.0 by date of the post; attribute author and site",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    posts = read_posts(arguments.source, show)
    recorded = {"posts": posts.read, "skipped": posts.skipped, "sha256": posts.sha256}
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in posts.skipped.items())
    notices = [f"{posts.read:,} posts; skipped: {skipped or 'none'}"]
    return source_of(posts.users, DOMAINS, arguments, recorded, notices)


if __name__ == "__main__":
    sys.exit(main())
