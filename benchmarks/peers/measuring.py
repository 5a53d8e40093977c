"""Shared code of the compared programs: arguments, the order of rounds, the report.

A program runs its first round, or several, saves the weights, warms up with one repetition and is then
timed. Every repetition trains on the same cohorts, so all repetitions do the same work.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from peers import workload as work


def parse_arguments(
    description: str, most_processes: int | None = None, accelerated: bool = False
) -> argparse.Namespace:
    """The arguments that every program takes.

    Args:
      description: the program's docstring.
      most_processes: the largest number of processes that the program can use.
      accelerated: whether it can use an accelerator; it then takes --accelerator.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(work.WORKLOADS), required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="file of make_inputs.py")
    parser.add_argument("--repetitions", type=int, default=7, help="0 runs the first rounds alone")
    parser.add_argument("--first-rounds", type=int, default=1, help="before weights are saved")
    parser.add_argument("--rounds-per-repetition", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save-weights", type=Path, help="writes the weights after one round")
    parser.add_argument("--double", action="store_true", help="to compare: in float64, no noise")
    if accelerated:
        parser.add_argument("--accelerator", action="store_true", help="instead of the processor")
    arguments = parser.parse_args()
    if accelerated and arguments.accelerator:
        most_processes = 1
    for name, least in (
        ("repetitions", 0),
        ("first_rounds", 1),
        ("rounds_per_repetition", 1),
        ("threads", 1),
        ("processes", 1),
    ):
        value = getattr(arguments, name)
        if value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if most_processes is not None and arguments.processes > most_processes:
        parser.error(f"--processes must be at most {most_processes}, got {arguments.processes}")
    return arguments


def limit_cores(count: int) -> None:
    """Keeps this process and its children on `count` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def total_rounds(arguments: argparse.Namespace) -> int:
    """Rounds of a whole run: the first ones, the warm-up repetition and the timed ones."""
    if arguments.repetitions == 0:
        return arguments.first_rounds
    repetitions = (1 + arguments.repetitions) * arguments.rounds_per_repetition
    return arguments.first_rounds + repetitions


def rounds(arguments: argparse.Namespace) -> Iterator[int]:
    """The file's round for each round of a run, endless: the first ones, then each repetition's."""
    repetition = range(arguments.rounds_per_repetition)
    return itertools.chain(range(arguments.first_rounds), itertools.cycle(repetition))


def cohorts(inputs: work.Inputs, arguments: argparse.Namespace) -> Iterator[np.ndarray]:
    """The cohorts of a run's rounds, endless, for workloads with one pool."""
    drawn = inputs.pool.cohorts
    return (drawn[round % len(drawn)] for round in rounds(arguments))


def run(
    train: Callable[[int], None], save: Callable[[], None], arguments: argparse.Namespace, clock
) -> list[float]:
    """Trains a whole run; returns the times at which it started and each part of it ended.

    Args:
      train: trains a number of further rounds, and returns when their result is there.
      save: saves the weights.
      arguments: of the program.
      clock: returns seconds.
    """
    times = [clock()]
    train(arguments.first_rounds)
    times.append(clock())
    save()
    if arguments.repetitions > 0:
        for _ in range(1 + arguments.repetitions):
            train(arguments.rounds_per_repetition)
            times.append(clock())
    return times


def ends_of_parts(
    started: float, round_ends: Sequence[float], arguments: argparse.Namespace
) -> list[float]:
    """The result of `run` for a program that can only note the time at which each round ended."""
    ends = round_ends[arguments.first_rounds - 1 :]
    return [started, *ends[:: arguments.rounds_per_repetition]]


def save_weights(
    weights: Mapping[str, Mapping[str, np.ndarray]], arguments: argparse.Namespace
) -> None:
    """Writes weights in the common layout, pool by pool, if the arguments name a file for them."""
    if arguments.save_weights is not None:
        flat = {f"{pool}/{name}": own[name] for pool, own in weights.items() for name in own}
        with open(arguments.save_weights, "wb") as file:
            np.savez(file, **flat)


def report(
    peer: str,
    version: str,
    arguments: argparse.Namespace,
    times: Sequence[float],
    peak_rss_mb: float,
    **more: str | float | None,
) -> None:
    """Prints the line of JSON that side_by_side.py reads.

    Args:
      peer, version: the program that reports.
      arguments: of the program.
      times: see `run`.
      peak_rss_mb: of all processes.
      more: `device` and `peak_device_mb` of an accelerator, if they are known.
    """
    rounds = arguments.rounds_per_repetition
    seconds = [(end - begin) / rounds for begin, end in itertools.pairwise(times[2:])]
    first = times[1] - times[0]
    if seconds:
        # The additional time of the rounds before the timed ones.
        before = arguments.first_rounds + rounds
        first = max(0.0, times[2] - times[0] - before * statistics.median(seconds))
    weights = arguments.save_weights
    line = {
        "peer": peer,
        "version": version,
        "workload": arguments.workload,
        "seconds_per_round": seconds,
        "compile_or_warmup_seconds": first,
        "peak_rss_mb": peak_rss_mb,
        "processes": arguments.processes,
        "threads": arguments.threads,
        "weights_after_one_round": None if weights is None else str(weights),
        **{name: value for name, value in more.items() if value is not None},
    }
    print("\n" + json.dumps(line), flush=True)


def peak_memory_mb(root: int | None = None) -> float:
    """Peak resident memory of a process and all its living descendants, each at its own peak.

    Args:
      root: process id, by default this process.
    """
    if not sys.platform.startswith("linux"):
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    parents, peaks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines = (folder / "status").read_text().splitlines()
            except OSError:  # it has ended
                continue
            fields = dict(line.split(":", 1) for line in lines)
            parents[int(folder.name)] = int(fields["PPid"])
            peaks[int(folder.name)] = int(fields.get("VmHWM", "0 kB").split()[0])
    family = {root or os.getpid()}
    while True:
        found = {child for child, parent in parents.items() if parent in family} - family
        if not found:
            return sum(peaks[member] for member in family) / 1024
        family |= found


def anonymous_memory_mb() -> float | None:
    """Resident memory of this process without pages of files, which the system takes back when it needs
    them; None if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) / 1024 if "RssAnon" in fields else None
