"""Where the time of a round goes: the profiler's times of one core, by what they are for.

    python benchmarks/breakdown.py [--workload cnn_small cnn_large] [--rounds 5]

`jax.profiler` traces rounds on one core. Each instruction of the compiled program has the names of the
layers and scopes from which it was made; by these it is sorted. The rest of the traced time is dispatch:
the runtime between instructions. The record is written to results/benchmarks/.
"""

import argparse
import gzip
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import ours
import records
from peers import make_inputs
from peers import workload as work

KIND = RECORD = "breakdown"
INPUTS = records.ROOT / "build" / "benchmarks"
# The first pattern that is found in an instruction's path of scopes determines its purpose.
PRODUCT = r"(conv_general_dilated|dot_general)$"
PURPOSES = {
    "convolutions: gradient of images": rf"inputs_gradient/.*{PRODUCT}",
    "convolutions: gradient of kernels": rf"kernel_gradient/.*{PRODUCT}",
    "convolutions: outputs": rf"conv3x3/.*{PRODUCT}",
    "convolutions: layout and padding": r"conv3x3",
    "dense layers": r"/(dense\w*|Dense\w*|output)/",
    "examples: order, reading, normalising": r"/(input|order)/",
    "client's optimizer": r"/optimizer/",
    "bias, ReLU, max-pooling, loss": r"jvp\(",  # the compiler fuses them
}
OTHER, COPIES, DISPATCH = "server, aggregation, other", "copies", "dispatch"


def main() -> int:
    """Traces each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload", nargs="+", choices=sorted(work.WORKLOADS), default=["cnn_small", "cnn_large"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    options = parser.parse_args()
    device = machine.device()
    if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["JAX_PLATFORMS"] = "cpu"
    record = records.common(RECORD, KIND, device) | {
        "rounds": options.rounds,
        "workloads": {name: measure(name, options.rounds) for name in options.workload},
    }
    for name, own in record["workloads"].items():
        print(name, json.dumps(own))
    records.write(record, options.results)
    return 0


def measure(workload: str, rounds: int) -> dict[str, Any]:
    """Milliseconds per round: with and without the profiler, and by purpose."""
    import jax

    path = INPUTS / f"{workload}.npz"
    make_inputs.write(workload, path)
    train, _, lowered = ours.prepare(ours.read_inputs(path, workload), rounds)
    purposes = purposes_of(lowered().compile().as_text())
    train(rounds)
    start = time.perf_counter()
    train(rounds)
    plain = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            train(rounds)
            traced = time.perf_counter() - start
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    parts = sum_by_purpose(own_times(events), purposes)
    parts[DISPATCH] = traced - sum(parts.values())
    per_round = 1000 / rounds
    return {
        "milliseconds": plain * per_round,
        "traced_milliseconds": traced * per_round,
        "parts": {name: seconds * per_round for name, seconds in parts.items()},
    }


def purposes_of(program: str) -> dict[str, str]:
    """The purpose of each instruction of a compiled program's text, by its name."""
    purposes = {}
    for line in program.splitlines():
        if found := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line):
            scope = re.search(r'op_name="([^"]*)"', line)
            purposes[found[1]] = _purpose(scope[1]) if scope else COPIES
    return purposes


def _purpose(scope: str) -> str:
    return next((name for name, pattern in PURPOSES.items() if re.search(pattern, scope)), OTHER)


def own_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """(name, seconds) of every traced event, without the seconds of those inside it."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    times = []
    for own in threads.values():
        own.sort(key=lambda event: (event["ts"], -event["dur"]))
        seconds = [event["dur"] * 1e-6 for event in own]
        around: list[int] = []
        for index, event in enumerate(own):
            while around and event["ts"] >= own[around[-1]]["ts"] + own[around[-1]]["dur"]:
                around.pop()
            if around:
                seconds[around[-1]] -= event["dur"] * 1e-6
            around.append(index)
        times += [(event["name"], own) for event, own in zip(own, seconds, strict=True)]
    return times


def sum_by_purpose(
    times: Sequence[tuple[str, float]], purposes: Mapping[str, str]
) -> dict[str, float]:
    """Seconds of each purpose, the largest first; events that are not instructions are left out."""
    sums: dict[str, float] = {}
    for name, seconds in times:
        if name in purposes:
            sums[purposes[name]] = sums.get(purposes[name], 0) + seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
