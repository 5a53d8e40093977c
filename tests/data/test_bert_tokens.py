"""BERT's tokens: round trips, a plain loop that finds pieces, files of vocabularies, bad files."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data.bert_tokens import BEGINNING, END, MASKED, PADDING, SPECIAL, BertVocabulary

TEXTS = [
    "Took two ibuprofen, slept like a log.",
    "The headache came back after lunch!",
    "sleeping pills: never again; headaches all day",
    "Fédération's café opens at 9",
]
LEARNT = BertVocabulary.learn(TEXTS, 70)


def plain_pieces(pieces, word):
    """The longest piece first, as Devlin et al.'s code does; nothing where one is missing."""
    found, rest = [], word
    while rest:
        mark = "##" if found else ""
        fitting = [end for end in range(len(rest), 0, -1) if mark + rest[:end] in pieces]
        if not fitting:
            return ["[UNK]"]
        found.append(mark + rest[: fitting[0]])
        rest = rest[fitting[0] :]
    return found


@settings(max_examples=30)
@given(st.lists(st.text("abcdehilnopst,.! ABZ9", max_size=30), max_size=4), st.integers(2, 12))
def test_rows_are_what_a_plain_loop_finds(texts, length):
    tokens = LEARNT.encode(texts, length)
    assert tokens.shape == (len(texts), length)
    for text, row in zip(texts, tokens, strict=True):
        words = re.findall(r"[a-z0-9]+|[,.!]", text.lower())
        pieces = [piece for word in words for piece in plain_pieces(set(LEARNT.pieces), word)]
        expected = [BEGINNING, *pieces[: length - 2], END]
        expected += [PADDING] * (length - len(expected))
        assert [LEARNT.pieces[token] for token in row] == expected


@settings(max_examples=30)
@given(st.lists(st.sampled_from(" ".join(TEXTS[:3]).split()), max_size=6))
def test_words_of_learnt_letters_come_back(words):
    text = " ".join(words)
    tokens = LEARNT.encode([text], 80)[0]
    assert LEARNT.decode(tokens) == re.findall(r"[a-z]+|[,.!;:]", text.lower())
    assert np.count_nonzero(tokens) == 1 + np.flatnonzero(tokens == LEARNT.number(END))[0]


def test_the_order_of_texts_does_not_matter_to_what_is_learnt():
    shuffled = list(TEXTS)
    random.Random(0).shuffle(shuffled)
    assert BertVocabulary.learn(shuffled, 70) == LEARNT
    assert LEARNT.pieces[: len(SPECIAL)] == SPECIAL and LEARNT.size == 75
    assert {"head", "##ache", "headache"} & set(LEARNT.pieces)


@pytest.mark.parametrize("token", [-1, LEARNT.size])
def test_numbers_that_are_no_tokens_are_refused(token):
    message = rf"^tokens must be in 0\.\.{LEARNT.size - 1}, got {token}$"
    with pytest.raises(ValueError, match=message):
        LEARNT.decode([LEARNT.number(BEGINNING), token, LEARNT.number(END)])


def test_accents_and_case():
    assert LEARNT.decode(LEARNT.encode(["Café LUNCH"], 20)[0]) == ["cafe", "lunch"]
    cased = BertVocabulary.learn(TEXTS, 90, lower_case=False)
    assert cased.decode(cased.encode(["café The"], 20)[0]) == ["café", "The"]


def test_special_pieces_in_a_text_are_text():
    row = LEARNT.encode([f"{MASKED} {END} a"], 30)[0]
    assert np.sum(row == LEARNT.number(END)) == 1 and LEARNT.number(MASKED) not in row


def test_a_file_comes_back_and_one_laid_out_as_berts_is_read(tmp_path):
    LEARNT.save(tmp_path / "vocab.txt")
    assert BertVocabulary.load(tmp_path / "vocab.txt") == LEARNT
    for mark, newline in ((b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"\xef\xbb\xbf", b"\r\n")):
        content = (tmp_path / "vocab.txt").read_bytes().replace(b"\n", newline)
        (tmp_path / "edited.txt").write_bytes(mark + content)
        assert BertVocabulary.load(tmp_path / "edited.txt") == LEARNT
    lines = [PADDING, *(f"[unused{n}]" for n in range(99)), *SPECIAL[1:], "the", "cat", "##s"]
    (tmp_path / "bert.txt").write_bytes("\r\n".join(lines).encode() + b"\r\n")
    vocabulary = BertVocabulary.load(tmp_path / "bert.txt")
    expected = [101, 104, 105, 106, 100, 102, 0]
    np.testing.assert_array_equal(vocabulary.encode(["The cats sat"], 7)[0], expected)


def test_large_vocabularies_are_wider():
    pieces = (*SPECIAL, *map(str, range(1 << 16)))
    tokens = BertVocabulary(pieces).encode(["65535"], 3)
    assert tokens.dtype == np.int32 and tokens.tolist() == [[2, 65540, 3]]
    assert LEARNT.encode(["a"], 3).dtype == np.uint16


def test_bad_vocabularies_and_lengths_are_one_line(tmp_path):
    for pieces, message in (
        (SPECIAL[:4], r"^pieces must have \[MASK\]$"),
        (("a", *SPECIAL), r"^the first of pieces must be \[PAD\], got 'a'$"),
        ((*SPECIAL, "a", "a"), r"^pieces must be distinct, got 'a' twice$"),
    ):
        with pytest.raises(ValueError, match=message):
            BertVocabulary(pieces)
    (tmp_path / "other.txt").write_text("a\nb\n")
    with pytest.raises(
        ValueError, match=r"other.txt is no BERT vocabulary: pieces must have \[PAD"
    ):
        BertVocabulary.load(tmp_path / "other.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"bytes is no BERT vocabulary: 'utf-8' codec"):
        BertVocabulary.load(tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"^length must be at least 2, got 1\.$"):
        LEARNT.encode(["a"], 1)
    with pytest.raises(TypeError, match=r"^texts must be a list, got 'a text'\.$"):
        LEARNT.encode("a text", 4)
    with pytest.raises(TypeError, match=r"^texts must be several texts, got 'a text'\.$"):
        BertVocabulary.learn("a text", 30)
    with pytest.raises(ValueError, match=r"^size must be at least \d+, the number of characters$"):
        BertVocabulary.learn(TEXTS, 3)
