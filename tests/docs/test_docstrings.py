"""Examples in docstrings give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fedcodist"
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if "\n    >>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed


def test_some_modules_have_examples():
    assert len(MODULES) >= 6
