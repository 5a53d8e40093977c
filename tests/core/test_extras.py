"""A missing package is one line with pip's command."""

import sys
import types

import pytest

from fedcodist.core.extras import check_installed


def test_a_missing_package_is_named_with_the_command():
    with pytest.raises(ImportError) as error:
        check_installed("this", "no_such_package", "digits")
    assert str(error.value) == 'this needs no_such_package: pip install "fedcodist[digits]"'


def test_a_package_may_have_another_name_than_its_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"this needs scikit-learn: pip"):
        check_installed("this", "sklearn", "digits")


def test_what_is_there_is_not_imported(monkeypatch, tmp_path):
    (tmp_path / "loud_package.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    check_installed("this", "loud_package", "digits")
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    check_installed("this", "made_up", "digits")
