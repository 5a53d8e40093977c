"""Text as BERT's tokens: [CLS], word pieces, [SEP], padding (Devlin et al., 2019).

Needs the package `tokenizers`, which normalises and splits text as BERT does. `word_pieces` learns the
pieces, so the same texts give the same vocabulary on every machine.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.core.checks import check_integer, check_several, shown
from fedcodist.core.extras import check_installed
from fedcodist.data import word_pieces

PADDING, UNKNOWN, BEGINNING, END, MASKED = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PADDING, UNKNOWN, BEGINNING, END, MASKED)
CONTINUES = "##"
"""First characters of every piece that does not begin a word."""

_AT_ONCE = 10_000  # texts whose encodings exist at the same time


@dataclass(frozen=True)
class BertVocabulary:
    """Word pieces by number. Padding is 0; the other special pieces may have any number.

    Attributes:
      pieces: all pieces, the special ones included, as in a `vocab.txt`.
      lower_case: whether text becomes lower case and loses accents, as for BERT's "uncased" models.

    Raises:
      ValueError: a piece occurs twice, a special piece is missing, or the first piece is not [PAD].
    """

    pieces: tuple[str, ...]
    lower_case: bool = True

    def __post_init__(self) -> None:
        known = set(self.pieces)
        if missing := [piece for piece in SPECIAL if piece not in known]:
            raise ValueError(f"pieces must have {missing[0]}")
        if self.pieces[0] != PADDING:
            raise ValueError(f"the first of pieces must be {PADDING}, got {self.pieces[0]!r}")
        if len(known) < len(self.pieces):
            twice = Counter(self.pieces).most_common(1)[0][0]
            raise ValueError(f"pieces must be distinct, got {twice!r} twice")

    @classmethod
    def learn(cls, texts: Iterable[str], size: int, lower_case: bool = True) -> BertVocabulary:
        """Learns at most `size` pieces from texts, and adds the special ones; by falling frequency.

        Raises:
          ValueError, TypeError: the texts are one text or have no word, or `size` is no integer or
            smaller than the number of characters.
        """
        if isinstance(texts, str | bytes):  # its letters would be texts
            raise TypeError(f"texts must be several texts, got {shown(texts)}.")
        check_integer("size", size, low=1)
        splitter = _splitter(lower_case)
        counts: Counter[str] = Counter()
        for text in texts:
            text = splitter.normalizer.normalize_str(text)
            counts.update(word for word, _ in splitter.pre_tokenizer.pre_tokenize_str(text))
        learnt = word_pieces.learn_pieces(counts, size)
        marked = (
            CONTINUES + piece.removeprefix(word_pieces.CONTINUES)
            if piece.startswith(word_pieces.CONTINUES)
            else piece
            for piece in learnt
        )
        return cls((*SPECIAL, *marked), lower_case)

    @classmethod
    def load(cls, path: str | os.PathLike[str], lower_case: bool = True) -> BertVocabulary:
        """Reads a `vocab.txt`, one piece a line, such as those beside BERT's released weights.

        Raises:
          ValueError: names the path; the file is not a BERT vocabulary.
        """
        try:
            # "utf-8-sig" drops the byte order mark that some editors write.
            lines = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
            return cls(tuple(lines), lower_case)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is no BERT vocabulary: {error}.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `vocab.txt`; `lower_case` is not in it."""
        Path(path).write_text("".join(f"{piece}\n" for piece in self.pieces), encoding="utf-8")

    @property
    def size(self) -> int:
        """Number of pieces, the special ones included."""
        return len(self.pieces)

    def number(self, piece: str) -> int:
        """The number of a piece. Raises KeyError for an unknown piece."""
        return self._numbers[piece]

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Texts as [CLS], pieces, [SEP] and padding.

        Longer texts lose their last pieces. Numbers other than 0 are the attention mask. A special piece
        that is written in a text is read as any other text.

        Returns:
          uint16 or int32 `[texts, length]`.

        Raises:
          ValueError, TypeError: a length that is no integer of at least 2, or one text alone.
        """
        check_several("texts", texts)  # the letters of one text would be texts
        check_integer("length", length, low=2)
        dtype = np.uint16 if self.size <= 1 << 16 else np.int32
        tokens = np.zeros((len(texts), length), dtype)
        tokens[:, 0] = self.number(BEGINNING)
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            for row, encoding in zip(
                tokens[start:], self._tokenizer.encode_batch(some), strict=False
            ):
                numbers = encoding.ids[: length - 2]
                row[1 : 1 + len(numbers)] = numbers
                row[1 + len(numbers)] = self.number(END)
        return tokens

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """The words of tokens [length] up to [SEP] or padding, without [CLS].

        Raises:
          ValueError: a number that is no token.
        """
        words: list[str] = []
        for token in map(int, tokens):
            if not 0 <= token < self.size:
                raise ValueError(f"tokens must be in 0..{self.size - 1}, got {token}")
            piece = self.pieces[token]
            if piece in (END, PADDING):
                break
            if piece.startswith(CONTINUES) and words:
                words[-1] += piece.removeprefix(CONTINUES)
            elif piece != BEGINNING:
                words.append(piece)
        return words

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        splitter = _splitter(self.lower_case)
        splitter.model = _tokenizers().models.WordPiece(
            self._numbers,
            unk_token=UNKNOWN,
            max_input_chars_per_word=100,
            continuing_subword_prefix=CONTINUES,
        )
        return splitter


def _splitter(lower_case: bool) -> Any:
    """A tokenizer with BERT's normalisation and splitting into words, but without pieces."""
    tokenizers = _tokenizers()
    splitter = tokenizers.Tokenizer(tokenizers.models.WordPiece({UNKNOWN: 0}, unk_token=UNKNOWN))
    splitter.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return splitter


def check_tokenizers() -> None:
    """Raises ImportError where the package is missing that splits texts into pieces."""
    check_installed("splitting text as BERT does", "tokenizers", "text")


def _tokenizers() -> Any:
    check_tokenizers()
    import tokenizers

    return tokenizers
