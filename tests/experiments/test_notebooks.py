"""The notebooks run, need public names only, and are stored with clean outputs.

A notebook's last cell holds the command that stores its outputs anew after a change.
"""

import ast
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import nbclient
import nbformat
import pytest

import fedcodist as fc

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "notebooks"
# Parameters of a short run.
FEW_ROUNDS = {
    "codistillation": {
        "ROUNDS": 3,
        "SEEDS": 2,
        "EVALUATE_EVERY": 2,
        "PERIOD": 2,
        "PERIODIC_STEPS": 2,
        "MERGED_STEPS": 1,
    },
    "knowledge_on_a_graph": {"ROUNDS": 3, "STEPS": 2, "EVALUATE_EVERY": 2},
    "your_own": {"ROUNDS": 3, "STEPS": 1, "EVALUATE_EVERY": 2},
}
FIGURES = {"codistillation": 3, "knowledge_on_a_graph": 4, "your_own": 2}
PACKAGES = {
    *("fedcodist", "flax", "importlib", "jax", "matplotlib", "numpy", "optax"),
    *("subprocess", "sys"),
}


class Notebook(NamedTuple):
    """A stored notebook."""

    name: str

    @property
    def path(self):
        return FOLDER / f"{self.name}.ipynb"

    @property
    def stored(self):
        return nbformat.read(self.path, 4)

    @property
    def code(self):
        return code_cells(self.stored)

    def output(self, call):
        """The output of the cell with a call."""
        (cell,) = [cell for cell in self.code if call in cell.source]
        return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(params=sorted(FEW_ROUNDS))
def notebook(request):
    return Notebook(request.param)


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(FEW_ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(FEW_ROUNDS), indirect=True)
def test_it_runs_with_few_rounds(notebook, tmp_path, monkeypatch):
    run, few = notebook.stored, FEW_ROUNDS[notebook.name]
    parameters = parameters_cell(run)
    assert set(assigned(parameters.source)) >= set(few)
    parameters.source += "\n" + "\n".join(f"{name} = {n}" for name, n in few.items())
    execute(run, tmp_path, monkeypatch)
    for stored, now in zip(notebook.code, code_cells(run), strict=True):
        assert kinds(now) == kinds(stored), f"{now.id}: {now.outputs}"


def test_a_cell_that_raises_fails(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell("1 / 0")
    metadata = Notebook("codistillation").stored.metadata
    raising = nbformat.v4.new_notebook(cells=[cell], metadata=metadata)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(raising, tmp_path, monkeypatch)


def test_installation_is_left_out_where_the_library_is_importable(notebook, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("installed something"))
    exec(notebook.code[0].source, {})


@pytest.mark.parametrize("has_plugin", [False, True])
def test_installation_comes_from_the_repository(notebook, has_plugin, monkeypatch):
    """Alone, the library would bring a JAX that does not use the CUDA plugin that Colab has."""
    commands, has = [], {"jax_cuda12_plugin": True} if has_plugin else {}
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    monkeypatch.setattr(importlib.util, "find_spec", has.get)
    exec(notebook.code[0].source, {})
    ((command, check),) = commands
    assert check and command[1:4] == ["-m", "pip", "install"]
    assert re.fullmatch(r"fedcodist\[digits,plot\] @ git\+https://\S+", command[5])
    assert command[6:] == (["jax[cuda12]"] if has_plugin else [])


def test_colab_opens_it_from_the_repository_that_is_installed(notebook):
    names = {}
    exec(notebook.code[0].source, names)
    where = f"{names['REPOSITORY']}/blob/main/{notebook.path.relative_to(ROOT).as_posix()}"
    title = notebook.stored.cells[0].source
    assert re.findall(r"colab\.research\.google\.com/github/([^)\s]+)", title) == [where]
    # The command in BUILD.md that puts another repository in its place finds it by this.
    assert notebook.path.read_text(encoding="utf-8").count(names["REPOSITORY"]) == 2
    (command,) = re.findall(
        r"git grep .*sed -i .*", (ROOT / "BUILD.md").read_text(encoding="utf-8")
    )
    found, replaced = command.split(" | ")
    assert found == f"git grep -l {names['REPOSITORY']}" and f"s#{names['REPOSITORY']}#" in replaced
    assert replaced.endswith("#g'")  # a file may name it twice, as this notebook does


def test_it_tells_how_to_store_its_own_outputs(notebook):
    assert f"'experiments/notebooks/{notebook.path.name}'" in notebook.stored.cells[-1].source


def test_it_is_written_with_public_names(notebook):
    assert not [problem for cell in notebook.code for problem in not_public(cell.source)]


@pytest.mark.parametrize(
    "source",
    [
        "from experiments import record",
        "import fedcodist.report",
        "from fedcodist.run.metrics_lines import _plain",
        "from fedcodist import _MODULE_OF",
        "from fedcodist.distillation.loop import *",
        "from fedcodist.algorithms.pools.codistillation import distill",  # lives in distillation.loop
        "from fedcodist.algorithms.pools.codistillation import UNLABELLED",
        "import fedcodist.core.keys",
        "import fedcodist as fc\nfc.keys",
        "pool._replace(cohort_size=3)",
        "import torch",
    ],
)
def test_names_that_are_not_public_are_found(source):
    assert not_public(source)


def test_outputs_are_stored_and_clean(notebook):
    code = notebook.code
    assert notebook.path.stat().st_size < 300_000
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum("image/png" in kinds(cell) for cell in code) == FIGURES[notebook.name]
    for cell in code:
        assert not {"stderr", "error"} & kinds(cell), cell.id


def test_outputs_of_codistillation_are_those_of_a_full_run():
    text = Notebook("codistillation").output("fc.periodic_codistillation(")
    accuracies = re.findall(r"(\w+) +([\d.]+) %", text)
    assert [name for name, _ in accuracies] == ["small", "large"]
    assert all(float(value) > 90 for _, value in accuracies)


def test_outputs_of_knowledge_on_a_graph_show_knowledge_arriving():
    """Every client classifies its own digits; the last head also those of others."""
    lines = Notebook("knowledge_on_a_graph").output("mean accuracy (%) by hops").splitlines()
    means = {line[:28].strip(): [float(each) for each in line[28:].split()] for line in lines}
    assert means.pop("mean accuracy (%) by hops") == list(range(8))
    main, *_, last = means.values()
    assert list(means) == ["main head", *(f"head {k}" for k in range(1, len(means)))]
    assert main[0] > 90
    assert last[1] > main[1] + 20


def test_outputs_of_your_own_are_those_of_a_full_run():
    text = Notebook("your_own").output("fc.merged_codistillation(")
    accuracies = dict(re.findall(r"(\w+) +accuracy ([\d.]+)", text))
    assert set(accuracies) == {"small", "large"}
    assert all(float(value) > 0.9 for value in accuracies.values())


def test_nothing_of_the_machine_is_stored(notebook):
    stored = notebook.stored
    assert stored.metadata.kernelspec.name == "python3"
    assert set(stored.metadata) <= {"kernelspec", "language_info"}
    for cell in stored.cells:
        assert set(cell.metadata) <= {"tags"}, cell.id
        # Cells with this tag may raise and the run would go on.
        assert "raises-exception" not in cell.metadata.get("tags", []), cell.id
    text = re.sub(r'"image/png": "[^"]*"', "", notebook.path.read_text(encoding="utf-8"))
    paths = re.findall(r"site-packages|ipykernel_\d+|[ \"'(=](/[a-z]+/\S+|[A-Z]:\\\S+)", text)
    assert not paths


def execute(notebook, folder, monkeypatch):
    """Runs it outside of the repository, on one device and with nothing of the user's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters_cell(notebook):
    (cell,) = [c for c in code_cells(notebook) if "parameters" in c.metadata.get("tags", [])]
    return cell


def assigned(source):
    """The names that the module-level assignments of `source` set."""
    statements = ast.parse(source).body
    return [s.targets[0].id for s in statements if isinstance(s, ast.Assign)]


def kinds(cell):
    """What a cell puts out: names of streams, the richest type of everything else."""
    return {
        output.get("name") or min(output.get("data", {output.output_type: ""}))
        for output in cell.outputs
    }


def not_public(source):
    """Names in `source` that are not the library's public ones, and packages that it does not need.

    Public are `fc.name` for the names of `fc.__all__`, and from a module with a docstring what is
    defined there, has a docstring and no leading underscore.
    """
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = (name.name, name.asname) == ("fedcodist", "fc")
                package = name.name.split(".")[0]
                if package not in PACKAGES or (package == "fedcodist" and not whole):
                    problems.append(name.name)
        elif isinstance(node, ast.ImportFrom):
            problems += [
                f"{node.module}.{name.name}"
                for name in node.names
                if (node.module, name.name) != ("flax", "nnx")
                and not is_documented(node.module, name.name)
            ]
        elif isinstance(node, ast.Attribute):
            of_package = isinstance(node.value, ast.Name) and node.value.id == "fc"
            if node.attr.startswith("_") or (of_package and node.attr not in fc.__all__):
                problems.append(node.attr)
    return problems


def is_documented(module_name, name):
    if not module_name.startswith("fedcodist.") or re.search(r"(^|\.)_", f"{module_name}.{name}"):
        return False
    module = importlib.import_module(module_name)
    value = getattr(module, name, None)
    return bool(
        module.__doc__
        and getattr(value, "__doc__", None)
        and getattr(value, "__module__", None) == module_name
    )
