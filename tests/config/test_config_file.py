"""Errors of a config file are one line with the file and the line number, in every command."""

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.commands import compare, sweep
from fedcodist.config import command_line
from fedcodist.tuning import tune

HEAD = """\
from ml_collections import ConfigDict

def get_runs():
    return ["a", "b"]

def get_config(run="a"):
    config = ConfigDict(dict(name="x", rounds=1, execution=dict(processes=1)))
"""
# Code at the end of get_config, line 8 -> the message.
RAISES = {
    "import a_library_that_is_not_there": "ModuleNotFoundError: No module named",
    "nothing_of_this_name": "NameError: name 'nothing_of_this_name' is not defined",
    "raise SystemExit": "ended the program with sys.exit(None)",
    "raise SystemExit(0)": "ended the program with sys.exit(0)",
    "raise SystemExit('bye')": "ended the program with sys.exit('bye')",
    "raise RuntimeError('of its own')": "RuntimeError: of its own",
    "raise type('Mine', (Exception,), {})('two\\nlines')": "Mine: two lines",
    "raise type('Mine', (BaseException,), {})('base')": "Mine: base",
    "assert False, 'not so'": "AssertionError: not so",
    "raise NotImplementedError": "NotImplementedError",
    "raise StopIteration": "StopIteration",
    "raise MemoryError": "MemoryError",
    "raise ValueError('a run is one of')": ": a run is one of",
    "open('/none/there')": "FileNotFoundError: ",
    "config.rounds = 'many'": "TypeError: ",
    "config.lock(); config.round = 1": 'Did you mean "rounds"',
    "return 3": "get_config() must return a ConfigDict, got int",
    "return": "get_config() must return a ConfigDict, got NoneType",
}
# Files without a get_config that could be called.
FILES = {
    "def get_config(:": "SyntaxError: invalid syntax (line 1)",
    "import sys; sys.exit(0)": "ended the program with sys.exit(0)",
    "raise KeyError('x')": "KeyError: 'x'",
    "get_config = 3\ndef get_runs(): return ['a']": "the file has no get_config()",
    "def get_runs(): return ['a']": "the file has no get_config()",
}


def parse(arguments):
    """Parses a config file as `main` does, with separate flags."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=["main", arguments[0]])
    try:
        command_line.parse(["main", arguments[0]], values, required=("config",))
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    return 0


COMMANDS = {
    "main": parse,
    "sweep": lambda arguments: sweep.main([*arguments, "--list"]),
    "compare": lambda arguments: compare.main([*arguments, "--list"]),
    "tune": lambda arguments: tune.main(["tune", arguments[0], "--study=s", "--storage=none.db"]),
}


@pytest.fixture
def refusal(tmp_path, capsys):
    """The message of a command for a config file with this text."""

    def refusal(name, text):
        path = tmp_path / "config.py"
        path.write_text(text)
        status = COMMANDS[name]([f"--config={path}", f"--workdir={tmp_path / 'runs'}"])
        errors = capsys.readouterr().err
        assert status == 2, errors
        assert errors.startswith("error: ") and errors.count("\n") == 1, errors
        assert str(path) in errors
        return errors

    return refusal


@pytest.mark.parametrize("name", COMMANDS)
def test_a_config_that_raises(name, refusal):
    for line, told in RAISES.items():
        errors = refusal(name, f"{HEAD}    {line}\n")
        assert told in errors
        assert "must return" in told or "(line 8)" in errors


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_raises(name, refusal):
    for text, told in FILES.items():
        errors = refusal(name, text)
        assert told in errors or "no get_runs" in errors
        assert told in errors or name in ("sweep", "compare")
        assert "has no" in errors or "(line 1)" in errors


@pytest.mark.parametrize("setting", ["pools.wrong", "group.part", "name.part"])
def test_a_setting_that_the_file_lacks_is_one_line(setting, tmp_path):
    """Also a part of a setting that is None, or a text."""
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    config.group = None\n    return config\n")
    given = ["main", f"--config={path}", f"--config.{setting}=held_out"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=given)
    with pytest.raises(
        ValueError, match=rf"^--config\.{setting} is no setting of the config; did you "
    ):
        command_line.parse(given, values, required=("config",))


@pytest.mark.parametrize("name", ["sweep", "compare"])
@pytest.mark.parametrize(
    "runs", ["None", "3", "[]", "[1]", "['a', 'a']", "['../a']", "['']", "1 / 0", "['a,b', 'a-b']"]
)
def test_runs_that_are_no_names(name, runs, refusal):
    refusal(name, HEAD.replace('["a", "b"]', runs) + "    return config\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_settings_are_checked_before_anything_runs(name, tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        f"{HEAD}    with config.ignore_type(): config.rounds = 1e12\n    return config\n"
    )
    assert COMMANDS[name]([f"--config={path}", f"--workdir={tmp_path / 'runs'}"]) == 2
    assert (
        "rounds must be an integer of at least 1, got 1000000000000.0." in capsys.readouterr().err
    )


@pytest.mark.parametrize("given", ["0", "-1", "1000000000", str(10**30)])
def test_runs_at_once_have_bounds(given, tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    return config\n")
    arguments = [f"--config={path}", f"--workdir={tmp_path / 'runs'}", f"--at-once={given}"]
    assert sweep.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: --at-once must be at ")


@pytest.mark.parametrize("flag", ["processes", "trials", "seed"])
def test_the_tuners_numbers_have_bounds(flag, tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    return config\n")
    given = ["tune", f"--config={path}", "--study=s", "--storage=none.db", f"--{flag}={10**30}"]
    assert tune.main(given) == 2
    assert capsys.readouterr().err.startswith(f"error: --{flag} must be at most ")


def test_only_a_setting_is_called_one_that_the_config_lacks(capsys):
    for looked_up, message in (
        (ConfigDict(), "error: the config lacks 'nothing'"),
        ({}, "error: KeyError: 'nothing'"),
    ):
        try:
            looked_up["nothing"]
        except KeyError as error:
            command_line.refuse(error)
        assert capsys.readouterr().err.splitlines() == [message]
