"""How long one waits for a result: from a cold start to the end of 20 rounds, ours and HtFLlib.

    HTFLLIB=... python benchmarks/time_to_result.py [--workload htfl_fd ...] [--turns 3]

Each program starts in new processes, in turn, imports what it needs, reads the data, compiles where it
does, and trains the workloads htfl_* for 20 rounds. No program finds anything compiled. Evaluation is
left out of all. Written to results/benchmarks/; peers/htfllib/program.py says how HtFLlib is fetched.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import records
import side_by_side
from side_by_side import HTFL, HTFLLIB, OURS, PROGRAMS, Job, Program, ProgramFailed, Setting

from fedcodist.core import child_processes

KIND = RECORD = "time_to_result"
ROUNDS = 20


def main() -> int:
    """Measures one workload after another; returns 2 where HtFLlib is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=HTFL, default=list(HTFL))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    for name in ("turns", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    programs = {name: PROGRAMS[name] for name in (OURS, HTFLLIB)}
    for name, program in programs.items():
        if hindrance := program.hindrance(arguments.workload[0]):
            print(f"error: {name}: {hindrance}", file=sys.stderr)
            return 2
    try:
        seconds = {
            workload: measure(programs, workload, arguments.turns, arguments.rounds)
            for workload in arguments.workload
        }
    except ProgramFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = {
        **records.common(RECORD, KIND),
        "cores": machine.cores(),
        "rounds": arguments.rounds,
        "seconds": seconds,
    }
    print(table(record))
    records.write(record, arguments.results)
    return 0


def measure(
    programs: Mapping[str, Program], workload: str, turns: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of every turn, by program. Raises ProgramFailed where one does not end well."""
    job, setting = side_by_side.make_job(workload, turns), Setting(1, machine.cores())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(turns):
        for name, program in programs.items():
            try:
                seconds[name].append(seconds_of(program, job, setting, rounds))
            except ProgramFailed as error:
                raise ProgramFailed(f"{name}: {error}") from error
    return seconds


def seconds_of(program: Program, job: Job, setting: Setting, rounds: int) -> float:
    """From a program's start to its end, with nothing compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        cache = {"XDG_CACHE_HOME": folder, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        started = time.perf_counter()
        side_by_side.run(
            program,
            job._replace(rounds=rounds),
            setting,
            repetitions=0,
            first_rounds=rounds,
            environment=cache,
        )
        return time.perf_counter() - started


def table(record: Mapping[str, Any]) -> str:
    """Medians, and how often HtFLlib's is ours, for people."""
    lines = [f"{record['device']}, {record['rounds']} rounds from a cold start, seconds"]
    lines.append(f"{'':<18}{OURS:>12}{HTFLLIB:>12}{'ratio':>8}{'min':>8}{'max':>8}")
    for workload, own in record["seconds"].items():
        ratios = [theirs / ours for ours, theirs in zip(own[OURS], own[HTFLLIB], strict=True)]
        medians = "".join(f"{statistics.median(own[name]):12.1f}" for name in (OURS, HTFLLIB))
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        lines.append(f"{workload:<18}{medians}{''.join(f'{ratio:8.2f}' for ratio in spread)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
