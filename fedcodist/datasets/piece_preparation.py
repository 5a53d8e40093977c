"""Common code of the preparation programs of text for BERT: their arguments, and word pieces."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.data.bert_tokens import BertVocabulary, check_tokenizers
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.preparation import file_checksum

PIECES = 8_000


def add_arguments(parser: argparse.ArgumentParser, length: int) -> None:
    """Adds the arguments `--pieces`, `--vocabulary`, `--length` and `--seed`."""
    parser.add_argument(
        "--pieces",
        type=int,
        default=PIECES,
        help=f"word pieces to learn of the training texts (default: {PIECES:,})",
    )
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="vocab.txt of a released uncased BERT, in place of learnt pieces",
    )
    parser.add_argument(
        "--length", type=int, default=length, help=f"tokens of a text (default: {length})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the deal (default: 0)")


def recorded_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `add_arguments`, for the manifest.

    Raises:
      ValueError: a number out of range, or a vocabulary that cannot be read.
      ImportError: the package is missing that splits texts into pieces.
    """
    check_tokenizers()
    if arguments.pieces < 1:
        raise ValueError(f"--pieces must be at least 1, got {arguments.pieces}")
    if arguments.length < 2:
        raise ValueError(f"--length must be at least 2, got {arguments.length}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must not be negative, got {arguments.seed}")
    recorded: dict[str, Any] = {"length": arguments.length, "seed": arguments.seed}
    if arguments.vocabulary is None:
        return recorded | {"pieces": arguments.pieces}
    if not arguments.vocabulary.is_file():
        raise ValueError(f"--vocabulary must be an existing file, got {arguments.vocabulary}")
    BertVocabulary.load(arguments.vocabulary)
    return recorded | {"vocabulary_sha256": file_checksum(arguments.vocabulary, "sha256")}


def vocabulary_for(arguments: argparse.Namespace, texts: Iterable[str]) -> BertVocabulary:
    """The vocabulary of `--vocabulary`, or one of pieces learnt from the texts."""
    if arguments.vocabulary is not None:
        return BertVocabulary.load(arguments.vocabulary)
    try:
        return BertVocabulary.learn(texts, arguments.pieces)
    except ValueError as error:
        raise ValueError(f"--pieces={arguments.pieces} cannot be learnt: {error}") from None


def vocabulary_split(vocabulary: BertVocabulary) -> FederatedData:
    """The pieces as a split of prepared data: column `piece`, by number."""
    pieces = np.array(vocabulary.pieces)
    return FederatedData.of_one_client({"piece": pieces}, "vocabulary")
