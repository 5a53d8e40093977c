"""How a round's time and memory grow with clients, cohorts, devices and chunks; the cost of streaming.

    python benchmarks/scale.py [--only population memory ...] [--turns 2]

Random data are written to a temporary folder (1.4 GB; TMPDIR sets its place) and memory-mapped; streamed
data are read from there round by round. Rounds are those of `run_experiment`, on the networks of
benchmarks/peers/workload.py, with one step per client on digits and five on the small CNN. Each
measurement has its own processes, one per device, and measurements take turns. Later turns read the
programs that the first has compiled, as with the launcher. The record is written to results/benchmarks/.

To measure how much reading is hidden behind computation, the same rounds are run again with the examples
of one round, which are in memory. On processors this is done with one core more than those that compute
(an accelerator leaves all cores free), and without it.

With --accelerator a measurement is one process that uses the devices that JAX finds, and memory is that
of the device. `--only memory` then shows whether clients are trained faster one by one or at once, where
convolutions with a kernel for each client become grouped ones, and the effect of bfloat16. `--only
seeds` shows the time that several seeds in one program save. `--rounds` should be large enough for a
second.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import numpy as np
import records
from peers import measuring
from peers import workload as work

from fedcodist.core import child_processes
from fedcodist.run import launch

KIND = RECORD = "scale"
# network -> (examples of each client, rounds of 20 clients that are timed together)
EXAMPLES = {"digits": 20, "cnn_small": 100}
ROUNDS = {"digits": 200, "cnn_small": 5}
REPETITIONS = 3  # in each process
SEEDS = 4  # where there are several
MOST_DEVICES = 8
CLIENTS = 20 * MOST_DEVICES
CHUNK = 1 << 16  # rows written at once


class Configuration(NamedTuple):
    """One measurement.

    Attributes:
      network: 'digits' or 'cnn_small'.
      clients: in the population.
      cohort: clients of a round.
      devices: processes, each with one core.
      streamed: whether the data stay on the host.
      chunk: clients that a device trains at once; 0 for one after another, without vmap.
      precision: 'float32' or 'bfloat16'.
      rematerialised: whether activations are computed again in the backward pass.
      seeds: runs in one program.
      seeds_loop: 'map' runs them one after another, 'vmap' at once.
      host_cores: cores for the host's work, in addition to those of the devices.
    """

    network: str
    clients: int
    cohort: int
    devices: int
    streamed: bool
    chunk: int = 0
    precision: str = "float32"
    rematerialised: bool = False
    seeds: int = 1
    seeds_loop: str = "map"
    host_cores: int = 0


def main() -> int:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    groups = list(configurations(1))
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--accelerator", action="store_true", help="not the processor's cores")
    parser.add_argument("--rounds", type=int, help="between two looks at the clock")
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, configuration = arguments.one
        return one(
            Path(folder),
            Configuration(*json.loads(configuration)),
            arguments.rounds,
            arguments.accelerator,
        )
    for name in ("turns", "rounds"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    every = configurations(1 if arguments.accelerator else machine.cores())
    chosen = {name: every[name] for name in arguments.only}
    # A configuration of two groups is measured once.
    lines: dict[Configuration, list[dict[str, Any]]] = {
        each: [] for group in chosen.values() for each in group
    }
    with tempfile.TemporaryDirectory() as folder:
        for network, clients in {(each.network, each.clients) for each in lines}:
            write_columns(Path(folder), network, clients)
        for _ in range(arguments.turns):
            for each in lines:
                lines[each].append(run(Path(folder), each, arguments.rounds, arguments.accelerator))
    record = {
        **records.common(RECORD, KIND, next(own[0]["device"] for own in lines.values())),
        "turns": arguments.turns,
        "groups": {
            name: [{**each._asdict(), **summary(lines[each])} for each in group]
            for name, group in chosen.items()
        },
    }
    print(table(record))
    records.write(record, arguments.results)
    return 0


def configurations(cores: int) -> dict[str, list[Configuration]]:
    """What is measured on a machine, by what grows."""
    devices = [count for count in (1, 2, 4, MOST_DEVICES) if count <= cores]
    chunk = Configuration("cnn_small", CLIENTS, 20, 1, False)
    several = chunk._replace(seeds=SEEDS)
    return {
        "population": [
            Configuration("digits", clients, 20, 1, True) for clients in (100, 10_000, 1_000_000)
        ],
        "cohort": [Configuration("digits", 10_000, cohort, 1, True) for cohort in (20, 200, 2000)],
        # The same work on more devices, and work that grows with them.
        "strong": [Configuration("cnn_small", CLIENTS, 20, count, False) for count in devices],
        "weak": [
            Configuration("cnn_small", CLIENTS, 20 * count, count, False) for count in devices
        ],
        # To read during the computation, a core is needed that does not compute.
        "streaming": [
            Configuration(network, clients, cohort, 1, True, host_cores=spare)
            for network, clients, cohort in (("digits", 10_000, 200), ("cnn_small", CLIENTS, 20))
            for spare in range(min(cores, 2))
        ],
        "memory": [
            *(chunk._replace(chunk=size) for size in (0, 2, 5, 10, 20)),
            chunk._replace(chunk=20, precision="bfloat16"),
            chunk._replace(chunk=20, rematerialised=True),
        ],
        "seeds": [
            way._replace(network=network)
            for network in EXAMPLES
            for way in (
                *(chunk, several),
                *(chunk._replace(chunk=20), several._replace(chunk=20)),
                several._replace(chunk=20, seeds_loop="vmap"),
            )
        ],
    }


def rounds_of(configuration: Configuration) -> int:
    """Rounds that are timed together; there are fewer if they are larger."""
    if configuration.chunk and configuration.network == "cnn_small":
        return 1  # a processor's core takes long for several clients at once
    clients = configuration.cohort * configuration.seeds
    return max(5, ROUNDS[configuration.network] * 20 // clients)


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A configuration's figures over all turns."""
    lines = list(lines)
    return {
        "seconds_per_round": [each for line in lines for each in line["seconds_per_round"]],
        "ready_seconds_per_round": [
            each for line in lines for each in line["ready_seconds_per_round"]
        ],
        "gather_seconds": [line["gather_seconds"] for line in lines],
        "program_mb": lines[0]["program_mb"],
        "peak_rss_mb": [line["peak_rss_mb"] for line in lines],
        "anonymous_mb": [line["anonymous_mb"] for line in lines],
        "peak_device_mb": [line["peak_device_mb"] for line in lines],
    }


def hidden_share(own: Mapping[str, Any]) -> float:
    """The share of the gathering of streamed data that is hidden behind the computation, 0 to 1. The
    part that is not hidden is the additional time compared with rounds whose examples are in memory."""
    together, ready, gathering = (
        statistics.median(own[name])
        for name in ("seconds_per_round", "ready_seconds_per_round", "gather_seconds")
    )
    return min(1.0, max(0.0, 1 - (together - ready) / gathering))


def write_columns(folder: Path, network: str, clients: int) -> None:
    """Writes random images and labels of all clients."""
    about = work.WORKLOADS[network].networks[work.POOL]
    rows, draws = clients * EXAMPLES[network], np.random.default_rng(0)
    images = draws.integers(0, 256, (min(rows, CHUNK), *about.image), dtype=np.uint8)
    labels = draws.integers(0, about.classes, min(rows, CHUNK), dtype=np.int32)
    for name, values in (("image", images), ("label", labels)):
        path = folder / f"{network}-{clients}-{name}.npy"
        shape = (rows, *values.shape[1:])
        column = np.lib.format.open_memmap(path, "w+", values.dtype, shape)
        for start in range(0, rows, CHUNK):
            column[start : start + CHUNK] = values[: rows - start]
        column.flush()


def run(
    folder: Path, configuration: Configuration, rounds: int | None, accelerator: bool
) -> dict[str, Any]:
    """One measurement in its own processes."""
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, "--one", str(folder), json.dumps(configuration)]
    if rounds is not None:
        command.append(f"--rounds={rounds}")
    if accelerator:
        command.append("--accelerator")
    done = child_processes.run(command, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def one(folder: Path, configuration: Configuration, rounds: int | None, accelerator: bool) -> int:
    """Starts the processes of one measurement, or measures in one of them."""
    if not launch.is_child():
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        if configuration.rematerialised:
            from fedcodist.core.rematerialisation import CPU_FLAG

            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_FLAG}"
        if not accelerator:
            os.environ["JAX_PLATFORMS"] = "cpu"
            measuring.limit_cores(configuration.devices + configuration.host_cores)
            os.environ["NPROC"] = "1"  # threads that XLA computes with, in each process
        return launch.supervise([sys.executable, *sys.argv], configuration.devices)
    launch.join()
    import jax

    line = measure(folder, configuration, rounds or rounds_of(configuration))
    if jax.process_index() == 0:
        line["anonymous_mb"] = measuring.anonymous_memory_mb()
        line["peak_rss_mb"] = measuring.peak_memory_mb(os.getppid())
        line["device"] = machine.accelerator()
        line["peak_device_mb"] = machine.peak_accelerator_mb()
        print(json.dumps(line))
    return 0


def measure(folder: Path, configuration: Configuration, rounds: int) -> dict[str, Any]:
    """One process's figures: seconds per round of each repetition, and MB of a device that the program
    and its data take. With streamed data also seconds of rounds whose examples are in memory, and
    seconds for gathering a round's examples alone."""
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.run.chunk_size import needed_bytes
    from fedcodist.run.experiment import Experiment, experiment_programs, run_experiment
    from fedcodist.run.sources import StreamedData, resident_data

    class Ready(StreamedData):
        """Streamed data that gather only one round's examples and then repeat them."""

        one = None

        def read(self, *arguments):
            self.one = self.one or super().read(*arguments)
            return self.one

    network, clients, streamed = (
        configuration.network,
        configuration.clients,
        configuration.streamed,
    )
    columns = {
        name: np.load(folder / f"{network}-{clients}-{name}.npy", mmap_mode="r")
        for name in ("image", "label")
    }
    offsets = np.arange(clients + 1) * EXAMPLES[network]
    federated = FederatedData.from_arrays(columns, offsets=offsets)
    algorithm = make_algorithm(configuration, federated)
    data = StreamedData(federated) if streamed else resident_data(federated)
    experiment = Experiment(
        algorithm,
        data,
        {"few": federated.select([0])},
        # The first evaluation and the first rounds compile.
        rounds=(1 + REPETITIONS) * rounds,
        evaluate_every=rounds,
        seeds=configuration.seeds,
        seeds_loop=configuration.seeds_loop,
        evaluation_preprocess=_scale(),
    )
    programs = experiment_programs(experiment)

    def seconds(data):
        ends: list[float] = []
        run_experiment(
            experiment._replace(data=data),
            callbacks=[lambda found: ends.append(time.perf_counter())],
            show_progress=False,
            programs=programs,
        )
        return [(end - start) / rounds for start, end in itertools.pairwise(ends[1:])]

    return {
        "seconds_per_round": seconds(data),
        "ready_seconds_per_round": seconds(Ready(federated)) if streamed else [],
        "gather_seconds": seconds_to_gather(algorithm, data, rounds) if streamed else None,
        "program_mb": needed_bytes(experiment) / 1e6,
    }


def seconds_to_gather(algorithm, data, rounds: int) -> float:
    """Seconds per round that a process takes to gather its devices' rows, with nothing beside it."""
    import jax

    from fedcodist.run.placement import all_devices, own_devices

    mesh = all_devices()
    devices, own = jax.device_count(), own_devices(mesh)
    select = jax.jit(lambda round: algorithm.select(round, jax.random.key(0)))
    # Other rounds than the trained ones, since the pages of those are in memory already.
    chosen = [jax.tree.map(np.asarray, select(1_000_000 + round)) for round in range(rounds)]
    started = time.perf_counter()
    for selection in chosen:
        data.read(selection, devices, own)
    return (time.perf_counter() - started) / rounds


def make_algorithm(configuration: Configuration, federated):
    """Federated averaging of one pool of all clients."""
    import functools

    import jax.numpy as jnp
    import optax

    from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
    from fedcodist.algorithms.pools.independent_pools import independent_pools
    from fedcodist.algorithms.pools.pool import Pool
    from fedcodist.core.for_each_client import Execution
    from fedcodist.core.from_linen import from_flax_linen
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.core.precision import in_bfloat16
    from fedcodist.core.rematerialisation import rematerialised
    from fedcodist.models import cnn, digits

    networks = {"digits": lambda: digits.MLP(hidden=(64,)), "cnn_small": cnn.small_cnn}
    image = work.WORKLOADS[configuration.network].networks[work.POOL].image
    model = from_flax_linen(networks[configuration.network](), jnp.zeros((1, *image)))
    if configuration.precision == "bfloat16":
        model = in_bfloat16(model)
    if configuration.rematerialised:
        model = rematerialised(model)
    training = LocalTraining(optax.sgd, work.BATCH, 1, _scale())
    adam = functools.partial(optax.adam, eps=work.SERVER_EPSILON)
    # Small rates: labels are random, and a run whose updates are not finite stops.
    method = fed_avg(model, training, adam, hyper=FedAvgHyper(0.01, 0.001))
    pool = Pool(method, np.arange(federated.num_clients), configuration.cohort)
    execution = Execution("vmap", configuration.chunk) if configuration.chunk else Execution()
    return independent_pools({work.POOL: pool}, federated.columns, execution)


def _scale():
    from fedcodist.data import augmentation

    return augmentation.image_preprocess(augmentation.normalise((0.5,), (0.25,)))


def way(own: Mapping[str, Any]) -> str:
    """How a configuration's clients are trained, for tables."""
    loop = f"{own['chunk']} at once" if own["chunk"] else "one by one"
    options = [own["precision"]] if own["precision"] != "float32" else []
    if own["rematerialised"]:
        options.append("rematerialised")
    if (seeds := own.get("seeds", 1)) > 1:
        options.append(f"{seeds} seeds {'at once' if own['seeds_loop'] == 'vmap' else 'in turn'}")
    if own.get("host_cores", 0):
        options.append("a core for reading")
    return ", ".join([loop, *options])


def table(record: Mapping[str, Any]) -> str:
    """Medians as text."""
    head = (
        f"{'':<12}{'network':<11}{'clients':>10}{'cohort':>8}{'devices':>9}{'data':>10}"
        f"{'ms/round':>11}{'ready':>11}{'gather, ms':>12}{'hidden':>8}{'program, MB':>13}"
        f"{'peak, MB':>10}  training"
    )
    lines = [record["device"], head]
    for name, group in record["groups"].items():
        for own in group:
            ready = gather = hidden = "-"
            if own["streamed"]:
                ready = f"{1000 * statistics.median(own['ready_seconds_per_round']):.3f}"
                gather = f"{1000 * statistics.median(own['gather_seconds']):.3f}"
                hidden = f"{hidden_share(own):.0%}"
            lines.append(
                f"{name:<12}{own['network']:<11}{own['clients']:>10,}{own['cohort']:>8,}"
                f"{own['devices']:>9}{'streamed' if own['streamed'] else 'resident':>10}"
                f"{1000 * statistics.median(own['seconds_per_round']):11.3f}{ready:>11}"
                f"{gather:>12}{hidden:>8}{own['program_mb']:13.1f}"
                f"{statistics.median(own['peak_rss_mb']):10.0f}  {way(own)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
