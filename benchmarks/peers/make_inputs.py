"""Writes a workload's data, cohorts and initial weights, the same file for every program.

    python benchmarks/peers/make_inputs.py --workload cnn_small --out build/benchmarks/cnn_small.npz

Pixels and labels are random, since speed does not depend on the content of images. Sentences have random
words by frequency, and the lengths of sentences on Stack Overflow.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from peers import workload as work

ROUNDS = 64  # each with its own cohort
DISTILLATIONS = 8  # each with its own unlabelled examples
SEED = 0


def main() -> int:
    """Writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(work.WORKLOADS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write(arguments.workload, arguments.out)
    return 0


def write(workload: str, path: Path) -> None:
    """Writes a workload's file, whole or not at all."""
    arrays = make(workload)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with open(unfinished, "wb") as file:
        np.savez(file, **arrays)
    unfinished.replace(path)


def make(workload: str) -> dict[str, np.ndarray]:
    """A workload's arrays, always the same."""
    networks, population, cohort, distillation, _ = work.WORKLOADS[workload]
    network = next(iter(networks.values()))
    draws = np.random.default_rng(SEED)
    # FedKD's pools have the same clients, and FML's meme has none.
    method = distillation and distillation.method
    groups = 1 if method == "fed_kd" else len(networks) - (work.MEME in networks)
    sizes = client_sizes(population, groups * population.clients, draws)
    rows = int(sizes.sum())
    arrays = {
        "workload": np.array(workload),
        **examples(network, rows, draws),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]),
    }
    for index, (pool, network) in enumerate(networks.items()):
        chosen = [draws.choice(population.clients, cohort, replace=False) for _ in range(ROUNDS)]
        first = index % groups * population.clients
        arrays[f"{pool}/cohorts"] = (first + np.stack(chosen)).astype(np.int32)
        for name, shape in work.weight_shapes(network).items():
            arrays[f"{pool}/{name}"] = initial_weight(name, shape, draws)
    if method in work.HTFL_METHODS:
        from party_orders import htfl_orders  # it imports JAX

        arrays["visited_orders"] = htfl_orders(method, groups, population.largest)
        # Clients start with one head, as LG-FedAvg's do.
        for pool in networks:
            for leaf in ("kernel", "bias"):
                arrays[f"{pool}/head/{leaf}"] = arrays[f"client_0/head/{leaf}"]
    if distillation is not None and distillation.steps:
        size = (work.UNLABELLED, *network.image)
        arrays["unlabelled"] = draws.integers(0, 256, size, dtype=np.uint8)
        shape = (DISTILLATIONS, distillation.steps, work.DISTILLATION_BATCH)
        arrays["unlabelled_rows"] = endless(work.UNLABELLED, shape, draws)
        if distillation.method == "fed_md":
            from party_orders import orders  # it imports JAX

            aligned = distillation.steps * work.DISTILLATION_BATCH
            found = orders(len(networks), aligned, population.largest)
            arrays |= {f"{purpose}_orders": order for purpose, order in found.items()}
        if distillation.method == "mhd":
            from party_orders import mhd_orders

            found = mhd_orders(len(networks), distillation.steps, population.largest)
            arrays |= {f"{purpose}_orders": order for purpose, order in found.items()}
    return arrays


def examples(
    network: work.AnyNetwork, rows: int, draws: np.random.Generator
) -> dict[str, np.ndarray]:
    """Images with labels, or sentences as uint16 [rows, POSITIONS + 1], padded, as our data have them.

    A word's frequency falls with its rank (Zipf's law). Sentences have 12 words in the median; with
    their ends and cut to POSITIONS, EXPECTED_LENGTH tokens are to be predicted in the mean.
    """
    if not isinstance(network, work.LanguageNetwork):
        return {
            "pixels": draws.integers(0, 256, (rows, *network.image), dtype=np.uint8),
            "labels": draws.integers(0, network.classes, rows, dtype=np.int32),
        }
    words = network.vocabulary - 4
    ranks = np.exp(draws.random((rows, work.POSITIONS + 1)) * np.log(words)).astype(np.uint16) - 1
    tokens = work.FIRST_WORD + ranks
    tokens[:, 0] = work.BEGINNING
    lengths = np.rint(12 * np.exp(0.7 * draws.normal(size=rows))).clip(1).astype(int)
    positions = np.arange(work.POSITIONS + 1)
    tokens[positions == lengths[:, None] + 1] = work.END
    tokens[positions > lengths[:, None] + 1] = work.PADDING
    return {"tokens": tokens}


def initial_weight(name: str, shape: tuple[int, ...], draws: np.random.Generator) -> np.ndarray:
    """A weight at the start, float32."""
    if name.endswith("vectors"):
        return (draws.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)
    if name.endswith("kernel"):
        return (draws.normal(size=shape) * np.prod(shape[:-1]) ** -0.5).astype(np.float32)
    return np.full(shape, name.endswith(("scale", "var")), np.float32)


def endless(rows: int, shape: tuple[int, ...], draws: np.random.Generator) -> np.ndarray:
    """Indices of rows in random order, reshuffled after each pass over all rows, int32 [*shape]."""
    count = int(np.prod(shape))
    passes = [draws.permutation(rows) for _ in range(-(-count // rows))]
    return np.concatenate(passes)[:count].reshape(shape).astype(np.int32)


def client_sizes(
    population: work.Population, clients: int, draws: np.random.Generator
) -> np.ndarray:
    """Examples of each client: many small clients and few large ones, int64 [clients]."""
    span = population.largest - population.smallest + 1
    skewed = draws.random(clients) ** 2
    return population.smallest + (span * skewed).astype(np.int64)


if __name__ == "__main__":
    sys.exit(main())
