"""Prepares the ADE corpus as sentences with and without adverse drug effects.

    fedcodist prepare ade --source FOLDER --output data/ade

The data set's card is datasets/ade/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import piece_preparation, preparation
from fedcodist.datasets.ade import deal_documents, read_ade

NAME = "ADE corpus"
LENGTH = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare ade",
        description=f"Prepares the {NAME} as a folder that fedcodist reads.",
    )
    parser.add_argument(
        "--source", required=True, type=Path, help="folder with DRUG-AE.rel and ADE-NEG.txt"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    piece_preparation.add_arguments(parser, LENGTH)
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings),
        data_set=NAME,
        source="ADE-Corpus-V2, H. Gurulingappa et al., 2012",
        licence="distributed free for research; cite the paper",
    )


def open_source(arguments: argparse.Namespace) -> preparation.Source:
    """Reads the files, and says what the manifest records of them."""
    recorded = piece_preparation.recorded_arguments(arguments)
    sentences = read_ade(arguments.source)
    rows = deal_documents(sentences.documents, arguments.seed)

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        show("learning word pieces", 0.0)
        training = [sentences.texts[row] for row in rows["train"]]
        vocabulary = piece_preparation.vocabulary_for(arguments, training)
        show("encoding", 0.5)
        tokens = vocabulary.encode(sentences.texts, arguments.length).astype(np.int32)
        documents = np.array(sentences.documents)
        splits = {
            name: FederatedData.from_arrays(
                {"tokens": tokens[indices], "label": sentences.labels[indices]},
                client_of_row=documents[indices],
            )
            for name, indices in rows.items()
        }
        return splits | {"vocabulary": piece_preparation.vocabulary_split(vocabulary)}

    return preparation.Source(
        recorded | {"sha256": sentences.sha256}, build, skipped=lambda: sentences.skipped
    )
