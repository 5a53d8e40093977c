"""Word pieces: round trips, the learnt pieces, and words that have no pieces."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data.word_pieces import CONTINUES, learn_pieces, piece_splitter

WORDS = st.text("abc'-", min_size=1, max_size=8)


@settings(max_examples=40)
@given(st.dictionaries(WORDS, st.integers(1, 50), min_size=1, max_size=20), st.integers(10, 40))
def test_known_letters_make_a_round_trip(counts, size):
    pieces = learn_pieces(counts, size)
    assert len(set(pieces)) == len(pieces) <= size
    split = piece_splitter(pieces)
    words = list(counts)
    found = [piece for word in words for piece in split(word)]
    assert set(found) <= set(pieces)
    assert " ".join(found).replace(f" {CONTINUES}", "").split() == words


@settings(max_examples=40)
@given(st.dictionaries(WORDS, st.integers(1, 9), min_size=1, max_size=8), st.integers(10, 30))
def test_the_same_pieces_as_a_slow_loop_merges(counts, size):
    words = {w: [w[0], *(CONTINUES + c for c in w[1:])] for w in counts}
    pieces = {piece for word in words.values() for piece in word}
    while len(pieces) < size:
        pairs = Counter()
        for word, parts in words.items():
            for left, right in pairwise(parts):
                pairs[left, right] += counts[word]
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        joined = left + right[1:]
        pieces.add(joined)
        for parts in words.values():
            index = 0
            while index + 1 < len(parts):
                if parts[index : index + 2] == [left, right]:
                    parts[index : index + 2] = [joined]
                index += 1
    assert set(learn_pieces(counts, size)) == pieces


def test_frequent_words_become_whole_and_come_first():
    pieces = learn_pieces({"the": 90, "then": 3, "hat": 2}, 9)
    assert pieces[0] == "the"
    assert piece_splitter(pieces)("then")[0] == "the"


def test_what_has_no_pieces_is_itself():
    split = piece_splitter(learn_pieces({"ab": 2}, 5))
    assert split("abx") == ("abx",) and split("b") == ("b",) and split("a" * 101) == ("a" * 101,)


def test_a_word_that_looks_like_a_later_piece_is_unknown():
    later = f"{CONTINUES}b"
    split = piece_splitter({"a", later})
    assert split("ab") == ("a", later) and not {"a", later} & set(split(later))


def test_bad_input():
    with pytest.raises(ValueError, match="size must be at least 3, the number of characters"):
        learn_pieces({"abc": 1}, 2)
    with pytest.raises(ValueError, match="counts must have a word"):
        learn_pieces({"": 1, "a" * 101: 5}, 9)


def test_words_with_nul_are_left_out():
    """Pieces are stored as text of fixed width, which loses NUL at the end."""
    assert learn_pieces({"a": 1, "a\0": 5}, 10) == ("a",)
