"""Word pieces: parts of words, learnt from word counts, so that hardly any word is unknown.

Pieces are learnt by repeatedly merging the most frequent pair (Sennrich et al., 2016,
https://arxiv.org/abs/1508.07909). A word is split from its beginning into the longest pieces (Schuster
and Nakajima, 2012).
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

CONTINUES = "·"
"""First character of every piece that does not begin a word; it is in no ASCII text."""

_LONGEST_WORD = 100
# Most frequent words, to save time. A character that is only in rarer words makes these unknown.
_LEARNT_FROM = 50_000


def learn_pieces(counts: Mapping[str, int], size: int) -> tuple[str, ...]:
    """Learns pieces from word counts; returns them by falling frequency.

    Args:
      counts: word -> how often it occurs.
      size: number of pieces; fewer where all words have become single pieces.

    Raises:
      ValueError: `size` is smaller than the number of characters, or there are no words.
    """
    # Fixed-width text, in which pieces are stored, loses NUL at the end.
    usable = [
        word
        for word in counts
        if 0 < len(word) <= _LONGEST_WORD and CONTINUES not in word and "\0" not in word
    ]
    if not usable:
        raise ValueError("counts must have a word")
    chosen = sorted(usable, key=lambda word: (-counts[word], word))[:_LEARNT_FROM]
    words = [[word[0], *(CONTINUES + letter for letter in word[1:])] for word in chosen]
    pieces = {piece for word in words for piece in word}
    if len(pieces) > size:
        raise ValueError(f"size must be at least {len(pieces)}, the number of characters")
    weights = [counts[word] for word in chosen]
    pairs: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += weights[index]
            places[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while heap and len(pieces) < size:
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count:
            continue  # an outdated count, from before a merge
        merged = pair[0] + pair[1].removeprefix(CONTINUES)
        pieces.add(merged)
        changed = set()
        for index in places[pair]:
            word, weight = words[index], weights[index]
            for old in itertools.pairwise(word):
                pairs[old] -= weight
                changed.add(old)
            words[index] = word = _merge(word, pair, merged)
            for new in itertools.pairwise(word):
                pairs[new] += weight
                places[new].add(index)
                changed.add(new)
        for candidate in changed:
            if pairs[candidate] > 0:
                heapq.heappush(heap, (-pairs[candidate], candidate))
    split, used = piece_splitter(pieces), Counter[str]()
    for text, weight in zip(chosen, weights, strict=True):
        for piece in split(text):
            used[piece] += weight
    return tuple(sorted(pieces, key=lambda piece: (-used[piece], piece)))


def piece_splitter(pieces: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A function from a word to its pieces. It returns a word that cannot be split whole, as unknown."""
    known = frozenset(pieces)

    @functools.lru_cache(maxsize=1 << 18)
    def split(word: str) -> tuple[str, ...]:
        parts, start = [], 0
        if len(word) > _LONGEST_WORD:
            return (word,)
        if word.startswith(CONTINUES):
            return (CONTINUES + word,)  # unlike the word itself, this is certainly no piece
        while start < len(word):
            mark = CONTINUES if start else ""
            for end in range(len(word), start, -1):
                if mark + word[start:end] in known:
                    break
            else:
                return (word,)
            parts.append(mark + word[start:end])
            start = end
        return tuple(parts)

    return split


def _merge(word: list[str], pair: tuple[str, str], merged: str) -> list[str]:
    result: list[str] = []
    for piece in word:
        if result and (result[-1], piece) == pair:
            result[-1] = merged
        else:
            result.append(piece)
    return result
