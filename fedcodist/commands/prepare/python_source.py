"""Prepares the standard library's source as text.

    fedcodist prepare python_source --output data/python_source

The data set's card is datasets/python_source/README.md.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcodist.config.command_line import Parser
from fedcodist.datasets import preparation
from fedcodist.datasets.python_source import DOMAINS, left_out_modules, read_python_source
from fedcodist.datasets.text_preparation import add_arguments, check_values, source_of

NAME = "Python's standard library"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare python_source",
        description=f"Prepares {NAME} as a folder that fedcodist reads.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--source",
        type=Path,
        help="folder of a standard library of about this version (default: the running Python's)",
    )
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings, show),
        data_set=NAME,
        source="Python's standard library, as installed, https://www.python.org",
        licence="Python Software Foundation License Version 2; single files have terms of their own",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Reads the library, and says what the manifest records of it."""
    check_values(arguments)
    source = read_python_source(arguments.source, show)
    recorded: dict[str, Any] = {
        "python": platform.python_version(),
        "files": source.files,
        "sha256": source.sha256,
        "skipped": list(source.skipped),
    }
    notices = [f"skipped {name}: it cannot be read as Python" for name in source.skipped]
    if arguments.source is not None:
        # A folder does not tell its version. The running Python decides what is read and how.
        recorded["python"] = f"unknown, read by {platform.python_version()}"
        recorded["left_out"] = left_out_modules(arguments.source)
        if recorded["left_out"]:
            names = ", ".join(recorded["left_out"])
            notices.append(f"left out {names}: this Python's library does not have them")
    return source_of(source.clients, DOMAINS, arguments, recorded, notices)
