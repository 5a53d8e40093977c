"""Prepares Stack Overflow for federated language models.

    fedcodist prepare stackoverflow --source stackoverflow.sqlite.lzma --output data/stackoverflow

The data set's card is datasets/stackoverflow/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcodist.config.command_line import Parser
from fedcodist.data.sqlite_file import decompress, is_compressed
from fedcodist.datasets import preparation
from fedcodist.datasets.stackexchange import DOMAINS
from fedcodist.datasets.stackoverflow import (
    Reader,
    Settings,
    check_settings,
    prepare_stackoverflow,
    sqlite_reader,
)

NAME = "Stack Overflow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    defaults = Settings()
    parser = Parser(
        prog="fedcodist prepare stackoverflow",
        description=f"Prepares {NAME} as a folder that fedcodist reads.",
    )
    parser.add_argument(
        "--source",
        required=True,
        help="TFF's stackoverflow.sqlite or stackoverflow.sqlite.lzma",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    for name, text in (
        ("vocabulary", "most frequent words"),
        ("pieces", "word pieces in place of words"),
        ("train-clients", "users of the pool of all clients"),
        ("distillation-sentences", "drawn from all other users' (default: all)"),
        ("evaluation-sentences", "drawn from each of heldout and test"),
        ("seed", "of all draws"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        shown = "" if default is None else f" (default: {default:,})"
        parser.add_argument(f"--{name}", type=int, default=default, help=text + shown)
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that read at once (default: CPUs)"
    )
    settings = parser.parse_args(arguments)
    # The work folder lets a stopped preparation continue; it is removed when everything is written.
    output = Path(os.path.abspath(settings.output))
    work = output.parent / f".{output.name}.work"
    status = preparation.run(
        output,
        lambda show: open_source(settings, work, show),
        data_set=NAME,
        source="Stack Overflow as published by TensorFlow Federated, https://www.tensorflow.org/federated",
        licence="CC BY-SA 3.0 by the users of Stack Overflow; attribute authors and site",
    )
    if status == 0:
        shutil.rmtree(work, ignore_errors=True)
    return status


def open_source(
    arguments: argparse.Namespace, work: Path, show: preparation.Show
) -> preparation.Source:
    """Checks the arguments and the file, and says what the manifest records; `build` reads the file."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings._fields})
    check_settings(settings)
    if arguments.processes < 1:
        raise ValueError(f"--processes must be at least 1, got {arguments.processes}")
    if arguments.source == "tff" and not Path("tff").exists():
        raise ValueError(
            "--source must be TFF's file stackoverflow.sqlite.lzma, got 'tff': the package "
            "tensorflow-federated, which downloads it, cannot be installed beside this JAX"
        )
    preparation.check_is_file(Path(arguments.source))
    show(Path(arguments.source).name, 0.0)
    recorded: dict[str, Any] = {
        "source": "tff sqlite",
        **settings._asdict(),
        "domains": list(DOMAINS),
        "sha256": preparation.file_checksum(Path(arguments.source), "sha256"),
    }
    digest = hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()
    shards = work / digest[:16]
    skipped: dict[str, int] = {}

    def build(show: preparation.Show) -> Mapping[str, Any]:
        for folder in work.glob("*"):
            if folder != shards:  # those of another source, or of other arguments
                shutil.rmtree(folder)
        shards.mkdir(parents=True, exist_ok=True)
        try:
            reader = opened(arguments, shards, show)
            prepared = prepare_stackoverflow(reader, settings, shards, arguments.processes, show)
        except ValueError:
            shutil.rmtree(work, ignore_errors=True)  # to continue would not help
            raise
        skipped.update(prepared.skipped)
        return prepared.splits

    return preparation.Source(recorded, build, skipped=lambda: skipped)


def opened(arguments: argparse.Namespace, work: Path, show: preparation.Show) -> Reader:
    """Reads a file; a compressed one is unpacked once into the work folder."""
    path = Path(arguments.source)
    if not is_compressed(path):
        return sqlite_reader(path)
    plain = work / "unpacked.sqlite"
    if not plain.exists():
        show(f"unpacking {path.name}", 0.0)
        decompress(path, plain.with_suffix(".partial"))
        plain.with_suffix(".partial").rename(plain)
    return sqlite_reader(plain)
