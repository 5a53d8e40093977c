"""The time to a result: from the start of a program to the end of 20 rounds, for ours and the peers.

    python benchmarks/time_to_result.py [--workload digits fed_kd ...] [--turns 3]

In each turn every program starts in new processes, imports its modules, reads the data, compiles if it
has to, and trains a workload of side_by_side.py for 20 rounds. There are no compiled programs from
before. Ours then starts a second time, with the programs that it stored on disk; the peers store none.
Nothing is evaluated. In every turn all programs run with each of the settings that side_by_side.py
tries: every division of all cores into processes and threads, and one core. The setting with the lowest
median is used.

A record for each workload is written to results/benchmarks/ as soon as it is measured. Workloads htfl_*
are left out unless they are named or HTFLLIB is set: peers/htfllib/program.py says how to get HtFLlib.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import live_line
import machine
import records
import side_by_side
from side_by_side import HTFL, OURS, PROGRAMS, Job, Program, ProgramFailed, Setting

from fedcodist.core import child_processes

KIND = "time_to_result"
ROUNDS = 20


class Start(NamedTuple):
    """A program from its start to its end.

    Attributes:
      seconds: with imports, data and compilation.
      peak_mb: resident memory of all its processes.
    """

    seconds: float
    peak_mb: float


def main() -> int:
    """Measures one workload after another; returns 1 if ours fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(side_by_side.ROUNDS)
    usual = [name for name in known if name not in HTFL or os.environ.get("HTFLLIB")]
    parser.add_argument("--workload", nargs="+", choices=known, default=usual)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    for name in ("turns", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    for workload in arguments.workload:
        job = side_by_side.make_job(workload, arguments.turns)._replace(rounds=arguments.rounds)
        try:
            measured = measure(PROGRAMS, job)
        except ProgramFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        record = {
            # side_by_side.py's records have the workload's own name.
            **records.common(f"{KIND}_{workload}", KIND),
            "measured": workload,
            "rounds": arguments.rounds,
            "programs": measured,
        }
        print(table(record), flush=True)
        records.write(record, arguments.results)
    return 0


def measure(programs: Mapping[str, Program], job: Job) -> dict[str, dict[str, Any]]:
    """Starts all programs in turn with each of their settings; a setting that fails is left out.

    Returns:
      By program its best `setting`, `cold` seconds of every turn and `peak_mb`, and of ours `warm`
      seconds; or the `error` of a program that did not run.

    Raises:
      ProgramFailed: ours does not end well.
    """
    measured: dict[str, dict[str, Any]] = {}
    starts: dict[str, dict[Setting, list[list[Start]]]] = {}
    for name, program in programs.items():
        if hindrance := program.hindrance(job.workload):
            measured[name] = {"error": hindrance}
        else:
            possible = side_by_side.settings(machine.cores(), program.several)
            starts[name] = {setting: [] for setting in possible}
    for turn in range(job.turns):
        for name, by_setting in starts.items():
            for setting, own in list(by_setting.items()):
                what = f"{job.workload}: turn {turn + 1} of {job.turns}, {name}"
                try:
                    with live_line.showing(what):
                        own.append(start(programs[name], job, setting, twice=name == OURS))
                except ProgramFailed as error:
                    if name == OURS:
                        raise ProgramFailed(f"{name}: {error}") from error
                    where = f"turn {turn + 1} with {setting.processes} x {setting.threads}"
                    print(f"{name} failed in {where}: {error}", file=sys.stderr)
                    del by_setting[setting]
                    if not by_setting:
                        measured[name] = {"error": str(error)}
        starts = {name: own for name, own in starts.items() if name not in measured}
    return {name: measured.get(name) or best(starts[name]) for name in programs}


def start(program: Program, job: Job, setting: Setting, twice: bool) -> list[Start]:
    """Starts a program without compiled programs and, with `twice`, again with those that it stored."""
    with tempfile.TemporaryDirectory() as folder:
        return [start_once(program, job, setting, folder) for _ in range(1 + twice)]


def start_once(program: Program, job: Job, setting: Setting, cache: str) -> Start:
    """From a program's start to its end; compiled programs are kept in `cache`."""
    started = time.perf_counter()
    line = side_by_side.run(
        program, job, setting, repetitions=0, first_rounds=job.rounds, cache=cache
    )
    return Start(time.perf_counter() - started, line["peak_rss_mb"])


def best(starts: Mapping[Setting, Sequence[Sequence[Start]]]) -> dict[str, Any]:
    """The figures of the setting whose cold starts have the lowest median."""
    setting, own = min(
        starts.items(), key=lambda item: statistics.median(turn[0].seconds for turn in item[1])
    )
    found = {
        "setting": setting._asdict(),
        "cold": [turn[0].seconds for turn in own],
        "peak_mb": max(turn[0].peak_mb for turn in own),
    }
    if len(own[0]) > 1:
        found["warm"] = [turn[1].seconds for turn in own]
    return found


def ratios(record: Mapping[str, Any], name: str) -> list[float]:
    """The time of a program's cold start divided by ours, for every turn."""
    programs = record["programs"]
    pairs = zip(programs[name]["cold"], programs[OURS]["cold"], strict=True)
    return [theirs / ours for theirs, ours in pairs]


def plot(measured: Sequence[Mapping[str, Any]]):
    """Each peer's cold start divided by ours, a line for each workload of the records."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    from fedcodist.report.styles import COLOURS, MARKERS

    figure = Figure(figsize=(6.4, 1.4 + 0.28 * len(measured)), layout="constrained")
    axis = figure.subplots()
    peers = [name for name in PROGRAMS if name != OURS]
    for number, peer in enumerate(peers):
        points = [
            (statistics.median(ratios(record, peer)), line)
            for line, record in enumerate(measured)
            if "cold" in record["programs"].get(peer, {})
        ]
        if points:
            style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 6}
            axis.plot(*zip(*points, strict=True), linestyle="none", label=peer, **style)
    axis.axvline(1, color="0.3", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlim(left=min(0.5, axis.get_xlim()[0]))  # a labelled tick on both sides of 1
    as_written = FuncFormatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_major_formatter(as_written)
    axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # labels of all would touch one another
    axis.xaxis.set_minor_formatter(as_written)
    axis.set_xlabel("Time to the result divided by that of fedcodist (above 1: slower)")
    axis.set_yticks(range(len(measured)), [record["measured"] for record in measured])
    axis.set_ylim(len(measured) - 0.5, -0.5)
    axis.grid(axis="y", color="0.9", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=5)
    return figure


def table(record: Mapping[str, Any]) -> str:
    """A workload's medians, and the peers' ratios to ours, as text."""
    lines = [
        f"\n{record['measured']}: {record['device']}, {record['rounds']} rounds from a cold start",
        f"{'':<14}{'cold, s':>10}{'warm, s':>10}{'ratio':>8}{'min':>8}{'max':>8}{'peak, MB':>10}",
    ]
    for name, own in record["programs"].items():
        if "error" in own:
            lines.append(f"{name:<14}  {own['error']}")
            continue
        warm = f"{statistics.median(own['warm']):10.1f}" if "warm" in own else f"{'':10}"
        found = ratios(record, name)
        spread = (statistics.median(found), min(found), max(found))
        lines.append(
            f"{name:<14}{statistics.median(own['cold']):10.1f}{warm}"
            f"{''.join(f'{ratio:8.2f}' for ratio in spread)}{own['peak_mb']:10.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
