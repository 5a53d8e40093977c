"""Prepares the Microsoft News Dataset.

    fedcodist prepare mind --source MINDsmall_train --evaluation MINDsmall_dev --output data/mind

The data set's card is datasets/mind/README.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import mind, piece_preparation, preparation

NAME = "MIND"
LENGTH = 24  # of FedKD's code
SHARES = {"train": 0.8, "held_out": 0.1, "test": 0.1}
SHARES_BESIDE_EVALUATION = {"train": 0.9, "held_out": 0.1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare mind",
        description=f"Prepares {NAME} as a folder that fedcodist reads.",
    )
    files = " and ".join(mind.FILES)
    parser.add_argument("--source", required=True, type=Path, help=f"folder with {files}")
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="FOLDER",
        help="another one, all of it for tests (default: a tenth of the source's users)",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    piece_preparation.add_arguments(parser, LENGTH)
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings, show),
        data_set=NAME,
        source="Microsoft News Dataset, https://msnews.github.io",
        licence="Microsoft Research License Terms: non-commercial research only",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Checks what is there, and says what the manifest records of it; `build` reads it."""
    recorded = piece_preparation.recorded_arguments(arguments) | {"sha256": {}}
    folders = {"source": arguments.source, "evaluation": arguments.evaluation}
    folders = {name: folder for name, folder in folders.items() if folder is not None}
    for name, folder in folders.items():
        for file in mind.FILES:
            if not (folder / file).is_file():
                raise ValueError(f"--{name} {folder} has no file {file}")
            show(f"{folder / file}", 0.0)
            checksum = preparation.file_checksum(folder / file, "sha256")
            recorded["sha256"][f"{name}/{file}"] = checksum
    skipped: Counter[str] = Counter()

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        show("reading articles", 0.0)
        news = mind.read_news(*folders.values())
        show("reading impressions", 0.1)
        impressions = {
            name: mind.read_impressions(folder, news.numbers) for name, folder in folders.items()
        }
        skipped.update(news.skipped)
        for of_folder in impressions.values():
            skipped.update(of_folder.skipped)
        show("dealing users", 0.6)
        shares = SHARES_BESIDE_EVALUATION if arguments.evaluation else SHARES
        rows = mind.deal_users(impressions["source"].users, shares, arguments.seed)
        splits = {"train": mind.training_examples(impressions["source"], rows.pop("train"))}
        for name, indices in rows.items():
            splits[name] = mind.evaluation_examples(impressions["source"], indices)
        if "evaluation" in impressions:
            everything = np.arange(len(impressions["evaluation"].users))
            splits["test"] = mind.evaluation_examples(impressions["evaluation"], everything)
        show("learning word pieces", 0.8)
        columns = splits["train"].columns.values()
        articles = np.unique(np.concatenate([np.unique(column) for column in columns]))
        vocabulary = piece_preparation.vocabulary_for(
            arguments, [news.titles[article] for article in articles if article]
        )
        tokens = vocabulary.encode(news.titles, arguments.length).astype(np.int32)
        tokens[0] = 0  # stands for no article and is all padding
        splits["news"] = FederatedData.from_arrays(
            {"tokens": tokens}, offsets=[0, len(tokens)], client_ids=["news"]
        )
        return splits | {"vocabulary": piece_preparation.vocabulary_split(vocabulary)}

    return preparation.Source(recorded, build, skipped=lambda: dict(sorted(skipped.items())))
