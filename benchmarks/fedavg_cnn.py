"""Speed of one round on the paper's CNNs, against the machine's own GEMM peak in the same run.

    python benchmarks/fedavg_cnn.py [--repetitions 9] [--processes N] [--results FOLDER]

FedAvg: 20 clients x 100 images of 24x24x3, batches of 20, one epoch, client SGD, server Adam.
MergedCodist: both networks' rounds and 32 distillation steps of 128 images for each.
FLOPs are those of direct convolutions, forward and backward, without the gradient of the images.
With --results a record is written there.
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
import records

from fedcodist.run import launch

CLIENTS, EXAMPLES, COHORT, BATCH = 100, 100, 20, 20
ROUNDS = 3  # of one measurement
KIND, RECORD = "gemm", "fedavg_cnn"
DISTILLATION_STEPS, DISTILLATION_BATCH = 32, 128
# Multiply-adds of a forward pass; the first entry is the first convolution.
LAYERS = {
    "small": (24 * 24 * 27 * 16, 144 * 144 * 32, 36 * 288 * 32, 1152 * 64, 64 * 128, 128 * 100),
    "large": (24 * 24 * 27 * 32, 144 * 288 * 64, 36 * 576 * 64, 2304 * 128, 128 * 256, 256 * 100),
}


def forward_flops(model: str) -> int:
    """FLOPs of one image's forward pass."""
    return 2 * sum(LAYERS[model])


def training_flops(model: str) -> int:
    """FLOPs of one image's forward and backward pass, the images' own gradient left out."""
    return 3 * forward_flops(model) - 2 * LAYERS[model][0]


def main() -> int:
    """Starts one process per core, or measures in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--processes", type=int, default=launch.default_processes())
    parser.add_argument("--workloads", nargs="+", default=["small", "large", "merged"])
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if not launch.is_child():
        return launch.supervise([sys.executable, *sys.argv], arguments.processes)
    device = machine.device()
    launch.join()
    measured = measure(arguments.repetitions, arguments.workloads)
    if measured is not None:
        record = {**records.common(RECORD, KIND, machine.accelerator() or device), **measured}
        print(table(record))
        if arguments.results is not None:
            records.write(record, arguments.results)
    return 0


def measure(repetitions: int, workloads: list[str]) -> dict[str, Any] | None:
    """Measures each workload's rounds and the GEMM peak in turn; the first process returns it."""
    import jax
    import numpy as np

    from fedcodist.run.placement import all_devices, replicate
    from fedcodist.run.programs import build_programs
    from fedcodist.run.sources import resident_data

    mesh = all_devices()
    first = jax.process_index() == 0
    federated, images = make_data()
    data = replicate(resident_data(federated, {"unlabelled": {"image": images}}), mesh)
    seeds = replicate(np.zeros(1, np.uint32), mesh)
    measured = []
    for workload in workloads:
        algorithm, flops = make_workload(workload, federated, len(images))
        programs = build_programs(algorithm, ROUNDS, mesh)
        hyper = replicate(jax.tree.map(np.float32, algorithm.hyper), mesh)
        started = time.perf_counter()
        state = programs.init(seeds), dict.fromkeys(algorithm.client_states)

        def call(state, programs=programs, hyper=hyper):
            return programs.train(*state, seeds, np.int32(0), np.int32(ROUNDS), hyper, data)[:2]

        state = jax.block_until_ready(call(state))
        measured.append([workload, flops, time.perf_counter() - started, call, state, []])
    peaks = []
    gemm, operands = make_gemm(mesh)
    # Everything takes turns, so that a change of the machine's speed affects all alike.
    for _ in range(repetitions):
        peaks.append(seconds_of(lambda: gemm(*operands)))
        for entry in measured:
            _, _, _, call, state, times = entry
            started = time.perf_counter()
            entry[4] = jax.block_until_ready(call(state))
            times.append((time.perf_counter() - started) / ROUNDS)
    if not first:
        return None
    peaks = [gemm_flops(jax.device_count()) / seconds / 1e9 for seconds in peaks]
    return {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "gemm_gflops": peaks,
        "rounds": {
            workload: {
                "gflop": flops / 1e9,
                "seconds": times,
                "share_of_peak": [
                    flops / 1e9 / seconds / peak for seconds, peak in zip(times, peaks, strict=True)
                ],
                "first_call_seconds": compile_seconds,
            }
            for workload, flops, compile_seconds, _, _, times in measured
        },
    }


def table(record: Mapping[str, Any]) -> str:
    """Seconds per round, GFLOP/s and the share of the GEMM peak, as text."""
    peak = statistics.median(record["gemm_gflops"])
    lines = [
        f"{record['processes']} processes, {record['devices']} devices, "
        f"{len(record['gemm_gflops'])} repetitions",
        f"GEMM peak, float32, 2048 x 2048, all cores: {peak:.0f} GFLOP/s\n",
        f"{'round':<16}{'seconds':>9}{'min':>8}{'max':>8}{'GFLOP':>8}{'GFLOP/s':>9}"
        f"{'of peak':>9}{'first call, s':>15}",
    ]
    for workload, own in record["rounds"].items():
        times, gflop = own["seconds"], own["gflop"]
        median, share = statistics.median(times), statistics.median(own["share_of_peak"])
        lines.append(
            f"{name_of(workload):<16}{median:9.3f}{min(times):8.3f}{max(times):8.3f}{gflop:8.2f}"
            f"{gflop / median:9.1f}{share:9.1%}{own['first_call_seconds']:15.1f}"
        )
    return "\n".join(lines)


def name_of(workload: str) -> str:
    """A round's name in tables."""
    return "MergedCodist" if workload == "merged" else f"FedAvg {workload}"


def make_workload(workload: str, federated, num_unlabelled: int):
    """Returns (algorithm, FLOPs of one round)."""
    import functools

    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
    from fedcodist.algorithms.pools.independent_pools import independent_pools
    from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
    from fedcodist.algorithms.pools.pool import Pool
    from fedcodist.core.from_linen import from_flax_linen
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.data import augmentation
    from fedcodist.distillation.settings import Distillation
    from fedcodist.models import cnn

    networks = {"small": cnn.small_cnn, "large": cnn.large_cnn}
    scale = augmentation.image_preprocess(augmentation.normalise((0.5,), (0.25,)))

    def pool(name):
        model = from_flax_linen(networks[name](), jnp.zeros((1, 24, 24, 3)))
        training = LocalTraining(optax.sgd, BATCH, 1, scale)
        adam = functools.partial(optax.adam, eps=1e-5)
        # Small rates: labels are random, and a run whose updates are not finite stops.
        method = fed_avg(model, training, adam, hyper=FedAvgHyper(0.01, 0.001))
        return Pool(method, np.arange(CLIENTS), COHORT)

    fed_avg_flops = {name: COHORT * EXAMPLES * training_flops(name) for name in networks}
    if workload != "merged":
        pools = {workload: pool(workload)}
        return independent_pools(pools, federated.columns), fed_avg_flops[workload]
    algorithm = merged_codistillation(
        {name: pool(name) for name in networks},
        federated.columns,
        num_unlabelled,
        num_rounds=1500,
        distillation=Distillation(
            DISTILLATION_STEPS,
            DISTILLATION_BATCH,
            preprocess=augmentation.image_preprocess(
                augmentation.normalise((0.5,), (0.25,)), augmentation.random_axis_flip
            ),
        ),
    )
    images = DISTILLATION_STEPS * DISTILLATION_BATCH
    distillation = sum(images * (forward_flops(n) + training_flops(n)) for n in networks)
    return algorithm, sum(fed_avg_flops.values()) + distillation


def make_data():
    """Random images, since speed does not depend on their content."""
    import numpy as np

    from fedcodist.data.federated_data import FederatedData

    draws = np.random.default_rng(0)
    rows = CLIENTS * EXAMPLES
    columns = {
        "image": draws.integers(0, 256, (rows, 24, 24, 3), dtype=np.uint8),
        "label": draws.integers(0, 100, rows, dtype=np.int32),
    }
    owners = np.repeat(np.arange(CLIENTS), EXAMPLES)
    return FederatedData.from_arrays(columns, client_of_row=owners), columns["image"][:5000]


def make_gemm(mesh):
    """A jitted chain of 2048 x 2048 products on every device at once, and its operands."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from fedcodist.run.placement import replicate

    def chain(left, right):
        return jax.lax.fori_loop(0, 6, lambda _, product: product @ right, left)

    if mesh is not None:
        replicated = PartitionSpec()
        chain = jax.shard_map(
            chain, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
    matrix = np.full((2048, 2048), 1 / 2048, np.float32)
    operands = replicate((matrix, matrix), mesh)
    gemm = jax.jit(chain)
    jax.block_until_ready(gemm(*operands))
    return gemm, operands


def gemm_flops(devices: int) -> float:
    """FLOPs of one call of the chain over all devices."""
    return 6 * 2 * 2048.0**3 * devices


def seconds_of(call) -> float:
    """Seconds until a call's result is ready."""
    import jax

    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
