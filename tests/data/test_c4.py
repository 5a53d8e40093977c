"""C4's modification: first sentences, contractions, json lines plain and compressed."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import Vocabulary, c4
from fedcodist.data.c4 import c4_files, first_sentence, read_c4, repaired
from fedcodist.data.word_pieces import learn_pieces, piece_splitter

VOCABULARY = Vocabulary(("the", "a", "sentence", "don't", "."))


@pytest.mark.parametrize(
    "paragraph, words",
    [
        ("One here. Two there.", "one here ."),
        ("Dr. Who came at 3.14 p.m. sharp! Then left.", "dr . who came at 3.14 p.m . sharp !"),
        ("They don’t know we’ll see Anna’s dog", "they don't know we'll see anna's dog"),
        ("It's up-to-date, isn't it?", "it's up-to-date , isn't it ?"),
        ("‘Quoted’ words stay ’ apart ’ s.", "‘ quoted ’ words stay ’ apart's ."),
        ("“Really?” She left.", "“ really ? ”"),
        ("Version 2.0 of it. 3 more.", "version 2.0 of it ."),
        (" ... !", ""),
        ("", ""),
    ],
)
def test_first_sentence(paragraph, words):
    assert " ".join(first_sentence(paragraph)) == words


@pytest.mark.parametrize("stem, ending", [("aren", "t"), ("you", "re"), ("i", "m"), ("dog", "s")])
def test_repairs(stem, ending):
    assert repaired([stem, "’", ending, "x"]) == [f"{stem}'{ending}", "x"]


@pytest.mark.parametrize("words", [["dog", "’", "t"], ["’", "s"], [".", "’", "s"], ["i", "’"]])
def test_what_is_no_contraction_stays(words):
    assert repaired(words) == words


@settings(max_examples=60, deadline=None)
@given(st.text("aTt's’ .!?\n1-“\0é", max_size=60))
def test_words_are_lower_case_and_repairing_twice_changes_nothing(text):
    words = first_sentence(text)
    assert all(word and word == word.lower() and not word.isspace() for word in words)
    assert repaired(words) == words


def lines(*texts):
    pages = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "u"} for text in texts]
    return "".join(json.dumps(page) + "\n" for page in pages).encode()


GOOD = lines("The sentence. Another one.\nA sentence’s end", "Don’t.\n\n!!\nthe end")
BAD = b'\xff{}\n{"text": 3}\n{"text": "cut\n[]\n\n'


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines(tmp_path, pack, monkeypatch):
    monkeypatch.setattr(c4, "_ROWS", 3)
    monkeypatch.setattr(c4, "LONGEST_LINE", 1000)
    path = tmp_path / "c4-train.00000-of-01024.json"
    long = lines("a " * 600)
    path.write_bytes(pack(BAD + GOOD + long + lines("The end of it all.").rstrip()))
    found = read_c4([path], VOCABULARY, 4)
    decoded = [" ".join(VOCABULARY.decode(row)) for row in found.tokens]
    assert decoded == [
        "the sentence .",
        "a <unknown> <unknown>",
        "don't .",
        "the <unknown>",
        "the <unknown> <unknown> <unknown>",
    ]
    assert found.tokens.dtype == np.uint16
    assert found.skipped == {"empty": 2, "malformed": 4, "too long": 1}
    np.testing.assert_array_equal(read_c4([path], VOCABULARY, 4, 2).tokens, found.tokens[:2])
    np.testing.assert_array_equal(
        read_c4([path] * 2, VOCABULARY, 4).tokens, np.concatenate([found.tokens] * 2)
    )


def test_pieces(tmp_path):
    pieces = learn_pieces({"the": 5, "sentence": 2, ".": 1, "en": 1}, 16)
    path = tmp_path / "one.json"
    path.write_bytes(lines("The sentence."))
    vocabulary, split = Vocabulary(pieces), piece_splitter(pieces)
    tokens = read_c4([path], vocabulary, 20, split=split).tokens
    expected = [*split("the"), *split("sentence"), "."]
    assert vocabulary.decode(tokens[0]) == expected and len(expected) > 3


def test_what_cannot_be_read(tmp_path):
    path = tmp_path / "a.json.gz"
    packed = gzip.compress(GOOD)
    path.write_bytes(packed[:-9])
    with pytest.raises(ValueError, match=rf"is cut off: it ends at byte {len(packed) - 9:,}"):
        read_c4([path], VOCABULARY, 4)
    path.write_bytes(packed[:-8] + bytes(8))  # the checksum
    with pytest.raises(ValueError, match=r"a\.json\.gz is damaged: CRC check failed"):
        read_c4([path], VOCABULARY, 4)
    whole = tmp_path / "a.json"
    cut = (GOOD + lines("One more.")).rstrip()[:-3]
    whole.write_bytes(cut)
    with pytest.raises(ValueError, match=rf"a\.json is cut off: it ends at byte {len(cut):,}"):
        read_c4([whole], VOCABULARY, 4)
    whole.unlink()
    path.write_bytes(BAD)
    with pytest.raises(ValueError, match=r"a\.json\.gz: no sentence of C4"):
        read_c4([path], VOCABULARY, 4)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_c4([path], VOCABULARY, 4, 0)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_c4([tmp_path / "none"], VOCABULARY, 4)
    assert c4_files(tmp_path) == [path] and c4_files(path) == [path]
    with pytest.raises(ValueError, match="is neither a file of C4 nor a folder"):
        c4_files(tmp_path / "none")
