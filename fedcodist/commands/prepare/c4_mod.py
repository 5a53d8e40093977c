"""Prepares C4 as unlabelled text in another data set's vocabulary.

    fedcodist prepare c4_mod --source FOLDER --vocabulary-of data/stackoverflow --output data/c4_mod

The data set's card is datasets/c4_mod/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcodist.config.command_line import Parser
from fedcodist.data import load_prepared, manifest, vocabulary_of
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.text import TRAIN_LENGTH
from fedcodist.data.word_pieces import piece_splitter
from fedcodist.datasets import preparation
from fedcodist.datasets.c4 import c4_files, read_c4

NAME = "C4-MOD"
SENTENCES = 4_488_694  # the paper's


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare c4_mod",
        description=f"Prepares {NAME} as a folder that fedcodist reads.",
    )
    parser.add_argument(
        "--source", required=True, type=Path, help="a .json or .json.gz of C4, or a folder of them"
    )
    parser.add_argument(
        "--vocabulary-of",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="prepared text whose vocabulary numbers the words",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--sentences",
        type=int,
        default=SENTENCES,
        help=f"at most, the first ones (default: {SENTENCES:,})",
    )
    settings = parser.parse_args(arguments)
    return preparation.run(
        settings.output,
        lambda show: open_source(settings, show),
        data_set=NAME,
        source="C4 (Colossal Clean Crawled Corpus), https://www.tensorflow.org/datasets/catalog/c4",
        licence="ODC-BY; the pages themselves are under Common Crawl's terms of use",
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Checks the files, and says what the manifest records of them; `build` reads them."""
    files = c4_files(arguments.source)
    if arguments.sentences < 1:
        raise ValueError(f"--sentences must be at least 1, got {arguments.sentences}")
    text = load_prepared(arguments.vocabulary_of, verify=False)
    vocabulary = vocabulary_of(text)
    text_manifest = manifest(arguments.vocabulary_of)
    # Of this folder, which may be large, only the words are copied.
    words = text_manifest["splits"]["vocabulary"]["files"]["word"]["sha256"]
    path = Path(arguments.vocabulary_of, "vocabulary", "word.npy")
    if preparation.file_checksum(path, "sha256") != words:
        raise ValueError(f"{path} differs from its sha256 in the manifest: corrupt or edited")
    split = piece_splitter(vocabulary.words) if text_manifest["arguments"].get("pieces") else None
    recorded = {
        "vocabulary": words,
        "sentences": arguments.sentences,
        "sha256": {},
        "domains": [],
    }
    for number, path in enumerate(files):
        show(path.name, number / len(files))
        recorded["sha256"][path.name] = preparation.file_checksum(path, "sha256")
    skipped: dict[str, int] = {}

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        sentences = read_c4(files, vocabulary, TRAIN_LENGTH, arguments.sentences, split, show)
        skipped.update(sentences.skipped)
        data = FederatedData.of_one_client({"tokens": sentences.tokens}, "c4")
        return {"distillation": data, "vocabulary": text["vocabulary"]}

    return preparation.Source(recorded, build, skipped=lambda: skipped)
