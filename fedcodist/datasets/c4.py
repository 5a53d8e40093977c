"""C4 as in the codistillation paper: the first sentence of each paragraph, in words.

C4's files hold one JSON object a line, `{"text": ..., "timestamp": ..., "url": ...}`, plain or
gzip-compressed. They are read line by line.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcodist.data.unpacking import check_unpacked
from fedcodist.data.vocabulary import Vocabulary

LONGEST_LINE = 1 << 24
"""Bytes; longer lines are skipped."""

_GZIP_MAGIC = b"\x1f\x8b"
_ROWS = 1 << 16

# A sentence ends at . ! or ? before white space and something that can begin one.
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"(?:\b(?i:mr|mrs|ms|dr|prof|st|vs|etc|inc|ltd|co|jr|sr|e\.g|i\.e)|(?<!['’\w])[A-Z])\.$"
)
_NUMBER = re.compile(r"\bno\.$", re.IGNORECASE)  # before digits alone: it is a word too
# Typographic apostrophes are words, as for NLTK's tokeniser; straight ones within words stay.
_WORD = re.compile(r"[^\W_]+(?:['.,:-][^\W_]+)*|\.{3}|[^\w\s]|_+")
_APOSTROPHE = "’"
# The part after an apostrophe -> the words before it: "aren ’ t" becomes "aren’t". These are the paper's
# rules, except those for "’ s", which its last rule covers.
_CONTRACTIONS = {
    "t": frozenset(
        [
            "aren",
            "can",
            "couldn",
            "didn",
            "doesn",
            "don",
            "hadn",
            "hasn",
            "haven",
            "isn",
            "mightn",
            "mustn",
            "shan",
            "shouldn",
            "weren",
            "won",
            "wouldn",
        ]
    ),
    "ll": frozenset(["he", "i", "she", "they", "what", "who", "you"]),
    "re": frozenset(["they", "we", "what", "who", "you"]),
    "ve": frozenset(["i", "they", "we", "what", "who", "you"]),
    "d": frozenset(["he", "i", "she", "they", "we", "who", "you"]),
    "m": frozenset(["i"]),
}


class Sentences(NamedTuple):
    """The sentences that were read.

    Attributes:
      tokens: int [sentences, length + 1], as `Vocabulary.encode` makes them.
      skipped: reason -> number of lines or paragraphs that are not in `tokens`.
    """

    tokens: np.ndarray
    skipped: dict[str, int]


def read_c4(
    files: Sequence[Path],
    vocabulary: Vocabulary,
    length: int,
    limit: int | None = None,
    split: Callable[[str], Sequence[str]] | None = None,
    show: Callable[[str, float], None] = lambda text, fraction: None,
) -> Sentences:
    """The first sentence of each paragraph of each page, as tokens.

    Lines that are not UTF-8, not JSON, without a text or longer than 16 MiB are skipped and counted,
    and so are paragraphs without a word.

    Args:
      files: in the order in which they are read.
      vocabulary: of words, or of word pieces.
      length: number of tokens to predict in a sentence; longer ones are cut.
      limit: largest number of sentences, the first ones; None takes all.
      split: a function from a word to its pieces, for a vocabulary of pieces.
      show: called with the file's name and the fraction of files that is done.

    Raises:
      ValueError: no file, one that cannot be read or is cut off, or no sentence in all of them.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if not files:
        raise ValueError("there are no files of C4")
    skipped: Counter[str] = Counter()

    def sentences() -> Iterator[list[str]]:
        for number, path in enumerate(files):
            show(path.name, number / len(files))
            yield from _first_sentences(path, skipped)

    parts: list[np.ndarray] = []
    waiting: list[Sequence[str]] = []
    for words in itertools.islice(sentences(), limit):
        cut = words[:length]  # a word has at least one piece
        waiting.append([piece for word in cut for piece in split(word)] if split else cut)
        if len(waiting) == _ROWS:
            parts.append(vocabulary.encode(waiting, length))
            waiting = []
    tokens = np.concatenate([*parts, vocabulary.encode(waiting, length)])
    if not len(tokens):
        raise ValueError(f"{', '.join(path.name for path in files)}: no sentence of C4")
    return Sentences(tokens, dict(sorted(skipped.items())))


def first_sentence(paragraph: str) -> list[str]:
    """The words of a paragraph's first sentence, lower case, contractions repaired.

    Empty for a sentence without letters and digits. Repaired words have straight apostrophes, as in
    Stack Overflow's vocabulary.

    >>> first_sentence("We aren’t in Kansas. Are we, Dr. Who?")
    ['we', "aren't", 'in', 'kansas', '.']
    """
    text = " ".join(paragraph.split())
    sentence = text
    for end in _END.finditer(text):
        before, after = text[max(0, end.start() - 8) : end.start()], text[end.end()]
        is_number = _NUMBER.search(before) and after.isdigit()
        if not is_number and not _ABBREVIATION.search(before):
            sentence = text[: end.start() + len(end.group().rstrip())]
            break
    words = repaired(_WORD.findall(sentence.lower()))
    return words if any(letter.isalnum() for word in words for letter in word) else []


def repaired(words: Sequence[str]) -> list[str]:
    """Joins contractions and possessives that a typographic apostrophe has split.

    These are the 53 rules of the paper's appendix G. Known contractions are joined, such as "aren ’ t".
    The last rule joins "’ s", here also with the word before it. The results have straight apostrophes.
    """
    result: list[str] = []
    index = 0
    while index < len(words):
        before = result[-1] if result else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        is_contraction = before in _CONTRACTIONS.get(after, ())
        is_possessive = after == "s" and before[-1:].isalnum()
        if words[index] == _APOSTROPHE and (is_contraction or is_possessive):
            result[-1] = f"{before}'{after}"
            index += 2
        else:
            result.append(words[index])
            index += 1
    return result


def _first_sentences(path: Path, skipped: Counter[str]) -> Iterator[list[str]]:
    for line in _lines(path):
        if line is None:
            skipped["too long"] += 1
            continue
        try:
            text = _text(line)
        except (ValueError, RecursionError):
            if not line.endswith(b"\n"):
                size = path.stat().st_size
                raise ValueError(
                    f"{path} is cut off: it ends at byte {size:,}, inside a page"
                ) from None
            text = None
        if text is None:
            skipped["malformed"] += 1
            continue
        for paragraph in text.split("\n"):
            if words := first_sentence(paragraph):
                yield words
            else:
                skipped["empty"] += 1


def _text(line: bytes) -> str | None:
    """A page's text, None without one. Raises ValueError or RecursionError for what is not JSON."""
    page = json.loads(line.decode("utf-8-sig"))
    text = page.get("text") if isinstance(page, dict) else None
    return text if isinstance(text, str) else None


def _lines(path: Path) -> Iterator[bytes | None]:
    """Lines of a file; None for one that is too long. Raises ValueError for a damaged file."""
    try:
        with open(path, "rb") as raw:
            is_compressed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            file: Any = gzip.open(raw) if is_compressed else raw  # noqa: SIM115
            unpacked, size = 0, path.stat().st_size
            while line := file.readline(LONGEST_LINE + 1):
                unpacked += len(line)
                is_long = len(line) > LONGEST_LINE
                while not line.endswith(b"\n") and (rest := file.readline(1 << 16)):
                    line = rest
                    unpacked += len(line)
                    check_unpacked(path, unpacked, size)
                check_unpacked(path, unpacked, size)
                if is_long or line.strip():
                    yield None if is_long else line
    except EOFError:
        size = path.stat().st_size
        raise ValueError(f"{path} is cut off: it ends at byte {size:,}, inside gzip data") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def c4_files(source: Path) -> list[Path]:
    """A file itself, or the files in a folder with names of C4's files, sorted.

    Raises:
      ValueError: there are none.
    """
    if source.is_file():
        return [source]
    paths: Iterable[Path] = (
        path for pattern in ("*.json", "*.jsonl", "*.json.gz") for path in source.glob(pattern)
    )
    files = sorted(paths)
    if not files:
        raise ValueError(f"--source {source} is neither a file of C4 nor a folder that has some")
    return files
