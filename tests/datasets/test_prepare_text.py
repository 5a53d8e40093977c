"""The preparation programs of text, on small sources in the real format."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fedcodist.data import load_prepared, manifest, vocabulary_of
from tests.datasets.test_prepare import all_bytes, one_line, program
from tests.datasets.test_python_source import library
from tests.datasets.test_stackexchange import BAD, HEAD, dump, row

STACKEXCHANGE, PYTHON_SOURCE = program("stackexchange"), program("python_source")
SHARES = ["--shares", "0.4", "0.2", "0.2", "0.2"]


@pytest.fixture
def prepare(tmp_path, capsys):
    def run(module, source, *arguments, output=None):
        output = tmp_path / "out" / "text" if output is None else output
        status = module.main(["--source", str(source), "--output", str(output), *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def site(folder):
    rows = [row(i, str(1 + i % 2), str(i // 2), f"<p>Post {i} says x.</p>") for i in range(40)]
    return dump(folder, *rows, *BAD.values())


def test_what_is_written(prepare, tmp_path):
    status, printed, _ = prepare(STACKEXCHANGE, site(tmp_path / "beer"), "--vocabulary", "5")
    assert status == 0 and "40 posts; skipped: 1 empty, 1 malformed" in printed
    folder = tmp_path / "out" / "text"
    splits = load_prepared(folder)
    clients = {name: splits[name].num_clients for name in splits}
    assert clients == {
        "train": 12,
        "distillation": 4,
        "held_out": 2,
        "test": 2,
        "vocabulary": 1,
    }
    assert vocabulary_of(splits).words[:4] == (".", "post", "says", "x")
    arguments = manifest(folder)["arguments"]
    assert arguments["domains"] == ["questions", "answers"] and arguments["posts"] == 40
    assert arguments["skipped"] == dict.fromkeys(sorted(BAD), 1)


def whole_library(source):
    library(source)
    for name in ("argparse", "bisect", "cmd", "copy", "csv", "dis", "enum"):
        (source / f"{name}.py").write_text(f'"""Text of {name}."""\n{name} = 1\n')
    return source


def test_another_librarys_version_is_not_guessed(prepare, tmp_path):
    source = whole_library(tmp_path / "source")
    (source / "removed").mkdir()
    (source / "removed" / "__init__.py").write_bytes(b"z = 3\n")
    (source / "lib-dynload").mkdir()
    status, printed, errors = prepare(PYTHON_SOURCE, source, *SHARES)
    assert status == 0, errors
    assert "left out no_part_of_it, removed: this Python" in printed
    arguments = manifest(tmp_path / "out" / "text")["arguments"]
    assert arguments["python"] == f"unknown, read by {platform.python_version()}"
    assert arguments["left_out"] == ["no_part_of_it", "removed"]


@pytest.mark.parametrize("module", [STACKEXCHANGE, PYTHON_SOURCE])
def test_two_preparations_are_the_same_bytes(prepare, tmp_path, module):
    source = tmp_path / "source"
    if module is STACKEXCHANGE:
        site(source)
    else:
        whole_library(source)
    arguments = SHARES
    for output in ("one", "two"):
        assert prepare(module, source, *arguments, output=tmp_path / output)[0] == 0
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    again = prepare(module, source, *arguments, output=tmp_path / "one")
    assert again[0] == 0 and "verified; nothing is left to do" in again[1]
    error = one_line(prepare(module, source, *arguments, "--seed=1", output=tmp_path / "one"))
    assert "was prepared with other arguments: seed is 0, now it would be 1" in error


def test_a_cut_off_dump_leaves_nothing(prepare, tmp_path):
    whole = site(tmp_path / "beer").read_bytes()
    path = dump(tmp_path / "cut", head=whole[: len(HEAD) + 333], tail=b"")
    error = one_line(prepare(STACKEXCHANGE, path))
    assert f"is cut off: it ends at byte {len(HEAD) + 333}" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--vocabulary", "0"], "--vocabulary must be in 1..65535, got 0"),
        (["--vocabulary", "70000"], "--vocabulary must be in 1..65535, got 70000"),
        (["--seed=-1"], "--seed must not be negative, got -1"),
        (["--max-examples", "0"], "--max-examples must be at least 1, got 0"),
        (["--shares", "1", "0", "0", "0"], "--shares must be 4 positive numbers"),
        (["--shares", "nan", "0.2", "0.2", "0.2"], "shares must be 4 positive numbers"),
    ],
)
def test_bad_arguments_are_one_line(prepare, tmp_path, arguments, message):
    # Before the source is read.
    assert message in one_line(prepare(STACKEXCHANGE, tmp_path / "no_source", *arguments))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_the_embedded_source_needs_no_argument(tmp_path, capsys):
    output = tmp_path / "python_source"
    assert PYTHON_SOURCE.main(["--output", str(output), "--max-examples=20"]) == 0
    content = json.loads((output / "manifest.json").read_text())
    assert content["arguments"]["domains"] == ["prose", "code"]
    assert content["splits"]["train"]["num_clients"] > 50
    # Another process, in which sets of strings have another order.
    script = Path(__file__).parents[2] / "datasets" / "python_source" / "prepare.py"
    again = [sys.executable, str(script), f"--output={tmp_path / 'again'}"]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([*again, "--max-examples=20"], env=environment, check=True, capture_output=True)
    assert all_bytes(tmp_path / "again") == all_bytes(output)
