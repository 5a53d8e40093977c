"""The command `fedcodist`: experiments, comparisons, reports and data.

    fedcodist demo
    fedcodist list
    fedcodist run digits_codist:fed_avg --config.rounds=40
    fedcodist compare digits_methods --only "fed_*" --workdir runs/methods
    fedcodist compare runs/methods runs/other_methods

A config is a Python file or, without a path, the name of one that comes with the package. Where no
--workdir is given, `run`, `sweep` and `compare` write into a folder of the config's name in runs/.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcodist.config.command_line import PARSE_ERRORS, Parser
from fedcodist.config.config_file import (
    ConfigFileError,
    config_of,
    config_path,
    load_config_file,
    load_config_of_runs,
    run_folder_name,
    shipped_configs,
)

# name -> its module, which `python -m` runs as well, and what it does
COMMANDS = {
    "run": ("fedcodist.commands.run", "runs one experiment of a config"),
    "sweep": ("fedcodist.commands.sweep", "runs some or all experiments of a config"),
    "compare": ("fedcodist.commands.compare", "runs methods on the same clients and ranks them"),
    "report": ("fedcodist.report", "makes a table, plots and a page of run folders"),
    "tune": ("fedcodist.tuning.tune", "searches an experiment's hyper-parameters"),
    "prepare": (
        "fedcodist.commands.prepare",
        "makes a folder that configs read of a data set's files",
    ),
    "partition": ("fedcodist.commands.partition", "shows which client has which examples"),
    "demo": ("fedcodist.commands.demo", "compares three methods on handwritten digits in minutes"),
    "list": ("fedcodist.commands.list", "names configs, methods, networks and data sets"),
}
_OF_A_CONFIG = ("run", "sweep", "compare", "tune", "partition")
_IN_A_WORKDIR = ("run", "sweep", "compare")
_READ_BY_ABSL = ("run", "tune")  # whose arguments begin with the program's name


def program() -> int:
    """What is installed as `fedcodist`; as `python -m`, it finds modules of the present folder."""
    sys.path.append(os.getcwd())
    try:
        return main()
    except BrokenPipeError:  # as of `fedcodist list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, 2 for a mistake of the user's."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        lines = (f"    {name:10}{what}" for name, (_, what) in COMMANDS.items())
        print(f"{__doc__}\n" + "\n".join(lines) + "\n\n`fedcodist COMMAND --help` tells more.")
        return 0
    name, *rest = given
    if name not in COMMANDS:
        Parser(add_help=False).error(f"a command is one of {', '.join(COMMANDS)}, got {name!r}")
    if name in _OF_A_CONFIG and not {"-h", "--help"} & set(rest):
        rest = _with_config(name, rest)
    # What argparse and absl call the program, and where settings of a config are looked for.
    sys.argv = [f"fedcodist {name}", *rest]
    run = importlib.import_module(COMMANDS[name][0]).main
    return run(sys.argv if name in _READ_BY_ABSL else rest)


def _with_config(name: str, arguments: list[str]) -> list[str]:
    """The arguments with `--config=` before a config's name, and with a work folder, which is shown."""
    if arguments and not arguments[0].startswith("-") and not _are_folders(name, arguments):
        arguments = [f"--config={arguments[0]}", *arguments[1:]]
    parser = Parser(add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    parser.add_argument("--list", action="store_true")
    settings = parser.parse_known_args(arguments)[0]
    if arguments and arguments[0].startswith("-") and _lacks_config(name, arguments):
        parser.error(f"give the config first: fedcodist {name} CONFIG [options]")
    if name not in _IN_A_WORKDIR or settings.workdir is not None or not settings.config:
        return arguments
    try:
        workdir = _workdir(name, settings.config)
    except PARSE_ERRORS:
        return arguments  # the command says what is wrong with the config
    if not settings.list:
        print(f"workdir: {workdir}", flush=True)
    return [*arguments, f"--workdir={workdir}"]


def _lacks_config(name: str, arguments: list[str]) -> bool:
    """Whether arguments that begin with an option have no --config, which the command needs."""
    options = {each.split("=")[0].lstrip("-") for each in arguments if each.startswith("-")}
    if options & {"config", "flagfile"}:
        return False
    if name == "compare":  # folders of runs may stand behind an option
        return any(map(_is_config, arguments))
    return name != "tune" or "summary" not in options  # a summary is of a study


def _is_config(argument: str) -> bool:
    try:
        config_path(argument.partition(":")[0])
    except ConfigFileError:
        return False
    return not Path(argument).is_dir()


def _are_folders(name: str, arguments: list[str]) -> bool:
    """Whether the arguments are folders of runs, which `compare` takes too, and no config.

    A folder may have the name of a config that comes with the package.
    """
    if name != "compare" or not Path(arguments[0]).is_dir():
        return False
    if arguments[0] not in shipped_configs():
        return True
    from fedcodist.report.runs import find_run_folders

    has_workdir = any(argument.split("=")[0] == "--workdir" for argument in arguments)
    return not has_workdir and bool(find_run_folders([Path(arguments[0])], []))


def _workdir(name: str, config: str) -> Path:
    """The config's folder, and for one run the folder in it where `compare` looks for that run.

    Raises one of PARSE_ERRORS for a config that the command will refuse.
    """
    path, _, run = config.partition(":")
    folder = Path("runs") / Path(path).stem
    if name != "run":
        load_config_of_runs(config)
        return folder
    settings = config_of(load_config_file(path), config, *([run] if run else []))
    run = run or settings.get("run")
    return folder / run_folder_name(run) if run else folder
