"""The time that evaluating and logging add to training, without the evaluation's own arithmetic.

    python benchmarks/overhead.py [--repetitions 9]

Whole runs of `run_experiment` on the small CNN take turns. One is evaluated only at its start and end.
One is evaluated after every round, each time with a line of metrics.jsonl, a callback and the progress.
One has a second split too. Splits have twenty images, a three-hundredth of a round's arithmetic, so the
loop's own time is measured: dispatch, waiting for results, writing the line. It does not include the
time to evaluate more images, nor checkpoints. The record is written to results/benchmarks/.

The exit status is 1 if an evaluation or a split adds more than 2 % of a round of this network, in the
median; in shorter rounds the same time is a larger share.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fedavg_cnn
import machine
import records

from fedcodist.run import launch

KIND = RECORD = "overhead"
ROUNDS = 20  # of a run
IMAGES = 20  # of a split
TARGET = 0.02  # of a round
AT_ENDS, EVERY_ROUND, TWO_SPLITS = "at both ends", "after every round", "with a second split"
WAYS = {AT_ENDS: (ROUNDS, 1), EVERY_ROUND: (1, 1), TWO_SPLITS: (1, 2)}  # rounds between, splits


def main() -> int:
    """Starts one process per core, or measures in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {arguments.repetitions}")
    if not launch.is_child():
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, *sys.argv, "--runs", runs]
            return launch.supervise(command, launch.default_processes())
    device = machine.device()
    launch.join()
    seconds = measure(arguments.repetitions, Path(arguments.runs))
    if seconds is not None:
        del sys.argv[sys.argv.index("--runs") :]  # so that the record has the user's command
        record = {
            **records.common(RECORD, KIND, machine.accelerator() or device),
            "processes": launch.processes_here(),
            "rounds": ROUNDS,
            "target": TARGET,
            "seconds_per_round": seconds,
        }
        print(table(record))
        records.write(record, arguments.results)
        return int(bool(beyond_target(record)))
    return 0


def measure(repetitions: int, runs: Path) -> dict[str, list[float]] | None:
    """Each way's seconds per round, all ways in turn; the first process returns them.

    Args:
      repetitions: of each way.
      runs: a folder for their run folders.
    """
    import jax

    from fedcodist.data import augmentation
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.run.experiment import Experiment, experiment_programs, run_experiment
    from fedcodist.run.sources import resident_data

    federated, images = fedavg_cnn.make_data()
    algorithm, _ = fedavg_cnn.make_workload("small", federated, len(images))
    few = {name: column[:IMAGES] for name, column in federated.columns.items()}
    split = FederatedData.from_arrays(few, offsets=[0, IMAGES])
    scale = augmentation.image_preprocess(augmentation.normalise((0.5,), (0.25,)))
    experiments = {
        way: Experiment(
            algorithm,
            resident_data(federated),
            {f"split {number}": split for number in range(splits)},
            ROUNDS,
            evaluate_every=every,
            checkpoint_every=ROUNDS,
            evaluation_batch_size=IMAGES // jax.device_count(),
            evaluation_preprocess=scale,
        )
        for way, (every, splits) in WAYS.items()
    }
    programs = experiment_programs(experiments[AT_ENDS])
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(1 + repetitions):
        for way, experiment in experiments.items():
            started = time.perf_counter()
            run_experiment(
                experiment,
                runs / f"{way}, {repetition}",
                callbacks=[len],
                show_progress=False,
                programs=programs,
            )
            if repetition:  # the first one compiles
                seconds[way].append((time.perf_counter() - started) / ROUNDS)
    return seconds if jax.process_index() == 0 else None


def shares(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """The time that each way adds to the previous one, as a share of a round, in every repetition."""
    seconds = record["seconds_per_round"]
    ways = list(seconds)
    return {
        way: [
            (longer - shorter) / round
            for longer, shorter, round in zip(
                seconds[way], seconds[before], seconds[ways[0]], strict=True
            )
        ]
        for before, way in itertools.pairwise(ways)
    }


def beyond_target(record: Mapping[str, Any]) -> list[str]:
    """The ways that add more than the target in the median over repetitions."""
    added = shares(record).items()
    return [way for way, own in added if statistics.median(own) > record["target"]]


def table(record: Mapping[str, Any]) -> str:
    """Milliseconds per round and what each way adds, as text."""
    lines = [f"{record['device']}, {record['processes']} processes, {record['rounds']} rounds"]
    lines.append(f"{'evaluated':<22}{'ms/round':>10}{'adds':>8}")
    added = shares(record)
    for way, own in record["seconds_per_round"].items():
        more = f"{statistics.median(added[way]):8.1%}" if way in added else ""
        lines.append(f"{way:<22}{1000 * statistics.median(own):10.1f}{more}")
    for way in beyond_target(record):
        lines.append(f"{way}: more than the target of {record['target']:.0%} of a round")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
