"""C4's modification: first sentences, contractions, json lines plain and compressed."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import Vocabulary, unpacking
from fedcodist.data.word_pieces import learn_pieces, piece_splitter
from fedcodist.datasets import c4
from fedcodist.datasets.c4 import c4_files, first_sentence, read_c4, repaired

VOCABULARY = Vocabulary(("the", "a", "sentence", "don't", "."))


@pytest.mark.parametrize(
    "paragraph, words",
    [
        ("One here. Two there.", "one here ."),
        ("Dr. Who came at 3.14 p.m. sharp! Then left.", "dr . who came at 3.14 p.m . sharp !"),
        ("They don’t know they’ll see Anna’s dog", "they don't know they'll see anna's dog"),
        ("It's up-to-date, isn't it?", "it's up-to-date , isn't it ?"),
        ("‘Quoted’ words stay ’ apart ’ s.", "‘ quoted ’ words stay ’ apart's ."),
        ("“Really?” She left.", "“ really ? ”"),
        ("Version 2.0 of it. 3 more.", "version 2.0 of it ."),
        ("It isn't. Two there.", "it isn't ."),
        ("I know I can’t. Two there.", "i know i can't ."),
        ("We took Bob's. Two there.", "we took bob's ."),
        ("It is option b. Two there.", "it is option b ."),
        ("They came at 3 p.m. Two there.", "they came at 3 p.m ."),
        ("I said no. Two there.", "i said no ."),
        ("Go to No. 5 now. Two there.", "go to no . 5 now ."),
        ("The U.S. Army and J. Smith went. Two there.", "the u.s . army and j . smith went ."),
        ("MR. Smith went, i.e. Bob. Two there.", "mr . smith went , i.e . bob ."),
        (" ... !", ""),
        ("", ""),
    ],
)
def test_first_sentence(paragraph, words):
    assert " ".join(first_sentence(paragraph)) == words


# The paper's rules but for those that its last one, "’ s", holds.
RULES = [
    "aren’t",
    "can’t",
    "couldn’t",
    "didn’t",
    "doesn’t",
    "don’t",
    "hadn’t",
    "hasn’t",
    "haven’t",
    "he’d",
    "he’ll",
    "i’d",
    "i’ll",
    "i’m",
    "i’ve",
    "isn’t",
    "mightn’t",
    "mustn’t",
    "shan’t",
    "she’d",
    "she’ll",
    "shouldn’t",
    "they’d",
    "they’ll",
    "they’re",
    "they’ve",
    "we’d",
    "we’re",
    "we’ve",
    "weren’t",
    "what’ll",
    "what’re",
    "what’ve",
    "who’d",
    "who’ll",
    "who’re",
    "who’ve",
    "won’t",
    "wouldn’t",
    "you’d",
    "you’ll",
    "you’re",
    "you’ve",
]
# Contractions that it does not repair.
OTHERS = [
    "ain’t",
    "needn’t",
    "oughtn’t",
    "wasn’t",
    "it’ll",
    "that’ll",
    "there’ll",
    "we’ll",
    "could’ve",
    "might’ve",
    "must’ve",
    "should’ve",
    "would’ve",
    "it’d",
    "that’d",
    "there’d",
    "o’clock",
    "y’all",
]


def test_contractions_are_the_papers():
    rules = {f"{stem}’{ending}" for ending, stems in c4._CONTRACTIONS.items() for stem in stems}
    assert rules == set(RULES) and len(RULES) == 43
    assert len(OTHERS) == 18
    for word in OTHERS:
        stem, ending = word.split("’")
        assert repaired([stem, "’", ending]) == [stem, "’", ending]


@pytest.mark.parametrize(
    "stem, ending", [tuple(rule.split("’")) for rule in RULES] + [("dog", "s"), ("what", "s")]
)
def test_repairs(stem, ending):
    assert repaired([stem, "’", ending, "x"]) == [f"{stem}'{ending}", "x"]


@pytest.mark.parametrize("words", [["dog", "’", "t"], ["’", "s"], [".", "’", "s"], ["i", "’"]])
def test_what_is_no_contraction_stays(words):
    assert repaired(words) == words


@settings(max_examples=60)
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


@pytest.mark.parametrize("last", [b'{"url": "u"}', b"null", b"3"])
def test_a_last_line_without_a_text_is_skipped_with_or_without_its_end(last, tmp_path):
    path = tmp_path / "a.json"
    for end in (b"\n", b""):
        path.write_bytes(GOOD + last + end)
        assert read_c4([path], VOCABULARY, 4).skipped == {"empty": 2, "malformed": 1}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_part_of_the_first_page(tmp_path, pack):
    path = tmp_path / "a.json"
    path.write_bytes(pack(b"\xef\xbb\xbf" + GOOD))
    found = read_c4([path], VOCABULARY, 4)
    assert found.skipped == {"empty": 2} and len(found.tokens) == 4
    path.write_bytes(pack(b"\xef\xbb\xbf" + GOOD) + pack(b"\xef\xbb\xbf" + GOOD))
    assert read_c4([path], VOCABULARY, 4).skipped == {"empty": 4}


@pytest.mark.parametrize("line", [b"0", b"{}\n"])
def test_gzip_that_unpacks_to_far_more_is_refused(tmp_path, line, monkeypatch):
    monkeypatch.setattr(unpacking, "_ALWAYS_ALLOWED", 1 << 10)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(line * (1 << 20)))
    with pytest.raises(ValueError, match=r"a\.json\.gz unpacks from .* to more than .* refused"):
        read_c4([path], VOCABULARY, 4)


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
