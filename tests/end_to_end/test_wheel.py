"""What a user has who installs the wheel with two extras: the commands, away from any checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The folder of programs of a new environment that holds the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built of a copy: an older build in the checkout would leave its files in the wheel.
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "fedcodist", folder / "fedcodist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir=dist", "."]
    subprocess.run(pip, cwd=folder, check=True)
    (wheel,) = (folder / "dist").glob("fedcodist-*.whl")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    install = [str(programs / "python"), "-m", "pip", "install", f"{wheel}[digits,plot]"]
    # Where pip finds the sources on Python's path, it takes them for the installed package.
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(install, cwd=folder / "dist", env=mine, check=True)
    return programs


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def fedcodist(programs, elsewhere, environment):
    """Runs the installed command in a folder of its own; returns what it printed, both kinds."""
    mine = {name: value for name, value in environment.items() if name != "PYTHONPATH"}

    def run(*arguments, status=0):
        done = subprocess.run(
            [str(programs / "fedcodist"), *arguments],
            cwd=elsewhere,
            env=mine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    return run


def test_the_package_is_the_wheels_and_says_what_it_has(fedcodist, programs, elsewhere):
    path = "import fedcodist; print(fedcodist.__file__)"
    printed = subprocess.check_output(
        [str(programs / "python"), "-c", path], cwd=elsewhere, env={}, text=True
    )
    assert Path(printed).is_relative_to(programs.parent)
    assert "digits_codist" in (text := fedcodist("list")) and "FedSDD" in text


def test_the_demo_writes_table_plots_and_page(fedcodist, elsewhere):
    printed = fedcodist("demo", "--rounds", "10", "--seeds", "1")
    assert all(name in printed for name in ("FedAvg", "PeriodicCodist", "MergedCodist"))
    demo = elsewhere / "runs" / "demo"
    assert (demo / "report.html").exists() and (demo / "accuracy.png").exists()
    assert f"wrote {Path('runs', 'demo', 'report.html')}" in fedcodist("report", "runs/demo")


def test_a_run_by_name_is_found_by_a_comparison(fedcodist, elsewhere):
    short = "--config.rounds=5"
    assert "workdir: runs/digits_codist/fed_avg" in fedcodist("run", "digits_codist:fed_avg", short)
    folder = elsewhere / "runs" / "digits_codist" / "fed_avg"
    assert set(json.loads((folder / "summary.json").read_text())["final"]) == {"small", "large"}
    metrics = (folder / "metrics.jsonl").read_bytes()
    chosen = ("--only=fed_avg", "--only=hetero_fl")
    printed = fedcodist("compare", "digits_codist", *chosen, short)
    assert "HeteroFL" in printed and "FedAvg" in printed
    assert (elsewhere / "runs" / "digits_codist" / "report" / "report.html").exists()
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # it was finished
    assert "finished already" in fedcodist("sweep", "digits_codist", *chosen, short)
    assert "HeteroFL" in fedcodist("report", "runs/digits_codist")


def test_a_config_of_ones_own_imports_what_lies_beside_it(fedcodist, elsewhere):
    (elsewhere / "my_settings.py").write_text("ROUNDS = 1\n")
    (elsewhere / "my_config.py").write_text(
        "from fedcodist.configs import digits_codist\n"
        "from my_settings import ROUNDS\n\n\n"
        "def get_config():\n"
        "    config = digits_codist.get_config('fed_avg')\n"
        "    config.name, config.rounds = 'mine', ROUNDS\n"
        "    return config\n"
    )
    printed = fedcodist("run", "my_config.py", "--workdir=runs/mine", "--processes=2")
    assert "run folder: runs/mine" in printed


def test_text_is_prepared_and_refused_where_it_is_not(fedcodist, elsewhere):
    printed = fedcodist("run", "python_source_codist:fed_avg", status=2)
    assert "there is no data/python_source" in printed and "fedcodist prepare" in printed
    fedcodist("prepare", "python_source", "--output=data/python_source", "--max-examples=5")
    assert (elsewhere / "data" / "python_source" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["tune", "digits_codist", "--study=x", "--storage=x.db"], "tune"),
        (["prepare", "ade", "--source=x", "--output=y"], "text"),
        (["prepare", "cifar10", "--source=tfds", "--output=y"], "tfds"),
    ],
)
def test_an_extra_that_is_not_installed_is_one_line(arguments, extra, fedcodist):
    last = fedcodist(*arguments, status=2).splitlines()[-1]
    assert last.startswith("error: ") and last.endswith(f'pip install "fedcodist[{extra}]"')


def test_links_of_the_packages_page_are_absolute(programs, elsewhere):
    """The README is the package's page in an index, which has no files beside it."""
    code = "import importlib.metadata as m; print(m.metadata('fedcodist').get_payload())"
    page = subprocess.check_output(
        [str(programs / "python"), "-c", code], text=True, env={}, cwd=elsewhere
    )
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")))
def test_the_notebooks_run(path, programs, elsewhere, environment):
    install = [str(programs / "python"), "-m", "pip", "install", "nbclient", "ipykernel"]
    mine = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    subprocess.run(install, cwd=elsewhere, env=mine, check=True)
    notebook = nbformat.read(path, 4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source += "\nROUNDS = 3\nEVALUATE_EVERY = 2"
    nbformat.write(notebook, elsewhere / path.name)
    # The kernel is the environment's, whatever else is installed for Jupyter.
    mine["JUPYTER_PREFER_ENV_PATH"] = "1"
    command = [str(programs / "jupyter-execute"), "--kernel_name=python3", path.name]
    subprocess.run(command, cwd=elsewhere, env=mine, check=True)
