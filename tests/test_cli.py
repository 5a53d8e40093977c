"""The command `fedcodist`: what it makes of its arguments, and what it says of mistakes."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from fedcodist import cli
from fedcodist.commands.prepare import DATA_SETS
from fedcodist.config import command_line
from fedcodist.config.config_file import (
    ConfigFileError,
    config_path,
    load_config_file,
    shipped_configs,
)
from fedcodist.config.data_bert import ENCODERS, SMALL_ENCODERS
from fedcodist.config.data_text import TEXT_MODELS
from fedcodist.config.networks import MODELS, WITH_EXITS
from fedcodist.config.registry import ENTRIES
from fedcodist.configs import digits_codist
from tests.datasets.test_mnist import program as mnist_program

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without a checkout; the command changes sys.argv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    return tmp_path


@pytest.fixture
def given(monkeypatch):
    """Replaces the commands' modules; the function returns what its module was given for arguments."""

    def run(name, *arguments):
        calls = []
        module = importlib.import_module(cli.COMMANDS[name][0])
        monkeypatch.setattr(module, "main", lambda passed: calls.append(list(passed)) or 7)
        assert cli.main([name, *arguments]) == 7
        assert sys.argv[0] == f"fedcodist {name}"
        (call,) = calls
        return call

    return run


def one_line(capsys):
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1, line
    return line


# Which config, and which work folder.


def test_a_config_is_named_with_or_without_a_path(given):
    passed = given("sweep", "digits_methods", "--workdir=here", "--only", "fed_*")
    assert passed == ["--config=digits_methods", "--workdir=here", "--only", "fed_*"]
    assert given("sweep", "--config", "a.py", "--workdir", "b") == [
        *("--config", "a.py", "--workdir", "b")
    ]
    assert given("tune", "digits_codist", "--study=x") == [
        *("fedcodist tune", "--config=digits_codist", "--study=x")
    ]


@pytest.mark.parametrize(
    ("command", "workdir"),
    [
        (["run", "digits_codist:fed_avg"], "runs/digits_codist/fed_avg"),
        (["run", "digits_codist"], "runs/digits_codist/merged_codistillation"),
        (["run", "digits_compression:fed_avg,svd"], "runs/digits_compression/fed_avg-svd"),
        (["run", "digits_fed_md"], "runs/digits_fed_md"),
        (["run", str(Path(digits_codist.__file__))], "runs/digits_codist/merged_codistillation"),
        (["sweep", "digits_codist"], "runs/digits_codist"),
        (["compare", "digits_codist", "--metric=loss"], "runs/digits_codist"),
    ],
)
def test_a_work_folder_that_is_not_given_is_shown(command, workdir, given, capsys):
    assert f"--workdir={workdir}" in given(*command)
    assert capsys.readouterr().out == f"workdir: {workdir}\n"


def test_a_folder_of_a_configs_name_is_no_config_where_it_has_runs_and_compare_may_mean_them(
    given, elsewhere
):
    folder = elsewhere / "digits_codist"
    folder.mkdir()
    as_config = "--config=digits_codist"
    assert given("compare", "digits_codist")[0] == as_config
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_text("{}")
    assert given("compare", "digits_codist") == ["digits_codist"]
    assert given("compare", "digits_codist", "--workdir=x")[0] == as_config
    for command in ("run", "sweep", "tune", "partition"):
        assert as_config in given(command, "digits_codist", "--config.rounds=3")


@pytest.mark.parametrize("command", [["run", "digits_codist:nope"], ["sweep", "digits_codits"]])
def test_no_work_folder_is_shown_for_a_config_that_is_refused(command, given, capsys):
    assert not any(argument.startswith("--workdir") for argument in given(*command))
    assert capsys.readouterr().out == ""


def test_only_a_list_of_names_is_printed_where_it_is_asked_for(capsys):
    assert cli.main(["sweep", "digits_codist", "--list"]) == 0
    assert capsys.readouterr().out.split() == digits_codist.get_runs()


def test_other_commands_are_given_what_was_written(given):
    for name in ("report", "prepare", "demo", "list"):
        assert given(name, "a", "--b=c") == ["a", "--b=c"]


def test_the_launcher_takes_a_name_too():
    values = flags.FlagValues()
    arguments = ["program", "--config=digits_codist:fed_avg", "--config.rounds=5"]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    command_line.parse(arguments, values, required=("config",))
    expected = digits_codist.get_config("fed_avg")
    expected.rounds = 5
    assert values.config.to_dict() == expected.to_dict()


def test_every_config_that_ships_has_a_name(elsewhere):
    files = {path.stem for path in (ROOT / "fedcodist" / "configs").glob("digits_*.py")}
    assert {*files, "python_source_codist", "your_own"} == set(shipped_configs())
    for name in shipped_configs():
        assert config_path(name) == config_path(f"{name}.py")
        assert load_config_file(name).__doc__
    # A file of one's own comes first, a folder does not.
    (elsewhere / "digits_codist").mkdir()
    assert Path(config_path("digits_codist")).is_absolute()
    (elsewhere / "digits_codist.py").write_text("")
    assert config_path("digits_codist.py") == "digits_codist.py"
    with pytest.raises(ConfigFileError, match="existing file, got 'elsewhere/digits_codist'"):
        config_path("elsewhere/digits_codist")


# Mistakes.


@pytest.mark.parametrize("command", [["sweep"], ["compare"], ["tune", "--study=x", "--storage=y"]])
def test_an_unknown_config_is_one_line_with_the_known_ones(command, capsys):
    assert cli.main([command[0], "digits_codits:x", *command[1:]]) == 2
    line = one_line(capsys)
    assert "'digits_codits" in line and "digits_codist, digits_compression" in line


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", *more, "digits_codist"] for more in (["--workdir", "x"], ["--config.rounds=3"])),
        *([name, "--workdir=x", "digits_codist"] for name in ("sweep", "compare")),
        ["compare", "--metric", "loss", "digits_codist:fed_avg"],
        ["tune", "--study=x", "--storage=y", "digits_codist"],
        ["partition", "--plot", "x.png", "digits_codist"],
        ["run", "--workdir=x"],
    ],
)
def test_options_before_the_config_are_one_line_that_says_where_it_stands(arguments, capsys):
    """It was an 'unexpected argument'."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    line = f"error: give the config first: fedcodist {arguments[0]} CONFIG [options]; see --help.\n"
    assert one_line(capsys) == line


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--metric", "loss", "runs/x"],
        ["compare", "--metric=digits_codist"],
        ["tune", "--summary", "--study=x", "--storage=y"],
        ["run", "--workdir=x", "--config=digits_codist"],
        ["run", "-workdir=x", "-config=digits_codist"],
        ["run", "--flagfile=x"],
    ],
)
def test_options_come_first_where_no_config_follows(arguments, given):
    assert given(*arguments)[-len(arguments) + 1 :] == arguments[1:]


def test_an_unknown_command_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["rnu"])
    assert end.value.code == 2
    assert "run, sweep, compare" in (line := one_line(capsys)) and "'rnu'" in line


@pytest.mark.parametrize(
    "arguments", [["prepare", "cifar"], ["prepare", "mnist"], ["list", "nets"], ["report"]]
)
def test_wrong_arguments_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    one_line(capsys)


def test_options_are_written_in_full(capsys):
    parser = command_line.Parser()
    parser.add_argument("--seeds", type=int)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--seed=3"])
    assert end.value.code == 2 and "--seed=3" in one_line(capsys)


@pytest.mark.parametrize("command", [["sweep"], ["tune", "--study=x", "--storage=y"]])
def test_a_missing_package_is_found_before_anything_starts(command, monkeypatch, capsys, elsewhere):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert cli.main([command[0], "digits_methods", *command[1:]]) == 2
    assert 'pip install "fedcodist[digits]"' in one_line(capsys)
    assert not list(elsewhere.iterdir())


# What is there.


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_all_commands(arguments, capsys):
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert all(f"\n    {name} " in output for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    try:
        assert cli.main([name, "--help"]) == 0
    except SystemExit as end:
        assert end.code == 0
    assert name in capsys.readouterr().out


def test_the_package_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["fedcodist"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.program


def test_the_list_has_every_name(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    words = text.split()
    networks = (*MODELS, *WITH_EXITS, *TEXT_MODELS, *ENCODERS, *SMALL_ENCODERS)
    for name in (*shipped_configs(), *digits_codist.get_runs(), *networks, *DATA_SETS):
        assert name in words
    assert digits_codist.__doc__.splitlines()[0] in text
    for entry in ENTRIES.values():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [entry.name]][-1:]
        assert all(part in line for part in (entry.title, entry.kind, entry.paper))


def test_a_part_of_the_list(capsys):
    assert cli.main(["list", "methods"]) == 0
    output = capsys.readouterr().out
    assert "fed_avg" in output and "digits_codist" not in output and "cifar100" not in output


def test_every_data_set_has_a_module_and_a_program():
    folder = ROOT / "datasets"
    assert set(DATA_SETS) == {path.parent.name for path in folder.glob("*/prepare.py")}
    modules = (ROOT / "fedcodist" / "commands" / "prepare").glob("[!_]*.py")
    assert set(DATA_SETS) == {path.stem for path in modules}
    module = importlib.import_module("fedcodist.commands.prepare.mnist")
    assert mnist_program().main is module.main


def test_a_data_set_is_prepared_by_its_module(capsys, elsewhere):
    assert cli.main(["prepare", "mnist", "--source=nowhere", "--output=out"]) == 2
    assert "nowhere" in one_line(capsys)
    assert not list(elsewhere.iterdir())


def test_a_start_imports_nothing_that_it_does_not_use():
    """Each of these takes a quarter of a second to seconds, of which a short run has few."""
    code = (
        "import sys; import fedcodist.commands.run, fedcodist.config.experiment; "
        "import fedcodist.configs.digits_codist; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"scipy.stats", "flax.nnx", "haiku", "matplotlib", "optuna", "sklearn", "tensorflow"}
    assert not heavy & set(done.stdout.split())
