"""The Python of the documents runs: all blocks of a page in their order, as a reader would type them.

A block that begins with `# name.py` is a part of a file of that name beside the program, for pages
that have the reader write a module. A page whose first line is `<!-- slow -->` belongs to the slow
suite. What is not to be run is no `python` block: output is `text`, other libraries' code is `py`.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedcodist

ROOT = Path(__file__).parents[2]
SLOW = "<!-- slow -->"
FILE = re.compile(r"# (\w+\.py)\b")


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.M)


def pages():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if blocks(path):
            is_slow = path.read_text(encoding="utf-8").startswith(SLOW)
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(path, id=str(path.relative_to(ROOT / "docs")), marks=marks)


@pytest.mark.parametrize("path", list(pages()))
def test_the_code_of_a_page_runs(path, tmp_path):
    parts = {"page.py": []}  # file -> its blocks
    for block in blocks(path):
        file = FILE.match(block)
        parts.setdefault(file[1] if file else "page.py", []).append(block)
    for name, of_file in parts.items():
        (tmp_path / name).write_text("\n\n".join(of_file), encoding="utf-8")
    run("page.py", tmp_path)


def run(program, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "module", "config"),
    [
        ("clients", "my_methods", "digits_codist"),
        ("pools", "mean_logits", "digits_codist"),
        ("graph", "gossip", "digits_mhd"),
    ],
)
def test_the_config_of_a_page_is_accepted(page, module, config, tmp_path):
    """The first block and the entry are the method's module, and the lines change a shipped config."""
    path = ROOT / "docs" / "writing_a_method" / f"{page}.md"
    shown = re.findall(r"^```py\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.M)
    (entry,) = (block for block in shown if "register(" in block)
    (lines,) = (block for block in shown if block.startswith("config.methods"))
    (tmp_path / f"{module}.py").write_text(f"{blocks(path)[0]}\n\n{entry}", encoding="utf-8")
    program = [
        "from fedcodist.config import defaults",
        "from fedcodist.config.experiment import build_experiment",
        f"from fedcodist.configs.{config} import get_config",
        "config = get_config().unlock()",
        lines,
        "build_experiment(config)",
    ]
    (tmp_path / "page.py").write_text("\n".join(program), encoding="utf-8")
    run("page.py", tmp_path)


def test_pages_of_the_site_are_in_its_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = set(re.findall(r"[\w/]+\.md", navigation))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    generated = {name for name in named if name.startswith(("api/", "results/index", "benchmarks"))}
    assert written == named - generated


def test_cross_references_lead_to_names_of_the_api():
    listed = {f"fedcodist.{module}.{name}" for name, module in fedcodist._MODULE_OF.items()}
    for node in ast.parse((ROOT / "docs" / "api_pages.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OF_AUTHORS":
            of_authors = eval(ast.unparse(node.value))
    listed |= {f"fedcodist.{m}.{name}" for m, names in of_authors.items() for name in names}
    for path in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\[(fedcodist\.[\w.]+)\]", path.read_text(encoding="utf-8")):
            assert {target, target.rpartition(".")[0]} & listed, (path.name, target)


def test_no_text_has_both_sides_of_a_merge():
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/**/*.md")]
    ends = ("<<<<<<< ", ">>>>>>> ")
    assert not [path for path in texts if any(end in path.read_text("utf-8") for end in ends)]
