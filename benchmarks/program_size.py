"""The size of each workload's round in HLO instructions, by which the time of compilation grows.

    python benchmarks/program_size.py [--workload cnn_small ...]

Instructions are counted before XLA simplifies them, so nothing has to compile; the program is that of
one processor. A computation that is called several times is counted as often, since XLA copies it to
each call. Counts are written to results/benchmarks/; a workload's line there replaces its old one.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import live_line
import ours
import records
import side_by_side

KIND = RECORD = "program_size"
# A computation that an instruction calls, or several in braces.
CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|[\w.-]+)"
)


def main() -> int:
    """Counts one workload after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in side_by_side.ROUNDS if name not in side_by_side.HTFL]
    parser.add_argument("--workload", nargs="+", choices=sorted(side_by_side.ROUNDS), default=usual)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    for workload in arguments.workload:
        job = side_by_side.make_job(workload, turns=1)
        with live_line.showing(f"{workload}: lowering"):
            inputs = ours.read_inputs(job.inputs, workload)
            count = instructions(ours.prepare(inputs, job.rounds).lowered())
        print(f"{workload:<20}{count:10,}", flush=True)
        write(workload, count, arguments.results)
    return 0


def instructions(lowered) -> int:
    """HLO instructions of a lowered program (`jax.stages.Lowered`), with what they call."""
    return expanded_instructions(lowered.as_text(dialect="hlo"))


def expanded_instructions(text: str) -> int:
    """Counts the instructions of a module in HLO's text; those of a computation at every call of it."""
    computations, entry, name = {}, "", ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").split()[0]
            computations[name] = []
            entry = name if line.startswith("ENTRY ") else entry
        elif " = " in line and line.startswith(" "):
            computations[name].append(line)

    @functools.cache
    def count(computation: str) -> int:
        called = [
            each
            for line in computations[computation]
            for group in CALLED.findall(line)
            for each in re.findall(r"[\w.-]+", group)
        ]
        return len(computations[computation]) + sum(map(count, called))

    return count(entry)


def write(workload: str, count: int, results: Path) -> Path:
    """Writes a workload's count, and the newest ones of the others, with date and commit."""
    record = records.common(RECORD, KIND)
    old = [
        line
        for other in records.newest(results)
        if other["kind"] == KIND and other["device"] == record["device"]
        for line in other["counted"]
        if line["workload"] != workload
    ]
    new = {"workload": workload, "instructions": count}
    new |= {"date": record["date"], "commit": record["commit"]}
    return records.write(record | {"counted": [*old, new]}, results)


def as_listed(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines in the order of `side_by_side`'s workloads."""
    return sorted(lines, key=lambda line: list(side_by_side.ROUNDS).index(line["workload"]))


if __name__ == "__main__":
    sys.exit(main())
