"""Prose and code of Python's standard library, of made-up modules and of the one installed."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.datasets.python_source import DOMAINS, STRING, prose_and_code, read_python_source

MODULE = b'''#! /usr/bin/env python3
# -*- coding: utf-8 -*-
"""A module. It has two sentences.

>>> 1 + 1
2

More text
"""
# ----------
# A comment
# of two lines.
x = 1  # beside code


def f(a, b="text"):
    \'\'\'What f does.\'\'\'
    "a string that is no docstring"
    return (a +
            b)


class A: "one line"
'''


def test_a_module():
    prose, code = prose_and_code(MODULE)
    assert [" ".join(sentence) for sentence in prose] == [
        "a module .",
        "it has two sentences .",
        "more text",
        "a comment of two lines . beside code",
        "what f does .",
        "one line",
    ]
    assert [" ".join(line) for line in code] == [
        "x = 1",
        f"def f ( a , b = {STRING} ) :",
        "return ( a + b )",
        f"class A : {STRING}",
    ]


def test_a_comment_behind_a_docstring_leaves_it():
    prose, _ = prose_and_code(b'def f():\n    """The text."""  # A remark\n')
    assert prose == [["the", "text", "."], ["a", "remark"]]


def test_formatted_strings_are_one_token():
    code = prose_and_code(b"x = f'{a + 1:{b}} {f\"{c}\"}' 'd'\n")[1]
    assert code == [["x", "=", STRING, STRING]]


@settings(max_examples=200)
@given(st.text(max_size=80))
def test_anything_is_read_or_refused(text):
    try:
        prose, code = prose_and_code(text.encode("utf-8", "surrogatepass"))
    except (SyntaxError, ValueError, RecursionError):
        return
    assert all(prose) and all(code)


def library(folder):
    (folder / "json").mkdir(parents=True)
    (folder / "json" / "tests").mkdir()
    (folder / "json" / "__init__.py").write_bytes(MODULE)
    (folder / "json" / "decoder.py").write_bytes(b"y = 2\n")
    (folder / "json" / "tests" / "test_it.py").write_bytes(b"z = 3\n")
    (folder / "ast.py").write_bytes(b"# latin\n# coding: latin-1\ns = '\xe9'\n")
    (folder / "bisect.py").write_bytes(b"def broken(:\n")
    (folder / "copy.py").write_bytes(b"s = '\xe9'\n")
    (folder / "no_part_of_it.py").write_bytes(b"z = 3\n")
    return folder


def test_clients_are_packages_and_modules(tmp_path):
    source = read_python_source(library(tmp_path))
    assert set(source.clients) == {"ast", "json"} and source.files == 5
    assert source.skipped == ("bisect.py", "copy.py")
    assert ["y", "=", "2"] in source.clients["json"]["code"]
    assert all(set(own) == set(DOMAINS) for own in source.clients.values())


def test_the_checksum_is_of_names_and_contents(tmp_path):
    one = read_python_source(library(tmp_path / "one"))
    same = read_python_source(library(tmp_path / "same"))
    assert one == same
    (tmp_path / "same" / "json" / "decoder.py").rename(tmp_path / "same" / "json" / "other.py")
    assert read_python_source(tmp_path / "same").sha256 != one.sha256


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no source files of Python's standard library"):
        read_python_source(tmp_path / "nothing")


@pytest.mark.slow
def test_the_installed_library():
    clients = read_python_source().clients
    names, prose = set(clients), clients["json"]["prose"]
    assert len(names) > 100 and {"json", "asyncio", "argparse"} <= names
    assert not {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    for domain in DOMAINS:
        count = sum(len(own[domain]) for own in clients.values())
        assert count > 20_000
    mentioned = any("javascript" in sentence for sentence in prose)
    assert mentioned
