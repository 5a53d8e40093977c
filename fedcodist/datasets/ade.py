"""Sentences of the ADE corpus, labelled by whether they report an adverse effect of a drug.

`DRUG-AE.rel` has a line per relation, `PubMed id|sentence|effect|begin|end|drug|begin|end`.
`ADE-NEG.txt` has a line per sentence without any relation, `PubMed id NEG sentence`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcodist.data.client_pools import split_clients

POSITIVE_FILE, NEGATIVE_FILE = "DRUG-AE.rel", "ADE-NEG.txt"
FILES = (POSITIVE_FILE, NEGATIVE_FILE)
SHARES = {"train": 0.8, "held_out": 0.1, "test": 0.1}

# A sentence may contain bars; the fields around it are ids, names and offsets.
_RELATION = re.compile(
    r"(?P<document>\d{1,12})\|(?P<sentence>.+)\|[^|]+\|\d+\|\d+\|[^|]+\|\d+\|\d+", re.ASCII
)
_NEGATIVE = re.compile(r"(?P<document>\d{1,12}) NEG (?P<sentence>.+)", re.ASCII)


class Sentences(NamedTuple):
    """The contents of the files.

    Attributes:
      texts: the sentences, with single spaces between words.
      labels: int32 [sentences], 1 with an adverse effect of a drug, 0 without.
      documents: the PubMed id of each sentence.
      skipped: reason -> number of lines that give no new sentence.
      sha256: file name -> checksum.
    """

    texts: tuple[str, ...]
    labels: np.ndarray
    documents: tuple[str, ...]
    skipped: dict[str, int]
    sha256: dict[str, str]


def read_ade(source: str | os.PathLike[str]) -> Sentences:
    """Reads a folder with `DRUG-AE.rel` and `ADE-NEG.txt`.

    Every sentence occurs once in the result, positives first, each kind in the order of its file. A
    sentence with several relations, or of several documents ("A case report."), belongs to its first
    document, so no text is in two splits. A sentence in both files is positive: a relation was annotated
    in it, whereas negatives are the rest. Skipped lines, malformed ones included, are counted.

    Raises:
      ValueError: a file is missing, cannot be read, or has no sentence.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is not a folder; it must hold {' and '.join(FILES)}")
    skipped: Counter[str] = Counter()
    sha256, first_seen = {}, dict[str, tuple[str, int]]()
    for name, form, label in ((POSITIVE_FILE, _RELATION, 1), (NEGATIVE_FILE, _NEGATIVE, 0)):
        before = len(first_seen)
        content = _content(folder, name)
        sha256[name] = hashlib.sha256(content).hexdigest()
        for line in _lines(content):
            match = form.fullmatch(line) if line is not None else None
            sentence = " ".join(match["sentence"].split()) if match else ""
            if match is None or not sentence:
                skipped[f"malformed lines of {name}"] += 1
            elif sentence not in first_seen:
                first_seen[sentence] = (match["document"], label)
            elif first_seen[sentence][1] != label:
                skipped["sentences without an effect that have one in another line"] += 1
            elif label:
                skipped["further relations of a sentence"] += 1
            else:
                skipped["repeated sentences without an effect"] += 1
        if len(first_seen) == before:
            raise ValueError(f"{folder / name} has no sentence in the corpus's format")
    documents, labels = zip(*first_seen.values(), strict=True)
    return Sentences(
        tuple(first_seen),
        np.array(labels, np.int32),
        documents,
        dict(sorted(skipped.items())),
        sha256,
    )


def deal_documents(documents: Sequence[str], seed: int) -> dict[str, np.ndarray]:
    """Splits sentences by document, so that none has sentences in two splits.

    80 % of the documents are for training, 10 % are held out and 10 % are for tests.

    Args:
      documents: the PubMed id of each sentence.
      seed: of the deal.

    Returns:
      'train', 'held_out', 'test' -> indices of sentences, int64, ascending.

    Raises:
      ValueError: fewer than ten documents.
    """
    ids = sorted(set(documents), key=lambda document: (int(document), document))
    counts = {name: int(len(ids) * share) for name, share in SHARES.items()}
    counts["train"] += len(ids) - sum(counts.values())
    if min(counts.values()) < 1:
        raise ValueError(f"there must be at least 10 documents for three splits, got {len(ids)}")
    place = {document: index for index, document in enumerate(ids)}
    index_of_row = [place[document] for document in documents]
    return {
        name: np.flatnonzero(np.isin(index_of_row, indices))
        for name, indices in split_clients(len(ids), counts, seed).items()
    }


def _content(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ValueError(f"{folder / name} cannot be read: {error.strerror}") from None


def _lines(content: bytes) -> Iterator[str | None]:
    """Yields the lines that are not empty; None for a line that is not UTF-8."""
    for line in content.split(b"\n"):
        if line := line.strip():
            try:
                yield line.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                yield None
