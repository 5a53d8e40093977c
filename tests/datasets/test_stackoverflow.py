"""Stack Overflow from a small made-up file in TFF's format: splits, draws, what is skipped, resuming."""

import sqlite3
from collections import Counter

import numpy as np
import pytest

from fedcodist.data import vocabulary_of
from fedcodist.data.vocabulary import EOS, PAD
from fedcodist.data.word_pieces import CONTINUES
from fedcodist.datasets import stackoverflow
from fedcodist.datasets.stackoverflow import Settings, prepare_stackoverflow, sqlite_reader
from tests.data.test_tff import encode_example, write_sqlite

SETTINGS = Settings(vocabulary=30, train_clients=4, evaluation_sentences=7)


def features(text, kind):
    return {
        "creation_date": [b"2010-01-08 09:34:05 UTC"],
        "score": np.array([3]),
        "tags": [b"sql|median"],
        "title": [b"a title"],
        "tokens": [text],
        "type": [kind],
    }


def sentence(user, index):
    """Ten sentences of a user: eight letters as words, and one longer than any sequence."""
    words = [f"u{user}", f"i{index}", "the", "median"][: 2 + index % 3]
    return " ".join(words * (12 if index == 9 else 1)).encode()


def examples():
    """(split, user, features) of 12 users of train, 5 of heldout and 6 of test."""
    for split, users in (("train", 12), ("heldout", 5), ("test", 6)):
        for user in range(users):
            for index in range(10):
                kind = b"question" if (user + index) % 3 else b"answer"
                yield split, f"{user:05d}", features(sentence(user, index), kind)


BAD = {
    "malformed": b"\xff\x03",
    "neither question nor answer": encode_example(features(b"a b", b"wiki")),
    "not UTF-8": encode_example(features(b"a \xff", b"answer")),
    "empty": encode_example(features(b"  ", b"answer")),
    "too long": encode_example(features(b"a" * (1 << 20) + b" b", b"answer")),
}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    rows = [(split, user, encode_example(each)) for split, user, each in examples()]
    bad = [(split, "00003", blob) for blob in BAD.values() for split in ("train", "test")]
    bad.append(("train", "00099", BAD["empty"]))  # a user of whom nothing is left
    return write_sqlite(tmp_path_factory.mktemp("tff") / "so.sqlite", rows + bad)


def test_splits(database, tmp_path):
    splits, skipped = prepare_stackoverflow(sqlite_reader(database), SETTINGS, tmp_path / "work")
    train, rest = splits["train"], splits["distillation"]
    assert not set(train.client_ids) & set(rest.client_ids)
    everyone = {f"{user:05d}" for user in range(12)}
    assert {*train.client_ids.tolist(), *rest.client_ids.tolist()} == everyone
    assert train.num_examples + rest.num_examples == 120
    assert (
        train.columns["tokens"].shape[1] == 21 and splits["test"].columns["tokens"].shape[1] == 31
    )
    assert isinstance(train.columns["tokens"], np.memmap)
    assert train.columns["tokens"].dtype == np.uint16
    for name in ("held_out", "test"):
        assert splits[name].num_examples == 7
    # Train's two users with bad examples are read once for train and distillation, test's once.
    twice = dict.fromkeys(BAD, 2) | {"empty": 3}
    assert skipped == twice


def test_every_sentence_is_what_the_file_says(database, tmp_path):
    splits, _ = prepare_stackoverflow(sqlite_reader(database), SETTINGS, tmp_path / "work")
    vocabulary = vocabulary_of(splits)
    counts = Counter(w for s, _, each in examples() if s == "train" for w in words_of(each))
    wanted = sorted(counts, key=lambda word: (-counts[word], word))[:30]
    assert list(vocabulary.words) == wanted
    own = {user: [] for user in splits["distillation"].client_ids.tolist()}
    for split, user, each in examples():
        if split == "train" and user in own:
            own[user].append(each)
    for user, columns in splits["distillation"].clients():
        encoded = vocabulary.encode([words_of(each) for each in own[user]], 20)
        np.testing.assert_array_equal(columns["tokens"], encoded)
        kinds = [each["type"][0] == b"answer" for each in own[user]]
        np.testing.assert_array_equal(columns["domain"], kinds)


def words_of(each):
    return each["tokens"][0].decode().split()


def test_what_is_drawn_depends_neither_on_shards_nor_on_processes(database, tmp_path, monkeypatch):
    settings = SETTINGS._replace(distillation_sentences=11, pieces=40)
    read = lambda name, processes: prepare_stackoverflow(
        sqlite_reader(database), settings, tmp_path / name, processes
    )
    whole = read("whole", 1)
    monkeypatch.setattr(stackoverflow, "USERS_PER_SHARD", 2)
    for other in (read("shards", 1), read("processes", 2)):
        assert other.skipped == whole.skipped
        assert_same(other.splits, whole.splits)
    assert whole.splits["distillation"].num_examples == 11
    vocabulary = vocabulary_of(whole.splits)
    assert len(vocabulary.words) == 40
    written = [" ".join(words_of(each)) for split, _, each in examples() if split == "train"]
    for row in whole.splits["train"].columns["tokens"]:
        decoded = " ".join(vocabulary.decode(row)).replace(f" {CONTINUES}", "")
        is_whole = row[-1] in (PAD, EOS)
        assert any(text == decoded if is_whole else text.startswith(decoded) for text in written)


def assert_same(splits, others):
    for name, data in splits.items():
        np.testing.assert_array_equal(data.client_ids, others[name].client_ids)
        np.testing.assert_array_equal(data.offsets, others[name].offsets)
        for column in data.columns:
            np.testing.assert_array_equal(data.columns[column], others[name].columns[column])


@pytest.mark.parametrize("tokens", [[3], [1.5], [], ["text"], "text", None])
def test_tokens_that_are_no_text_are_malformed(tokens):
    assert stackoverflow._sentence({"tokens": tokens, "type": [b"answer"]}) == "malformed"


def test_the_users_of_a_file_without_metadata_are_the_same(tmp_path):
    rows = [(split, user, encode_example(each)) for split, user, each in examples()]
    found = []
    for metadata in (True, False):
        path = write_sqlite(tmp_path / f"{metadata}.sqlite", rows, metadata)
        work = tmp_path / f"work{metadata}"
        found.append(prepare_stackoverflow(sqlite_reader(path), SETTINGS, work))
    assert found[0].skipped == found[1].skipped == {}
    assert_same(found[0].splits, found[1].splits)


def test_a_stopped_run_goes_on(database, tmp_path, monkeypatch):
    monkeypatch.setattr(stackoverflow, "USERS_PER_SHARD", 3)
    reader = sqlite_reader(database)
    whole = prepare_stackoverflow(reader, SETTINGS, tmp_path / "whole")
    read = Counter()

    def stopping(limit):
        def examples(split, users):
            if sum(read.values()) == limit:
                raise KeyboardInterrupt
            read[split, tuple(users)] += 1
            return reader.examples(split, users)

        return reader._replace(examples=examples)

    shown = []
    show = lambda text, fraction: shown.append(fraction)
    for limit in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            prepare_stackoverflow(stopping(limit), SETTINGS, tmp_path / "work", show=show)
        assert shown == sorted(shown) and 0 < shown[-1] < 0.9
        reached, shown[:] = shown[-1], []
    again = prepare_stackoverflow(stopping(None), SETTINGS, tmp_path / "work", show=show)
    assert shown == sorted(shown) and shown[0] > reached and shown[-1] < 1
    assert_same(again.splits, whole.splits)
    # Shards of train and distillation are read for the words and for the tokens, others once.
    assert max(len(users) for _, users in read) == 3  # all users are never read at once
    assert set(read.values()) == {1, 2} and sum(read.values()) == 2 * (2 + 3) + 2 + 2
    assert not list((tmp_path / "work").glob(".*"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vocabulary": 0}, "vocabulary must be in 1..65531, got 0"),
        ({"pieces": 1 << 16}, "pieces must be in 1..65531, got 65536"),
        ({"pieces": 3}, "size must be at least"),
        ({"train_clients": 13}, "at most 12 of 13, got 13"),
        ({"evaluation_sentences": 0}, "evaluation_sentences must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings(database, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        prepare_stackoverflow(sqlite_reader(database), SETTINGS._replace(**change), tmp_path / "w")


def test_damaged_files(database, tmp_path):
    rows = [(split, user, encode_example(each)) for split, user, each in examples()]
    path = write_sqlite(tmp_path / "short.sqlite", rows)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM examples WHERE client_id = '00004' AND rowid % 2")
    connection.commit()
    connection.close()
    with pytest.raises(
        ValueError, match="client '00004' has 5 examples of 'train', client_metadata"
    ):
        prepare_stackoverflow(sqlite_reader(path), SETTINGS, tmp_path / "work")
    other = write_sqlite(tmp_path / "other.sqlite", rows[:30])
    with pytest.raises(ValueError, match="has no split 'heldout'; its splits are \\['train'\\]"):
        prepare_stackoverflow(sqlite_reader(other), SETTINGS, tmp_path / "work")
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(database.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"cut\.sqlite cannot be read as TFF's examples"):
        prepare_stackoverflow(sqlite_reader(cut), SETTINGS, tmp_path / "work")
