r"""Tunes the float hyper-parameters of an experiment.

    fedcodist tune digits_codist:merged_codistillation --study digits_merged --storage runs/tuning.db \
        --trials 32 --config.rounds=40

A trial's value is the accuracy after the last round, averaged over models and seeds. It is measured on
held-out clients, or on held-out examples of the clients (`data.partition.validation`), never on test
data. `fedcodist.tuning.search_space` explains what is searched. The same command continues a study that
was stopped. On a CPU there is one worker per core; each compiles once for all of its trials. On an
accelerator `--at_once 16 --processes 1` trains as many trials in one program; none of them is pruned.

`--output FILE` writes the complete study as JSON, and `--summary` writes its present state at any time:

    fedcodist tune --summary --study digits_merged --storage runs/tuning.db

`python -m fedcodist.tuning.tune --config FILE` is the same.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from fedcodist.config import command_line
from fedcodist.core import child_processes
from fedcodist.core.checks import LARGEST_INTEGER, check_integer
from fedcodist.core.extras import check_installed
from fedcodist.run import launch
from fedcodist.tuning import search_space, workers

# `fedcodist.tuning.study` is imported late, since Optuna may be missing.


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    values = _flags(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{values.get_help()}")
        return 0
    try:
        command_line.parse(arguments, values, required=("study", "storage"))
        _check(values)
        if values.summary:
            return _summarise(values)
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    if launch.is_child():
        return workers.work(values)
    processes = values.processes or launch.default_processes()
    program = [sys.executable, "-m", "fedcodist.tuning.tune", *arguments[1:]]
    status = child_processes.until_interrupted(
        lambda: workers.supervise(program, processes),
        "interrupted: the same command goes on with the study.",
    )
    return status or _conclude(values)


def _flags(arguments: list[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "The experiment's config file.", flag_values=values, sys_argv=arguments
    )
    for name, default, text in (
        ("study", None, "Name of the study; the same one continues it."),
        ("storage", None, "SQLite file of studies; made where it does not exist."),
        ("output", None, "JSON file for the study's summary."),
    ):
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, default, text in (
        ("trials", 32, "Finished and pruned trials that the study is to have in all."),
        ("processes", None, "Workers on this machine; chosen by the machine where not given."),
        (
            "at_once",
            1,
            "Trials that a worker trains in one program; more than one is never pruned.",
        ),
        ("seed", 0, "Of the tuner's draws; the experiment's is --config.seed."),
    ):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    flags.DEFINE_enum(
        "pruner", "median", ("median", "hyperband", "none"), "Stops bad trials.", flag_values=values
    )
    flags.DEFINE_bool("summary", False, "Only write the study's summary.", flag_values=values)
    return values


def _check(values: flags.FlagValues) -> None:
    if values.config is None and not values.summary:
        raise ValueError("--config must be given.")
    check_installed("tuning", "optuna", "tune")
    if importlib.util.find_spec("fcntl") is None:
        raise ImportError("tuning needs the file locks of Unix.")
    if values.processes is not None:
        launch.check_processes("--processes", values.processes)
    for name, low in (("trials", 1), ("at_once", 1), ("seed", 0)):
        if values[name].value is not None:
            check_integer(f"--{name}", values[name].value, low, LARGEST_INTEGER)
    for name in ("storage", "output"):
        path = values[name].value
        if path is not None and Path(path).is_dir():
            raise ValueError(f"--{name} must be a file, {path!r} is a folder.")
    if "://" in values.storage:
        raise ValueError(f"--storage must be the path of an SQLite file, got {values.storage!r}.")


def _summarise(values: flags.FlagValues) -> int:
    from fedcodist.tuning import study as studies

    try:
        summary = studies.summary(studies.load_study(Path(values.storage), values.study))
        _write(values.output, summary)
    except (ValueError, *studies.ERRORS) as error:
        return command_line.refuse(error)
    return 0


def _write(output: str | None, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")
    print(f"wrote {output}")


def _conclude(values: flags.FlagValues) -> int:
    """Prints the study's best trial as settings of `fedcodist run`."""
    from fedcodist.tuning import study as studies

    try:
        study = studies.load_study(Path(values.storage), values.study)
        best = studies.best_trial(study)
        if values.output:
            _write(values.output, studies.summary(study))
    except (ValueError, *studies.ERRORS) as error:
        return command_line.refuse(error)
    if best is None:
        print("no trial finished: all were pruned.")
        return 0
    space = search_space.search_space(values.config)
    print(f"best trial: {best.number}, held-out accuracy {best.value:.4f}, by")
    print("    " + " \\\n    ".join(search_space.overrides(space, best.params)), flush=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv)
    sys.exit(status)
