"""The preparation programs of Stack Overflow and C4, on small made-up files in the real format."""

import gzip
import lzma

import numpy as np
import pytest

from fedcodist.data import load_prepared, manifest, vocabulary_of
from fedcodist.datasets import stackoverflow
from tests.data.test_tff import encode_example, write_sqlite
from tests.datasets.test_c4 import BAD as BAD_LINES
from tests.datasets.test_c4 import lines
from tests.datasets.test_prepare import all_bytes, one_line, program
from tests.datasets.test_stackoverflow import BAD, examples

STACKOVERFLOW, C4 = program("stackoverflow"), program("c4_mod")
SMALL = ["--vocabulary=30", "--train-clients=4", "--evaluation-sentences=7", "--processes=1"]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    rows = [(split, user, encode_example(each)) for split, user, each in examples()]
    bad = [("train", "00003", blob) for blob in BAD.values()]
    return write_sqlite(tmp_path_factory.mktemp("tff") / "stackoverflow.sqlite", rows + bad)


@pytest.fixture
def prepare(capsys):
    def run(module, source, output, *arguments):
        status = module.main(["--source", str(source), "--output", str(output), *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_stackoverflow(prepare, database, tmp_path):
    compressed = tmp_path / "stackoverflow.sqlite.lzma"
    compressed.write_bytes(lzma.compress(database.read_bytes(), format=lzma.FORMAT_ALONE))
    for name, source in (("plain", database), ("lzma", compressed)):
        status, printed, error = prepare(STACKOVERFLOW, source, tmp_path / name, *SMALL)
        assert (status, error) == (0, "")
        assert "skipped: 1 empty, 1 malformed, 1 neither" in printed
    plain, packed = (load_prepared(tmp_path / name) for name in ("plain", "lzma"))
    assert set(plain) == {"train", "distillation", "held_out", "test", "vocabulary"}
    for name, data in plain.items():
        for column, values in data.columns.items():
            np.testing.assert_array_equal(values, packed[name].columns[column])
    arguments = manifest(tmp_path / "plain")["arguments"]
    assert arguments["domains"] == ["questions", "answers"]
    assert arguments["skipped"] == dict.fromkeys(sorted(BAD), 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"plain", "lzma", compressed.name}  # nothing of what lets a stopped run go on
    again = prepare(STACKOVERFLOW, database, tmp_path / "plain", *SMALL)
    assert again[0] == 0 and "verified; nothing is left to do" in again[1]
    before = all_bytes(tmp_path / "plain")
    error = one_line(prepare(STACKOVERFLOW, database, tmp_path / "plain", *SMALL, "--seed=1"))
    assert "was prepared with other arguments: seed is 0, now it would be 1" in error
    assert prepare(STACKOVERFLOW, database, tmp_path / "two", *SMALL)[0] == 0
    assert all_bytes(tmp_path / "two") == before


def test_a_stopped_program_goes_on(prepare, database, tmp_path, monkeypatch):
    monkeypatch.setattr(stackoverflow, "USERS_PER_SHARD", 3)
    encode, encoded = stackoverflow._encode_shard, []

    def stopping(*arguments):
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.append(arguments[-1].name)
        encode(*arguments)

    monkeypatch.setattr(stackoverflow, "_encode_shard", stopping)
    status, _, error = prepare(STACKOVERFLOW, database, tmp_path / "out", *SMALL)
    assert status == 130 and "run the same command again" in error
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.work").exists()
    # All words are counted already.
    monkeypatch.setattr(stackoverflow, "_count_shard", lambda *arguments: pytest.fail("again"))
    done, encoded[:] = set(encoded), [""] * 5
    assert prepare(STACKOVERFLOW, database, tmp_path / "out", *SMALL)[0] == 0
    assert len(encoded[5:]) == 9 - 4 and not done & set(encoded[5:])
    assert not (tmp_path / ".out.work").exists()
    monkeypatch.undo()
    assert prepare(STACKOVERFLOW, database, tmp_path / "whole", *SMALL)[0] == 0
    assert all_bytes(tmp_path / "whole") == all_bytes(tmp_path / "out")


def test_the_package_of_tff_is_no_source(prepare, tmp_path, capsys):
    error = one_line(prepare(STACKOVERFLOW, "tff", tmp_path / "out", *SMALL))
    assert "--source must be TFF's file stackoverflow.sqlite.lzma, got 'tff'" in error
    assert "cannot be installed beside this JAX" in error
    with pytest.raises(SystemExit):
        STACKOVERFLOW.main(["--help"])
    assert "'tff'" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--processes=0"], "--processes must be at least 1, got 0"),
        (["--vocabulary=0"], "vocabulary must be in 1..65531, got 0"),
        (["--train-clients=12"], "train_clients must leave users for unlabelled text"),
    ],
)
def test_bad_arguments_are_one_line(prepare, database, tmp_path, arguments, message):
    error = one_line(prepare(STACKOVERFLOW, database, tmp_path / "out", *SMALL, *arguments))
    assert message in error and not list(tmp_path.iterdir())


def test_damaged_sources_leave_nothing(prepare, database, tmp_path):
    (tmp_path / "in").mkdir()
    content = {
        "cut.sqlite": database.read_bytes()[:9000],
        "cut.sqlite.lzma": lzma.compress(database.read_bytes())[:500],
        "text.sqlite": b"no database",
    }
    for name, each in content.items():
        path = tmp_path / "in" / name
        path.write_bytes(each)
        assert name in one_line(prepare(STACKOVERFLOW, path, tmp_path / "out", *SMALL))
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
    error = one_line(prepare(STACKOVERFLOW, tmp_path / "none", tmp_path / "out", *SMALL))
    assert "does not exist" in error


@pytest.mark.parametrize("pieces", [[], ["--pieces=40"]])
def test_c4_in_the_vocabulary_of_stack_overflow(prepare, database, tmp_path, pieces):
    text = tmp_path / "text"
    assert prepare(STACKOVERFLOW, database, text, *SMALL, *pieces)[0] == 0
    source = tmp_path / "c4"
    source.mkdir()
    (source / "c4-train.00000-of-01024.json").write_bytes(BAD_LINES + lines("The median. More."))
    packed = gzip.compress(lines("The u1 the.\nThe zebra\n\nu2"))
    (source / "c4-train.00001-of-01024.json.gz").write_bytes(packed)
    arguments = ["--vocabulary-of", str(text), "--sentences=3"]
    status, printed, error = prepare(C4, source, tmp_path / "c4_mod", *arguments)
    assert (status, error) == (0, "") and "skipped: 4 malformed" in printed
    splits = load_prepared(tmp_path / "c4_mod")
    vocabulary = vocabulary_of(splits)
    assert vocabulary == vocabulary_of(load_prepared(text))
    tokens = splits["distillation"].columns["tokens"]
    assert tokens.shape == (3, 21) and vocabulary.decode(tokens[1])[:3] == ["the", "u1", "the"]
    again = prepare(C4, source, tmp_path / "c4_mod", *arguments)
    assert again[0] == 0 and "verified" in again[1]
    assert prepare(C4, source, tmp_path / "two", *arguments)[0] == 0
    assert all_bytes(tmp_path / "two") == all_bytes(tmp_path / "c4_mod")
    error = one_line(prepare(C4, source, tmp_path / "no", *arguments[:2], "--sentences=0"))
    assert "--sentences must be at least 1, got 0" in error
    error = one_line(prepare(C4, source, tmp_path / "no", "--vocabulary-of", str(source)))
    assert "is this a prepared folder?" in error
    words = text / "vocabulary" / "word.npy"
    content = words.read_bytes()
    words.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])  # the last letter
    error = one_line(prepare(C4, source, tmp_path / "no", *arguments))
    assert "word.npy differs from its sha256 in the manifest" in error
