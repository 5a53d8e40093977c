"""Names of `fedcodist`: the table that they are imported by, the stub that editors read, the version.

python tests/test_public_names.py writes the stub anew.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import fedcodist as fc

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedcodist"
STUB = PACKAGE / "__init__.pyi"


def stub() -> str:
    imports = (
        f"from fedcodist.{module} import {name} as {name}\n"
        for name, module in sorted(fc._MODULE_OF.items(), key=lambda item: (item[1], item[0]))
    )
    return "".join((*imports, "\n__version__: str\n__all__: list[str]\n"))


def test_the_stub_is_the_table():
    assert STUB.read_text(encoding="utf-8") == stub()


@pytest.mark.parametrize("name", fc.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(fc, name) is not None


def test_a_name_of_before_tells_the_one_of_now():
    with pytest.raises(AttributeError, match="'isolated'; it is called 'local_only' now"):
        fc.__getattr__("isolated")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        fc.__getattr__("nothing")
    assert set(fc._NOW_CALLED.values()) <= set(fc.__all__)


def test_the_version_is_the_packages():
    version = re.search(r'version="(.*)"', (ROOT / "setup.py").read_text(encoding="utf-8"))[1]
    assert fc.__version__ == version


def names_in(text):
    """Dotted names of the package, and `fc.<name>`, in a text."""
    yield from re.findall(r"(?<![\w/.\"])fedcodist(?:\.[A-Za-z_]\w*)+", text)
    yield from (f"fedcodist.{name}" for name in re.findall(r"(?<![\w.])fc\.([A-Za-z]\w*)", text))
    for module, names in re.findall(r"from (fedcodist[\w.]*) import ([\w, ]+)", text):
        yield from (f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(","))


def exists(name):
    """Whether a dotted name is a module, or what one of its attributes leads to."""
    module, *attributes = name.split(".")
    found = importlib.import_module(module)
    for attribute in attributes:
        module = f"{module}.{attribute}"
        try:  # a function may have its module's name
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
    return True


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("experiments/notebooks/*.ipynb")])
def test_names_in_documents_exist(path):
    if path.name == "CHANGELOG.md":
        pytest.skip("tells names of before")
    names = set(names_in(path.read_text(encoding="utf-8").replace("\\n", "\n")))
    assert not {name for name in names if not exists(name)} - {"fedcodist.name"}


def test_names_in_docstrings_and_messages_exist():
    names = {
        name
        for path in (ROOT / "fedcodist").rglob("*.py")
        for name in names_in(path.read_text(encoding="utf-8"))
    }
    assert not {name for name in names if not exists(name)} - {"fedcodist.name"}


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")


def unannotated(tree):
    """Public functions and methods of a module with an argument or a result that has no type.

    Functions inside functions are left out: a method's parts have the types of its named tuple's fields.
    """
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    for node in (*tree.body, *(member for cls in classes for member in cls.body)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            typed = all(a.annotation for a in arguments if a.arg not in ("self", "cls"))
            if node.returns is None or not typed:
                yield node.name


@pytest.mark.parametrize(
    "room",
    # What `configs` holds is written as users write it.
    sorted(path.parent for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "configs"),
    ids=lambda room: room.name,
)
def test_public_functions_have_types(room):
    for path in room.rglob("*.py"):
        assert not list(unannotated(ast.parse(path.read_text(encoding="utf-8")))), path
