"""Without Hugging Face's package: one line, also where a folder has the package's name."""

import sys
import types

import pytest

from fedcodist.data import from_hugging_face


@pytest.mark.parametrize("module", [None, types.ModuleType("datasets")])
def test_the_line_says_what_to_install(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ImportError, match=r"""'cifar10' needs .* pip install "fedcodist\[hf\]\""""):
        from_hugging_face("cifar10", "train")
