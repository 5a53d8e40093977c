"""What the pages on writing a method import has a place on the page "For authors of methods"."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

import fedcodist as fc

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted((ROOT / "docs" / "writing_a_method").glob("*.md"))
# Not for methods: experiments' data, configs and commands.
OTHERS = ("fedcodist.datasets", "fedcodist.configs", "fedcodist.commands")


def of_authors():
    """The table of docs/api_pages.py, which needs mkdocs to be imported: 'module.name' of each."""
    tree = ast.parse((ROOT / "docs" / "api_pages.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OF_AUTHORS"
    ]
    listed = eval(compile(ast.Expression(table), "api_pages.py", "eval"))
    return {f"fedcodist.{module}.{name}" for module, names in listed.items() for name in names}


def imported(page):
    """'module.name' of all functions and classes that a page's code imports from the library."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcodist"):
                for alias in node.names:
                    yield node.module, alias.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_imports_is_described(page):
    listed = of_authors()
    for module, name in imported(page):
        value = getattr(importlib.import_module(module), name, None)
        is_module = value is None or type(value).__name__ == "module"
        is_constant = isinstance(value, str)  # such as the kinds of methods
        if is_module or is_constant or hasattr(fc, name) or module.startswith(OTHERS):
            continue
        assert f"{module}.{name}" in listed


def test_what_the_page_describes_is_there_and_documented():
    for path in of_authors():
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__
