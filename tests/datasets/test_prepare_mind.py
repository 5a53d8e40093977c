"""MIND's program, on small files in the official layout."""

import numpy as np
import pytest

from fedcodist.data import load_prepared, manifest
from fedcodist.data.bert_tokens import BertVocabulary
from tests.datasets.test_mind import SKIPPED, article, behavior, layout
from tests.datasets.test_prepare import all_bytes, one_line, program

MIND = program("mind")
TITLES = {f"N{number}": f"news of day {number}" for number in range(1, 7)}


def source(folder, users=range(20), extra=()):
    lines = [behavior(u, f"U{u}", "N1 N2", f"N{1 + u % 3}-1 N4-1 N5-0 N99-0") for u in users]
    return layout(folder, [article(*each) for each in TITLES.items()], [*lines, *extra])


@pytest.fixture
def prepare(tmp_path, capsys):
    def run(*arguments, output="out/mind", folder=None):
        folder = folder or source(tmp_path / "train")
        command = ["--source", str(folder), "--output", str(tmp_path / output), *arguments]
        status = MIND.main([*command, "--pieces=40", "--length=10"])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def sizes(splits):
    return {name: (data.num_clients, data.num_examples) for name, data in splits.items()}


def test_one_folder_is_dealt_by_user(prepare, tmp_path):
    status, printed, _ = prepare()
    assert status == 0 and "skipped: 20 candidates without an article" in printed
    folder = tmp_path / "out" / "mind"
    splits = load_prepared(folder)
    vocabulary = BertVocabulary(tuple(splits["vocabulary"].columns["piece"].tolist()))
    assert sizes(splits) == {
        "train": (16, 32),
        "held_out": (2, 2),
        "test": (2, 2),
        "news": (1, 7),
        "vocabulary": (1, vocabulary.size),
    }
    tokens = splits["news"].columns["tokens"]
    assert tokens.dtype == np.int32 and not tokens[0].any()
    np.testing.assert_array_equal(tokens[1:], vocabulary.encode([*TITLES.values()], 10))
    shapes = {
        split: {name: column.shape[1:] for name, column in splits[split].columns.items()}
        for split in ("train", "test")
    }
    assert shapes == {
        "train": {"clicked": (), "others": (1,), "history": (50,)},
        "test": {"candidates": (3,), "label": (3,), "history": (50,)},
    }
    assert manifest(folder)["arguments"]["skipped"] == {"candidates without an article": 20}


def test_another_folder_is_all_tests(prepare, tmp_path):
    other = source(tmp_path / "dev", range(15, 40), SKIPPED.values())
    _, printed, _ = prepare("--evaluation", str(other))
    assert "1 impressions without a click left" in printed
    splits = load_prepared(tmp_path / "out" / "mind")
    found = sizes(splits)
    assert found["train"] == (18, 36) and found["held_out"] == (2, 2) and found["test"] == (25, 25)
    checksums = manifest(tmp_path / "out" / "mind")["arguments"]["sha256"]
    assert set(checksums) == {
        f"{name}/{file}"
        for name in ("source", "evaluation")
        for file in ("news.tsv", "behaviors.tsv")
    }


def test_two_preparations_are_the_same_bytes(prepare, tmp_path):
    for output in ("one", "two"):
        assert prepare(output=output)[0] == 0
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    assert "verified; nothing is left to do" in prepare(output="one")[1]
    error = one_line(prepare("--seed=1", output="one"))
    assert "was prepared with other arguments: seed is 0, now it would be 1" in error


def test_pieces_are_learnt_of_titles_that_training_sees(prepare, tmp_path):
    prepare()
    there = load_prepared(tmp_path / "out" / "mind")["vocabulary"].columns["piece"]
    TITLES_UNSEEN = {**TITLES, "N6": "qqzz " * 9}
    folder = source(tmp_path / "train")
    path = folder / "news.tsv"
    path.write_bytes(b"".join(article(*each) for each in TITLES_UNSEEN.items()))
    prepare(output="again", folder=folder)
    again = load_prepared(tmp_path / "again")["vocabulary"].columns["piece"]
    np.testing.assert_array_equal(there, again)


def test_mistakes_are_one_line_and_leave_nothing(prepare, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, options, message in (
        (["--seed=-1"], {}, "--seed must not be negative, got -1"),
        (["--evaluation", str(empty)], {}, "--evaluation"),
        ([], {"folder": empty}, "empty has no file news.tsv"),
        ([], {"folder": source(tmp_path / "few", range(3))}, "must be a user for each split"),
        (
            [],
            {"folder": source(tmp_path / "none", [], SKIPPED.values())},
            "has no impression that can be used",
        ),
    ):
        assert message in one_line(prepare(*arguments, **options))
    assert not (tmp_path / "out").exists()
