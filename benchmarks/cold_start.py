"""How long one waits at the start: for the import, and for the first round of the small CNN.

    python benchmarks/cold_start.py [--turns 5]

Everything is measured in new processes, in turn. The first start has an empty folder for compiled
programs, and the second has the folder that the first has filled. The launcher chooses the number of
processes. A start is timed in two ways: with the library alone, until the result of the first round is
there; and as the command that README.md documents, `python -m experiments.main --config ... --workdir
...`, until it reports its first round. The command reads and checks a prepared folder of random images,
evaluates before and after the round and writes a run folder. The record is written to
results/benchmarks/.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fedavg_cnn
import machine
import records

from fedcodist.core import child_processes
from fedcodist.run import compilation_cache, launch

KIND = RECORD = "cold_start"
TARGETS = {  # seconds
    "import": 2.0,
    "first start": 15.0,
    "second start": 5.0,
    "command, first start": 15.0,
    "command, second start": 5.0,
}
# Names are imported when they are first used, so all of them are used here.
IMPORT = "import fedcodist; [getattr(fedcodist, name) for name in fedcodist.__all__]"
FIRST_ROUND = "--first-round"
DONE = "first round done"
CONFIG = "benchmarks/small_cnn_config.py"
REPORTED = "round 1/1"  # in the command's line of progress


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
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_images(data)
        for _ in range(arguments.turns):
            for name, value in measure(data).items():
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


def measure(data: Path) -> dict[str, float]:
    """Seconds of one import, and of a first and a second start of the library and of the command.

    Args:
      data: a folder of `write_images`.
    """
    started = time.perf_counter()
    child_processes.run([sys.executable, "-c", IMPORT], cwd=records.ROOT).check_returncode()
    measured = {"import": time.perf_counter() - started}
    library = [sys.executable, str(Path(__file__).resolve()), FIRST_ROUND]
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first start", "second start"):
            measured[start] = seconds_until(DONE, library, with_cache(folder))
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first start", "second start"):
            # A new run folder: in an old one the run would continue from the checkpoint.
            run = command(data, Path(folder) / f"run of the {start}")
            measured[f"command, {start}"] = seconds_until(REPORTED, run, with_cache(folder))
    return measured


def command(data: Path, workdir: Path) -> list[str]:
    """The documented command for one round on a prepared folder."""
    main = [sys.executable, "-m", "experiments.main", "--config", CONFIG, "--workdir", str(workdir)]
    return [*main, f"--config.data.folder={data}"]


def with_cache(folder: str) -> dict[str, str]:
    """An environment in which the launcher keeps compiled programs in a folder, and not elsewhere."""
    environment = os.environ | {"XDG_CACHE_HOME": folder}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    return environment


def seconds_until(said: str, command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds from a command's start to its first line with the text `said`. It is run to its end."""
    started, heard = time.perf_counter(), None
    process = child_processes.start(
        command, env=environment, cwd=records.ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout or ():
            if heard is None and said in line:
                heard = time.perf_counter()
        process.wait()
    finally:
        child_processes.stop([process])
    if process.returncode or heard is None:
        raise RuntimeError(f"{command[1:3]} ended with status {process.returncode}")
    return heard - started


def write_images(folder: Path) -> None:
    """A prepared folder of random 32x32 images, with as many clients and examples as in `make_data`."""
    import numpy as np

    from fedcodist.data.federated_data import FederatedData
    from fedcodist.data.prepared import save_prepared

    draws = np.random.default_rng(0)

    def split(clients):
        rows = clients * fedavg_cnn.EXAMPLES
        columns = {
            "image": draws.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8),
            "label": draws.integers(0, 100, rows, dtype=np.int32),
        }
        return FederatedData.from_arrays(
            columns, offsets=np.arange(clients + 1) * fedavg_cnn.EXAMPLES
        )

    splits = {"train": split(fedavg_cnn.CLIENTS)}
    splits |= {name: split(1) for name in ("distillation", "held_out", "test")}
    save_prepared(
        folder, splits, source="random", licence="none", arguments={"data_set": "CIFAR-100"}
    )


def first_round() -> int:
    """Starts the processes, or trains one round of the small CNN in one of them."""
    if not launch.is_child():
        return launch.supervise([sys.executable, *sys.argv], launch.default_processes())
    launch.join()
    compilation_cache.cache_compilations()
    import jax
    import numpy as np

    from fedcodist.run.placement import all_devices, replicate
    from fedcodist.run.programs import build_programs
    from fedcodist.run.sources import resident_data

    mesh = all_devices()
    federated, images = fedavg_cnn.make_data()
    algorithm, _ = fedavg_cnn.make_workload("small", federated, len(images))
    programs = build_programs(algorithm, 1, mesh)
    seeds = replicate(np.zeros(1, np.uint32), mesh)
    hyper = replicate(jax.tree.map(np.float32, algorithm.hyper), mesh)
    data = replicate(resident_data(federated), mesh)
    state = programs.init(seeds), dict.fromkeys(algorithm.client_states)
    jax.block_until_ready(programs.train(*state, seeds, np.int32(0), np.int32(1), hyper, data)[:2])
    if jax.process_index() == 0:
        print(DONE, flush=True)
    return 0


def table(record: Mapping[str, Any]) -> str:
    """Medians beside their targets, as text."""
    lines = [f"{record['device']}, {record['processes']} processes"]
    lines.append(f"{'':<23}{'seconds':>9}{'min':>8}{'max':>8}{'target':>10}")
    for name, own in record["seconds"].items():
        target = f"< {record['targets'][name]:.0f}"
        median = statistics.median(own)
        lines.append(f"{name:<23}{median:9.2f}{min(own):8.2f}{max(own):8.2f}{target:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
