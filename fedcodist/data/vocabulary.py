"""Words as tokens: padding 0, beginning of a sentence 1, end 2, words from 3 on, unknown words last.

The numbering is FedJAX's, so 10,000 words make 10,004 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcodist.core.checks import check_integer, shown

PAD, BOS, EOS = 0, 1, 2
_FIRST_WORD = 3
# Longer words are left out of vocabularies: in fixed-width text every word takes as much memory.
_LONGEST_WORD = 40
UNKNOWN = "<unknown>"


@dataclass(frozen=True)
class Vocabulary:
    """The known words, by falling frequency.

    Raises:
      ValueError: there are no words, or a word is empty or occurs twice.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("words must not be empty")
        if "" in self.words or len(set(self.words)) < len(self.words):
            raise ValueError("words must be distinct and not empty")

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], size: int) -> Vocabulary:
        """The `size` most frequent words, or all if there are fewer; equally frequent ones by name.

        Raises:
          ValueError, TypeError: a size that is no integer of at least 1, or no word of at most 40
            characters.
        """
        check_integer("size", size, low=1)
        # Fixed-width text also loses a NUL at the end.
        short = (w for w in counts if 0 < len(w) <= _LONGEST_WORD and not w.endswith("\0"))
        ordered = sorted(short, key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[:size]))

    @property
    def size(self) -> int:
        """Number of tokens, the four special ones included."""
        return len(self.words) + 4

    @property
    def unknown(self) -> int:
        """The token of every word that is not in the vocabulary."""
        return len(self.words) + _FIRST_WORD

    @functools.cached_property
    def _token_of(self) -> dict[str, int]:
        return {word: _FIRST_WORD + index for index, word in enumerate(self.words)}

    def encode(self, sentences: Iterable[Sequence[str]], length: int) -> np.ndarray:
        """Sentences of words as tokens.

        A sentence becomes its beginning, words and end, cut to the first `length + 1` tokens or padded.
        So `length` of its tokens are to be predicted.

        Returns:
          uint16 or int32 `[sentences, length + 1]`.

        Raises:
          ValueError, TypeError: a length that is no integer of at least 1, or text in place of lists of
            words.
        """
        check_integer("length", length, low=1)
        sentences = sentences if isinstance(sentences, str | bytes) else list(sentences)
        check_sentences("sentences", sentences)
        dtype = np.uint16 if self.size <= 1 << 16 else np.int32
        tokens = np.zeros((len(sentences), length + 1), dtype)
        tokens[:, 0] = BOS
        for row, words in zip(tokens, sentences, strict=True):
            known = [self._token_of.get(word, self.unknown) for word in words[:length]]
            row[1 : 1 + len(known)] = known
            if len(known) < length:
                row[1 + len(known)] = EOS
        return tokens

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """The words of tokens [length] up to the end of the sentence; unknown words become `<unknown>`.

        Raises:
          ValueError: a number that is no token.
        """
        words = []
        for token in map(int, tokens):
            if not 0 <= token < self.size:
                raise ValueError(f"tokens must be in 0..{self.size - 1}, got {token}")
            if token == EOS:
                break
            if token == self.unknown:
                words.append(UNKNOWN)
            elif token >= _FIRST_WORD:
                words.append(self.words[token - _FIRST_WORD])
        return words


def check_sentences(name: str, sentences: Sequence[Sequence[str]]) -> None:
    """Raises TypeError for text in place of a list of words, since its letters would become words."""
    if isinstance(sentences, str | bytes):
        raise TypeError(f"{name} must be lists of words, got {shown(sentences)}.")
    for index, words in enumerate(sentences):
        if isinstance(words, str | bytes):
            raise TypeError(f"{name}[{index}] must be a list of words, got {shown(words)}.")
