"""Words as tokens and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.data.vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary

word = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1)
words = st.lists(word, min_size=1, max_size=20, unique=True)


@given(words, st.data())
def test_known_sentences_come_back(known, data):
    vocabulary = Vocabulary(tuple(known))
    sentence = data.draw(st.lists(st.sampled_from(known), max_size=12))
    length = data.draw(st.integers(1, 15))
    (row,) = vocabulary.encode([sentence], length)
    assert len(row) == length + 1 and row.dtype == np.uint16 and row[0] == BOS
    assert vocabulary.decode(row) == sentence[:length]
    ends = len(sentence) < length
    assert np.count_nonzero(row == EOS) == ends
    assert np.count_nonzero(row == PAD) == max(0, length - 1 - len(sentence))


@given(words, st.lists(word, max_size=5))
def test_other_words_are_unknown(known, sentence):
    vocabulary = Vocabulary(tuple(known))
    (row,) = vocabulary.encode([sentence], 8)
    assert vocabulary.decode(row) == [w if w in known else UNKNOWN for w in sentence]
    assert row.max() < vocabulary.size == len(known) + 4
    assert vocabulary.unknown == vocabulary.size - 1


def test_the_numbers_are_those_of_fedjax():
    vocabulary = Vocabulary.from_counts({"b": 2, "a": 2, "c": 5, "d": 1, "e" * 41: 9}, 3)
    assert vocabulary.words == ("c", "a", "b")
    assert vocabulary.encode([["c", "a", "d"]], 5).tolist() == [[1, 3, 4, 6, 2, 0]]
    assert Vocabulary(tuple(map(str, range(10_000)))).size == 10_004


def test_many_words_need_wider_numbers():
    assert Vocabulary(tuple(map(str, range(1 << 16)))).encode([["7"]], 2).dtype == np.int32


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Vocabulary(()), "words must not be empty"),
        (lambda: Vocabulary(("a", "a")), "words must be distinct"),
        (lambda: Vocabulary(("a", "")), "words must be distinct and not empty"),
        (lambda: Vocabulary.from_counts({"a": 1}, 0), "size must be at least 1, got 0"),
        (lambda: Vocabulary(("a",)).encode([[]], 0), "length must be at least 1, got 0"),
        (lambda: Vocabulary(("a",)).decode([5]), r"tokens must be in 0..4, got 5"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: Vocabulary(("a",)).encode("a b", 4),
            "sentences must be lists of words, got 'a b'.",
        ),
        (
            lambda: Vocabulary(("a",)).encode(iter([["a"], "a b"]), 4),
            r"sentences\[1\] must be a list of words, got 'a b'.",
        ),
        (lambda: Vocabulary(("a",)).encode([["a"]], 2.5), "length must be an integer .* got 2.5"),
        (lambda: Vocabulary.from_counts({"a": 1}, 2.5), "size must be an integer .* got 2.5"),
    ],
)
def test_text_is_no_list_of_words(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_words_that_an_array_of_text_cannot_hold_are_unknown():
    vocabulary = Vocabulary.from_counts({"a\0": 3, "a": 2, "b\0c": 1}, 5)
    assert vocabulary.words == ("a", "b\0c") == tuple(np.array(vocabulary.words).tolist())
