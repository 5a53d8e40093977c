r"""Runs some or all runs of a config file, one after another or several at once.

    fedcodist sweep experiments/configs/cifar100_table1.py --only "merged*,4700,*" \
        --workdir runs/cifar100_table1 --config.seeds=3

A config file that describes several runs has `get_runs()`, which lists the arguments of its
`get_config`. Each run has a folder in the work folder. The same command continues what was stopped.
`python -m fedcodist.commands.sweep --config FILE` is the same.
"""

import argparse
import fnmatch
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.config.config_file import config_of, load_config_of_runs, run_folder_name, runs_of
from fedcodist.config.references import is_reference
from fedcodist.core import child_processes
from fedcodist.core.checks import check_integer
from fedcodist.run import launch
from fedcodist.run.metrics_text import final_text

OPTIONS = ("--workdir", "--only", "--at-once", "--list")
_COMMAND = (sys.executable, "-m", "fedcodist.commands.run")
_OF_ABSL = ("--config", "--flagfile", "--undefok")
_MOST_AT_ONCE = 1024
_MANIFEST = "manifest.json"  # of a prepared folder
_MARK = "sweep.json"  # in the folder of a run that is finished
_SECONDS_BETWEEN_LOOKS = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or the status of the last run that failed."""
    parser = command_line.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="config file with get_runs()")
    parser.add_argument("--workdir", type=Path, help="folder of the run folders; not for --list")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="runs to do, with * and ?; repeatable"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs at a time, each on its share of the cores"
    )
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    settings, others = parser.parse_known_args(arguments)
    try:
        module = load_config_of_runs(settings.config)
        if settings.workdir is None and not settings.list:
            parser.error("the following arguments are required: --workdir")
        runs = _chosen(runs_of(module, settings.config), settings.only)
        check_integer("--at-once", settings.at_once, low=1, high=_MOST_AT_ONCE)
        check_options(others, OPTIONS)
        configs = {}
        for run in runs:
            config_of(module, f"{settings.config}:{run}", run)
            configs[run] = _with_settings(settings.config, run, others).to_json_best_effort()
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    if settings.list:
        print("\n".join(runs))
        return 0
    try:
        return child_processes.until_interrupted(
            lambda: _run_all(configs, settings, others),
            "interrupted: the same command goes on where it stopped.",
        )
    except OSError as error:  # of a log, or of the mark of a finished run
        return command_line.refuse(
            OSError(f"cannot write {error.filename or settings.workdir}: {error.strerror}.")
        )


def chosen_runs(config: str, patterns: Sequence[str] | None) -> list[str]:
    """The runs of a config file that match the patterns. Raises one of PARSE_ERRORS for a mistake."""
    return _chosen(runs_of(load_config_of_runs(config), config), patterns)


def check_options(others: Sequence[str], options: Sequence[str]) -> None:
    """Raises ValueError for an option of neither `options` nor `fedcodist run`, which runs would refuse.

    Settings, --config.name=value, are not checked here.
    """
    from fedcodist.commands import run as command  # defines the flags of `fedcodist run`

    of_run = [f"--{flag.name}" for flag in flags.FLAGS.get_flags_for_module(command.__name__)]
    known = [*options, *_OF_ABSL, *of_run]
    for argument in others:
        option = re.match(r"--?([A-Za-z][\w-]*)(=|$)", argument)
        if option is None or f"--{option[1]}" in known:
            continue
        if option[1] not in flags.FLAGS and option[1].removeprefix("no") not in flags.FLAGS:
            nearest = command_line.nearest_name(f"--{option[1]}", known)
            raise ValueError(f"--{option[1]} is no option; did you mean {nearest}?")


def _chosen(runs: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    for pattern in patterns or ():
        if not fnmatch.filter(runs, pattern):
            raise ValueError(f"--only {pattern!r} matches none of {list(runs)}.")
    return [r for r in runs if not patterns or any(fnmatch.fnmatchcase(r, p) for p in patterns)]


def _with_settings(path: str, run: str, others: Sequence[str]) -> ConfigDict:
    """The run's config with the settings of the command line.

    Raises one of PARSE_ERRORS for a setting that the run does not have, or a value of another type.
    Arguments that are not of the form --config.name=value are left to `fedcodist.commands.run`.
    """
    settings = [argument for argument in others if re.match(r"--config\.[^=]+=", argument)]
    arguments = ["fedcodist.commands.run", f"--config={path}:{run}", *settings]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        command_line.parse(arguments, values, required=("config",))
    except (ValueError, TypeError) as error:
        raise ValueError(f"run {run!r}: {error}") from None
    return values["config"].value


def _run_all(
    configs: Mapping[str, str], settings: argparse.Namespace, others: Sequence[str]
) -> int:
    """Runs the configs, several at once; returns 0 or the last status that is not 0."""
    places = range(min(settings.at_once, len(configs)))
    statuses: dict[str, int] = {}
    waiting, running = list(configs), dict[int, tuple[str, subprocess.Popen]]()
    try:
        while waiting or running:
            for place in places:
                if place in running and running[place][1].poll() is not None:
                    run, child = running.pop(place)
                    statuses[run] = _ended(run, child.returncode, configs[run], settings, others)
                while waiting and place not in running:
                    run = waiting.pop(0)
                    if _is_finished(run, configs[run], settings, others):
                        statuses[run] = 0
                    else:
                        running[place] = run, _start(run, settings, others, place, len(places))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        child_processes.stop([child for _, child in running.values()])
    failed = [run for run in configs if statuses[run]]
    if failed:
        print(f"error: {len(failed)} of {len(configs)} runs failed: {failed}", file=sys.stderr)
    return statuses[failed[-1]] if failed else 0


def _start(
    run: str, settings: argparse.Namespace, others: Sequence[str], place: int, places: int
) -> subprocess.Popen:
    workdir = settings.workdir / run_folder_name(run)
    program = [*_COMMAND, f"--config={settings.config}:{run}", f"--workdir={workdir}", *others]
    print(f"{run}: runs in {workdir}", flush=True)
    if settings.at_once == 1:
        return child_processes.start(program)
    log = settings.workdir / f"{run_folder_name(run)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if not any(other.lstrip("-").partition("=")[0] == "processes" for other in others):
        program.append("--processes=1")
    with open(log, "a", encoding="utf-8") as output:
        child = child_processes.start(program, stdout=output, stderr=subprocess.STDOUT)
    # The threads that the child starts later inherit this.
    launch.take_cores(place, places, child.pid)
    return child


def _ended(
    run: str, status: int, config: str, settings: argparse.Namespace, others: Sequence[str]
) -> int:
    """Prints how a run ended, and marks the folder of a finished run; returns the run's status."""
    print(f"{run}: {'finished' if status == 0 else f'failed with status {status}'}", flush=True)
    if status == 0:
        mark = settings.workdir / run_folder_name(run) / _MARK
        mark.write_text(json.dumps(_mark(config, others), indent=2) + "\n")
    return status


def _mark(config: str, others: Sequence[str]) -> dict[str, Any]:
    """The content of a finished run's mark: config, settings and checksums of prepared data."""
    settings = json.loads(config)
    data = {
        name: hashlib.sha256((Path(folder) / _MANIFEST).read_bytes()).hexdigest()
        for name, folder in settings.get("data", {}).items()
        if name.endswith("folder") and folder and (Path(folder) / _MANIFEST).is_file()
    }
    encoder = settings.get("data", {}).get("encoder")
    if isinstance(encoder, str) and Path(encoder).is_file():
        data["encoder"] = hashlib.sha256(Path(encoder).read_bytes()).hexdigest()
    return {"config": settings, "others": list(others), "data": data}


def _is_finished(
    run: str, config: str, settings: argparse.Namespace, others: Sequence[str]
) -> bool:
    """Whether the run ended with this config, and prints so. (A start refuses another config.)"""
    workdir = settings.workdir / run_folder_name(run)
    if _names_code(json.loads(config)):
        return False
    try:
        mark = json.loads((workdir / _MARK).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    is_finished = mark == _mark(config, others) and _has_ended(workdir, config)
    if is_finished:
        print("  ".join(filter(None, (f"{run}: finished already, in {workdir}", _final(workdir)))))
    return is_finished


def _names_code(settings: Any) -> bool:
    """Whether a config names modules of one's own; only the run itself sees that they were edited."""
    if isinstance(settings, dict):
        return bool(settings.get("methods")) or any(map(_names_code, settings.values()))
    return any(map(_names_code, settings)) if isinstance(settings, list) else is_reference(settings)


def _has_ended(workdir: Path, config: str) -> bool:
    """Whether the folder has a summary, and has not grown to other rounds since its mark."""
    try:
        its_config = json.loads((workdir / "config.json").read_text(encoding="utf-8-sig"))
        its_rounds = its_config["rounds"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    has_summary = (workdir / "summary.json").exists()
    return has_summary and its_rounds == json.loads(config).get("rounds")


def _final(workdir: Path) -> str:
    """A finished run's final metrics as text; empty where they cannot be read."""
    try:
        config, summary = (
            json.loads((workdir / name).read_text(encoding="utf-8-sig"))
            for name in ("config.json", "summary.json")
        )
        evaluation = config["evaluation"]
        return final_text(summary["final"], evaluation["final_splits"] or evaluation["splits"][:1])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
