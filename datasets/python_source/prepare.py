"""Prepares the standard library's source as text: see README.md beside this program.

python datasets/python_source/prepare.py --output data/python_source
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from fedcodist.datasets import preparation
from fedcodist.datasets.python_source import DOMAINS, read_python_source
from fedcodist.datasets.text_preparation import argument_parser, source_of

NAME = "Python's standard library"


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(NAME)
    parser.add_argument(
        "--source", type=Path, help="folder of a standard library (default: the running Python's)"
    )
    arguments = parser.parse_args(argv)
    return preparation.run(
        arguments.output,
        lambda show: open_source(arguments, show),
        data_set=NAME,
        source="Python's standard library, as installed, https://www.python.org",
        licence="Python Software Foundation License Version 2; single files have terms of their own",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    source = read_python_source(arguments.source, show)
    recorded = {
        "python": platform.python_version(),
        "files": source.files,
        "sha256": source.sha256,
        "skipped": list(source.skipped),
    }
    notices = [f"skipped {name}: it cannot be read as Python" for name in source.skipped]
    return source_of(source.clients, DOMAINS, arguments, recorded, notices)


if __name__ == "__main__":
    sys.exit(main())
