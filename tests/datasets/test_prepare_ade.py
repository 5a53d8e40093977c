"""The ADE corpus's program, on a small corpus in the real format."""

import numpy as np
import pytest

from fedcodist.data import load_prepared, manifest
from fedcodist.data.bert_tokens import BertVocabulary
from tests.datasets.test_ade import corpus, negative, relation
from tests.datasets.test_prepare import all_bytes, one_line, program

ADE = program("ade")
DOCUMENTS = range(100, 140)


@pytest.fixture
def source(tmp_path):
    relations = [relation(each, f"Drug {each} caused a rash.") for each in DOCUMENTS]
    negatives = [negative(each, f"Patient {each} had no rash.") for each in DOCUMENTS]
    return corpus(tmp_path / "ade", [*relations, relations[0]], [b"unreadable\n", *negatives])


@pytest.fixture
def prepare(source, tmp_path, capsys):
    def run(*arguments, output="out/ade"):
        command = ["--source", str(source), "--output", str(tmp_path / output), *arguments]
        status = ADE.main([*command, "--pieces=60", "--length=12"])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_what_is_written(prepare, tmp_path):
    status, printed, _ = prepare()
    assert status == 0
    assert "skipped: 1 further relations of a sentence, 1 malformed lines of ADE-NEG" in printed
    folder = tmp_path / "out" / "ade"
    splits = load_prepared(folder)
    sizes = {name: (data.num_clients, data.num_examples) for name, data in splits.items()}
    vocabulary = BertVocabulary(tuple(splits.pop("vocabulary").columns["piece"].tolist()))
    assert sizes == {
        "train": (32, 64),
        "held_out": (4, 8),
        "test": (4, 8),
        "vocabulary": (1, vocabulary.size),
    }
    found = []
    for data in splits.values():
        assert {name: column.dtype for name, column in data.columns.items()} == {
            "tokens": np.int32,
            "label": np.int32,
        }
        for document, columns in data.clients():
            for tokens, label in zip(columns["tokens"], columns["label"], strict=True):
                text = "Drug {} caused a rash." if label else "Patient {} had no rash."
                expected = vocabulary.encode([text.format(document)], 12)[0]
                np.testing.assert_array_equal(tokens, expected)
                assert np.flatnonzero(tokens == 0)[0] == np.count_nonzero(tokens)
            found.append(document)
    assert sorted(found) == [str(document) for document in DOCUMENTS]
    assert manifest(folder)["arguments"]["skipped"]["malformed lines of ADE-NEG.txt"] == 1


def test_two_preparations_are_the_same_bytes(prepare, tmp_path):
    for output in ("one", "two"):
        assert prepare(output=output)[0] == 0
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    assert "verified; nothing is left to do" in prepare(output="one")[1]
    error = one_line(prepare("--seed=1", output="one"))
    assert "was prepared with other arguments: seed is 0, now it would be 1" in error


def test_pieces_are_learnt_of_training_sentences_alone(prepare, source, tmp_path):
    prepare()
    splits = load_prepared(tmp_path / "out" / "ade")
    document = splits["test"].client_ids[0]
    path = source / "ADE-NEG.txt"
    text = path.read_text().replace(f"{document} NEG Patient", f"{document} NEG Qqzz Qqzz Qqzz")
    path.write_text(text)
    prepare(output="again")
    pieces = [
        load_prepared(tmp_path / name)["vocabulary"].columns["piece"].tolist()
        for name in ("out/ade", "again")
    ]
    assert pieces[0] == pieces[1]


def test_a_given_vocabulary(prepare, tmp_path):
    vocabulary = BertVocabulary.learn(["a rash was caused"], 30)
    vocabulary.save(tmp_path / "vocab.txt")
    assert prepare("--vocabulary", str(tmp_path / "vocab.txt"))[0] == 0
    folder = tmp_path / "out" / "ade"
    assert load_prepared(folder)["vocabulary"].columns["piece"].tolist() == [*vocabulary.pieces]
    recorded = manifest(folder)["arguments"]
    assert "pieces" not in recorded and len(recorded["vocabulary_sha256"]) == 64


def test_mistakes_are_one_line_and_leave_nothing(prepare, source, tmp_path):
    for argument, message in (
        ("--seed=-1", "--seed must not be negative, got -1"),
        (f"--vocabulary={tmp_path}/none", "error: --vocabulary must be an existing file, got "),
        (f"--vocabulary={tmp_path}", "error: --vocabulary must be an existing file, got "),
        (f"--vocabulary={source}/ADE-NEG.txt", "ADE-NEG.txt is no BERT vocabulary: pieces must"),
    ):
        assert message in one_line(prepare(argument))
    (source / "DRUG-AE.rel").write_text("")
    assert "DRUG-AE.rel has no sentence in the corpus's format" in one_line(prepare())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argument", ["--pieces=0", "--length=1", "--pieces=3"])
def test_numbers_out_of_range(source, tmp_path, capsys, argument):
    command = ["--source", str(source), "--output", str(tmp_path / "out"), argument]
    assert ADE.main(command) == 2
    message = capsys.readouterr().err
    assert "must be at least" in message and argument.split("=")[0] in message
    assert not (tmp_path / "out").exists()
