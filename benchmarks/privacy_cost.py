"""The time that user-level differential privacy adds to a round of FedAvg on the small CNN.

    python benchmarks/privacy_cost.py [--turns 21]

A private round (`fc.private`) clips the update of each client and adds Gaussian noise to their sum. The
workloads cnn_small and private of peers/workload.py train the same clients on the same examples. They
take turns in the same processes, so a change of the machine's speed affects both, and each turn begins
with the one with which the previous turn ended. The record is written to results/benchmarks/.

The exit status is 1 if a private round takes more than 10 % longer than a plain one, in the median of
the turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import ours
import records
import side_by_side

from fedcodist.run import launch

KIND = RECORD = "privacy_cost"
PLAIN, PRIVATE = "plain", "private"
WORKLOADS = {PLAIN: "cnn_small", PRIVATE: "private"}
ROUNDS = 5  # of each kind in a turn
TARGET = 0.1  # of a plain round


def main() -> int:
    """Starts one process per core, or measures in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error(f"--turns must be at least 1, got {arguments.turns}")
    if not launch.is_child():
        for workload in WORKLOADS.values():
            side_by_side.make_job(
                workload, arguments.turns
            )  # writes the inputs, before all read them
        return launch.supervise([sys.executable, *sys.argv], launch.default_processes())
    device = machine.device()
    launch.join()
    seconds = measure(arguments.turns)
    if seconds is None:
        return 0
    record = {
        **records.common(RECORD, KIND, machine.accelerator() or device),
        "processes": launch.processes_here(),
        "rounds": ROUNDS,
        "target": TARGET,
        "seconds_per_round": seconds,
    }
    print(table(record))
    records.write(record, arguments.results)
    return int(beyond_target(record))


def measure(turns: int) -> dict[str, list[float]] | None:
    """Seconds per round of both kinds in each turn; the first process returns them."""
    import jax

    at_once = machine.accelerator() is not None  # as ours.py trains clients there
    train = {}
    for kind, workload in WORKLOADS.items():
        inputs = ours.read_inputs(side_by_side.INPUTS / f"{workload}.npz", workload)
        train[kind] = ours.prepare(inputs, ROUNDS, at_once).train
        train[kind](ROUNDS)  # compiles
    seconds: dict[str, list[float]] = {kind: [] for kind in train}
    for turn in range(turns):
        for kind in (PLAIN, PRIVATE) if turn % 2 == 0 else (PRIVATE, PLAIN):
            started = time.perf_counter()
            train[kind](ROUNDS)
            seconds[kind].append((time.perf_counter() - started) / ROUNDS)
    return seconds if jax.process_index() == 0 else None


def ratios(record: Mapping[str, Any]) -> list[float]:
    """A private round's seconds divided by a plain one's, in every turn."""
    seconds = record["seconds_per_round"]
    pairs = zip(seconds[PRIVATE], seconds[PLAIN], strict=True)
    return [private / plain for private, plain in pairs]


def beyond_target(record: Mapping[str, Any]) -> bool:
    """Whether privacy adds more than the target in the median over turns."""
    return statistics.median(ratios(record)) > 1 + record["target"]


def table(record: Mapping[str, Any]) -> str:
    """Milliseconds per round and the ratio, as text."""
    seconds, found = record["seconds_per_round"], ratios(record)
    lines = [
        f"{record['device']}, {record['processes']} processes, {len(found)} turns of "
        f"{record['rounds']} rounds"
    ]
    for kind, own in seconds.items():
        lines.append(f"{kind:<10}{1000 * statistics.median(own):10.1f} ms/round")
    spread = f"{min(found):.3f} to {max(found):.3f}"
    lines.append(f"{PRIVATE} / {PLAIN}: {statistics.median(found):.3f} ({spread})")
    if beyond_target(record):
        lines.append(f"more than the target of {1 + record['target']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
