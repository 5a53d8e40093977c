r"""Runs some or all runs of a config file, one after another or several at once.

    python -m experiments.sweep --config experiments/configs/cifar100_table1.py \
        --only "merged*,4700,*" --workdir runs/cifar100_table1 --config.seeds=3

A config file that describes several runs has `get_runs()`, the arguments of its `get_config`. Each
run has a folder of its own in the work folder. The same command continues where it was stopped.
"""

import argparse
import concurrent.futures
import fnmatch
import importlib.util
import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcodist.launch import USER_ERROR

_COMMAND = (sys.executable, "-m", "experiments.main")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or the status of the last run that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="config file with get_runs()")
    parser.add_argument("--workdir", required=True, type=Path, help="folder of the run folders")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="runs to do, with * and ?; repeatable"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs at a time, each on its share of the cores"
    )
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    settings, others = parser.parse_known_args(arguments)
    try:
        runs = _chosen(_runs(settings.config), settings.only)
        if settings.at_once < 1:
            raise ValueError(f"--at-once must be at least 1, got {settings.at_once}.")
    except (OSError, ValueError, SyntaxError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    if settings.list:
        print("\n".join(runs))
        return 0
    return _run_all(runs, settings, others)


def run_folder_name(run: str) -> str:
    """The run's name as a folder: 'merged,4700' becomes 'merged-4700'."""
    return run.replace(",", "-")


def _runs(path: str) -> list[str]:
    if not Path(path).is_file():
        raise ValueError(f"--config must be an existing file, got {path!r}.")
    spec = importlib.util.spec_from_file_location("config", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_runs"):
        raise ValueError(f"--config {path} has no get_runs(); run it with experiments.main.")
    return module.get_runs()


def _chosen(runs: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    for pattern in patterns or ():
        if not fnmatch.filter(runs, pattern):
            raise ValueError(f"--only {pattern!r} matches none of {list(runs)}.")
    return [r for r in runs if not patterns or any(fnmatch.fnmatchcase(r, p) for p in patterns)]


def _run_all(runs: Sequence[str], settings: argparse.Namespace, others: Sequence[str]) -> int:
    free: queue.Queue[int] = queue.Queue()
    for place in range(settings.at_once):
        free.put(place)

    def one(run: str) -> int:
        place = free.get()
        try:
            return _run(run, settings, others, place)
        finally:
            free.put(place)

    with concurrent.futures.ThreadPoolExecutor(settings.at_once) as executor:
        statuses = list(executor.map(one, runs))
    failed = [run for run, status in zip(runs, statuses, strict=True) if status]
    if failed:
        print(f"error: {len(failed)} of {len(runs)} runs failed: {failed}", file=sys.stderr)
    return next((status for status in reversed(statuses) if status), 0)


def _run(run: str, settings: argparse.Namespace, others: Sequence[str], place: int) -> int:
    workdir = settings.workdir / run_folder_name(run)
    arguments = [f"--config={settings.config}:{run}", f"--workdir={workdir}", *others]
    if _is_finished(workdir, others):
        print(f"{run}: finished already, in {workdir}", flush=True)
        return 0
    command = [*_COMMAND, *arguments]
    print(f"{run}: runs in {workdir}", flush=True)
    if settings.at_once == 1:
        status = subprocess.call(command)
    else:
        log = settings.workdir / f"{run_folder_name(run)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as output:
            child = subprocess.Popen(
                [*command, "--processes=1"], stdout=output, stderr=subprocess.STDOUT
            )
            if sys.platform == "linux":
                # Long before the child starts its threads, which inherit this.
                os.sched_setaffinity(child.pid, _share(place, settings.at_once))
            status = child.wait()
    print(f"{run}: {'finished' if status == 0 else f'failed with status {status}'}", flush=True)
    if status == 0:
        _mark(workdir, others)
    return status


def _share(place: int, places: int) -> set[int]:
    """The cores of one of several runs at once; shared where there are fewer cores than runs."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[place % len(cores) :: places]) or set(cores)


def _is_finished(workdir: Path, others: Sequence[str]) -> bool:
    """Whether the run ended with these settings; other settings are main's to refuse."""
    try:
        return json.loads((workdir / "sweep.json").read_text()) == list(others)
    except (OSError, ValueError):
        return False


def _mark(workdir: Path, others: Sequence[str]) -> None:
    (workdir / "sweep.json").write_text(json.dumps(list(others)) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
