"""How long one waits at the start: for the import, and for the first round of the small CNN.

    python benchmarks/cold_start.py [--turns 5]

Everything is measured in new processes, in turn. The first start of a command has an empty folder for
compiled programs, the second one that which the first has filled. A start has the processes that the
launcher chooses; its time ends when the first round's result is there. Written to results/benchmarks/.
"""

import argparse
import os
import statistics
import subprocess
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

from fedcodist import launch

KIND = RECORD = "cold_start"
TARGETS = {"import": 2.0, "first start": 15.0, "second start": 5.0}  # seconds
# Names are imported when first used: all of them is what an experiment may need.
IMPORT = "import fedcodist; [getattr(fedcodist, name) for name in fedcodist.__all__]"
FIRST_ROUND = "--first-round"
DONE = "first round done"


def main() -> int:
    """Measures, or is one of the processes that are measured."""
    if sys.argv[1:] == [FIRST_ROUND]:
        return first_round()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error(f"--turns must be at least 1, got {arguments.turns}")
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS}
    for _ in range(arguments.turns):
        for name, value in measure().items():
            seconds[name].append(value)
    record = {
        **records.common(RECORD, KIND, machine.accelerator()),
        "processes": launch.default_processes(),
        "targets": TARGETS,
        "seconds": seconds,
    }
    print(table(record))
    records.write(record, arguments.results)
    return 0


def measure() -> dict[str, float]:
    """Seconds of one import, one first start and one second start."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORT], cwd=records.ROOT, check=True)
    imported = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        starts = [seconds_to_first_round(environment) for _ in range(2)]
    return {"import": imported, "first start": starts[0], "second start": starts[1]}


def seconds_to_first_round(environment: Mapping[str, str]) -> float:
    """Seconds from a command to the end of its first round."""
    started, ended = time.perf_counter(), None
    command = [sys.executable, str(Path(__file__).resolve()), FIRST_ROUND]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.strip() == DONE:
                ended = time.perf_counter()
    if process.returncode or ended is None:
        raise RuntimeError(f"the first round ended with status {process.returncode}")
    return ended - started


def first_round() -> int:
    """Starts the processes, or trains one round of the small CNN in one of them."""
    if not launch.is_child():
        return launch.supervise([sys.executable, *sys.argv], launch.default_processes())
    launch.join()
    launch.cache_compilations()
    import jax
    import numpy as np

    from fedcodist import simulation
    from fedcodist.sources import resident_data

    mesh = simulation.all_devices()
    federated, images = fedavg_cnn.make_data()
    algorithm, _ = fedavg_cnn.make_workload("small", federated, len(images))
    programs = simulation.build_programs(algorithm, 1, mesh)
    seeds = simulation.replicate(np.zeros(1, np.uint32), mesh)
    hyper = simulation.replicate(jax.tree.map(np.float32, algorithm.hyper), mesh)
    data = simulation.replicate(resident_data(federated), mesh)
    state = programs.init(seeds), dict.fromkeys(algorithm.rows)
    jax.block_until_ready(programs.train(*state, seeds, np.int32(0), np.int32(1), hyper, data)[:2])
    if jax.process_index() == 0:
        print(DONE, flush=True)
    return 0


def table(record: Mapping[str, Any]) -> str:
    """Medians beside their targets for people."""
    lines = [f"{record['device']}, {record['processes']} processes"]
    lines.append(f"{'':<14}{'seconds':>9}{'min':>8}{'max':>8}{'target':>10}")
    for name, own in record["seconds"].items():
        target = f"< {record['targets'][name]:.0f}"
        median = statistics.median(own)
        lines.append(f"{name:<14}{median:9.2f}{min(own):8.2f}{max(own):8.2f}{target:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
