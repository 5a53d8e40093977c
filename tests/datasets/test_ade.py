"""Reading the ADE corpus: its two formats, bad lines, sentences of both kinds; the deal."""

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcodist.datasets.ade import deal_documents, read_ade


def relation(document, sentence, effect="rash", drug="aspirin"):
    return f"{document}|{sentence}|{effect}|10|14|{drug}|20|27\n".encode()


def negative(document, sentence):
    return f"{document} NEG {sentence}\n".encode()


RELATIONS = [
    relation(12, "Aspirin caused a rash."),
    relation(12, "Aspirin caused a rash.", effect="itch"),
    relation(7, "Rash after  ibuprofen."),
]
NEGATIVES = [
    negative(12, "A case report."),
    negative(7, "The patient recovered."),
    negative(9, "A case report."),
]


def corpus(folder, relations=RELATIONS, negatives=NEGATIVES):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "DRUG-AE.rel").write_bytes(b"".join(relations))
    (folder / "ADE-NEG.txt").write_bytes(b"".join(negatives))
    return folder


def test_every_sentence_is_there_once(tmp_path):
    found = read_ade(corpus(tmp_path))
    assert list(zip(found.texts, found.labels.tolist(), found.documents, strict=True)) == [
        ("Aspirin caused a rash.", 1, "12"),
        ("Rash after ibuprofen.", 1, "7"),
        ("A case report.", 0, "12"),
        ("The patient recovered.", 0, "7"),
    ]
    assert found.labels.dtype == np.int32
    assert found.skipped == {
        "further relations of a sentence": 1,
        "repeated sentences without an effect": 1,
    }
    assert set(found.sha256) == {"DRUG-AE.rel", "ADE-NEG.txt"}


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    mark = b"\xef\xbb\xbf"
    marked = corpus(tmp_path / "marked", [mark + b"".join(RELATIONS)], [mark + b"".join(NEGATIVES)])
    plain = read_ade(corpus(tmp_path / "plain"))
    found = read_ade(marked)
    assert (found.texts, found.documents, found.skipped) == (
        plain.texts,
        plain.documents,
        plain.skipped,
    )


def test_a_sentence_of_both_kinds_is_positive(tmp_path):
    both = negative(3, "Aspirin  caused a rash.")
    found = read_ade(corpus(tmp_path, negatives=[both, *NEGATIVES[:1]]))
    assert found.texts.index("Aspirin caused a rash.") == 0 and found.labels.tolist() == [1, 1, 0]
    assert found.documents[0] == "12"
    assert found.skipped["sentences without an effect that have one in another line"] == 1


def test_bars_within_a_sentence_are_its_own(tmp_path):
    found = read_ade(corpus(tmp_path, [relation(12, "A rash (|r| > 0.5) followed.")]))
    assert found.texts[0] == "A rash (|r| > 0.5) followed."


BAD_RELATIONS = {
    "too few fields": b"12|Aspirin caused a rash.|rash|1|2|aspirin\n",
    "no number": relation("twelve", "Aspirin did."),
    "offsets that are none": b"12|Aspirin did.|rash|a|b|aspirin|c|d\n",
    "no sentence": b"12| |rash|1|2|aspirin|3|4\n",
    "not UTF-8": b"12|caf\xe9|rash|1|2|aspirin|3|4\n",
    "a number beyond all": relation("1" * 5000, "Aspirin did."),
}
BAD_NEGATIVES = {
    "no words": b"12 NEG\n",
    "another word": b"12 POS A case report follows.\n",
    "no number": b"NEG A case report follows.\n",
    "not UTF-8": b"12 NEG caf\xe9\n",
}


@pytest.mark.parametrize("kind", BAD_RELATIONS)
def test_bad_relations_are_counted_and_spoil_no_other(tmp_path, kind):
    bad = BAD_RELATIONS[kind]
    found = read_ade(corpus(tmp_path, [bad, *RELATIONS, bad]))
    assert found.skipped.pop("malformed lines of DRUG-AE.rel") == 2
    whole = read_ade(corpus(tmp_path))
    assert (found.texts, found.skipped) == (whole.texts, whole.skipped)


@pytest.mark.parametrize("kind", BAD_NEGATIVES)
def test_bad_negatives_are_counted_and_spoil_no_other(tmp_path, kind):
    bad = BAD_NEGATIVES[kind]
    found = read_ade(corpus(tmp_path, negatives=[bad, *NEGATIVES, bad]))
    assert found.skipped["malformed lines of ADE-NEG.txt"] == 2
    assert found.texts == read_ade(corpus(tmp_path)).texts


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_between_lines_are_survived(tmp_path, garbage):
    lines = [each.replace(b"\n", b" ") + b"\n" for each in garbage]
    found = read_ade(corpus(tmp_path, [*lines, *RELATIONS], [*NEGATIVES, *lines]))
    filled = sum(bool(line.strip()) for line in lines)
    assert len(found.texts) + sum(found.skipped.values()) == 2 * filled + 6


def test_missing_and_empty_files_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder; it must hold DRUG-AE.rel and ADE-NEG"):
        read_ade(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"DRUG-AE.rel cannot be read: No such file"):
        read_ade(tmp_path)
    with pytest.raises(ValueError, match=r"ADE-NEG.txt has no sentence in the corpus's format"):
        read_ade(corpus(tmp_path, negatives=[b"\n", b"text\n"]))


@settings(max_examples=100)
@given(st.lists(st.integers(0, 10**6).map(str), min_size=1, max_size=80), st.integers(0, 99))
def test_no_document_has_sentences_in_two_splits(documents, seed):
    if len(set(documents)) < 10:
        with pytest.raises(ValueError, match="at least 10 documents for three splits"):
            deal_documents(documents, seed)
        return
    rows = deal_documents(documents, seed)
    assert sorted(np.concatenate(list(rows.values()))) == list(range(len(documents)))
    splits_of = defaultdict(set)
    for name, own in rows.items():
        assert (np.diff(own) > 0).all()
        for row in own:
            splits_of[documents[row]].add(name)
    assert all(len(names) == 1 for names in splits_of.values())
    assert sum(names == {"test"} for names in splits_of.values()) == len(set(documents)) // 10


def test_the_deal_depends_on_documents_and_seed_alone():
    documents = [str(number) for number in range(30)] * 2
    there, again, other = (deal_documents(documents, seed) for seed in (0, 0, 1))
    back = deal_documents(documents[::-1], 0)
    for name, rows in there.items():
        np.testing.assert_array_equal(rows, again[name])
        np.testing.assert_array_equal(rows, np.sort(59 - back[name]))
    assert set(there["test"]) != set(other["test"])


@pytest.mark.skipif("FEDCODIST_DATA" not in os.environ, reason="needs the real corpus")
def test_every_line_of_the_real_corpus_is_a_sentence_or_counted():
    folder = Path(os.environ["FEDCODIST_DATA"]) / "ade_corpus_v2"
    found = read_ade(folder)
    lines = sum((folder / name).read_bytes().count(b"\n") for name in found.sha256)
    ends = sum(not (folder / name).read_bytes().endswith(b"\n") for name in found.sha256)
    assert len(found.texts) + sum(found.skipped.values()) == lines + ends
    assert (found.labels.sum(), len(found.labels)) == (4271, 4271 + 16625)
    assert not any("malformed" in reason for reason in found.skipped)
