"""The time of SVD in a round of FedKD: no compression, exact SVD both ways, or in random subspaces.

    python benchmarks/svd_cost.py [--clients 4] [--examples 500] [--turns 7]

Clients train the CNNs of configs/cifar_fed_kd.py for an epoch, on random images. The three programs take
turns in one process. SVD's share is the additional time of a round compared with one without SVD. Then
matrices as large as BERT-base's, whose singular values fall fast or not at all, are decomposed exactly
and in random subspaces. The record is written to results/benchmarks/.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import records

KIND = RECORD = "svd_cost"
WHOLE = "students as they are"
EXACT, SUBSPACE = "exact SVD", "SVD in 32 dimensions"
# Kind -> (run of the config, changes of its compression).
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    WHOLE: ("fed_kd,whole", {}),
    EXACT: ("fed_kd", {"spectra": False, "gradient_spectra": False}),
    SUBSPACE: ("fed_kd", {"spectra": False, "gradient_spectra": False, "range_finder": 32}),
}
MOST_ROUNDS = 1000  # over which thresholds rise; more than are measured
# Of BERT-base's layers, as [inputs, outputs]; how many of each a layer has.
MATRICES = {(768, 768): 4, (768, 3072): 1, (3072, 768): 1}
FALLING, EQUAL = "falling as 1/k", "equal"
SPECTRA: dict[str, float] = {FALLING: -1.0, EQUAL: 0.0}  # power of the singular value's index
COLUMNS = 128  # of the random subspace of such a matrix
EXACTLY, WITHIN = "exact", "in a subspace"


class Round(NamedTuple):
    """The time of a round in each turn, and its bytes.

    Attributes:
      seconds: one per turn.
      bytes_up: mean over the clients of the last turn's round.
    """

    seconds: tuple[float, ...]
    bytes_up: float


class Decomposition(NamedTuple):
    """The time of one matrix in each turn, and the number of singular values kept.

    Attributes:
      shape: rows and columns.
      of_a_layer: how many such matrices a layer has.
      spectrum: of SPECTRA.
      kind: EXACTLY or WITHIN.
      seconds: one per turn.
      rank: None if the factors would have more entries than the matrix, which is then sent whole.
    """

    shape: tuple[int, int]
    of_a_layer: int
    spectrum: str
    kind: str
    seconds: tuple[float, ...]
    rank: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=500, help="of each client")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    options = parser.parse_args(arguments)
    for name in ("clients", "examples", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    device = machine.device()
    rounds = measure(options.clients, options.examples, options.turns)
    print(table(rounds))
    matrices = decompose(MATRICES, COLUMNS, options.turns)
    print(table_of_matrices(matrices))
    record: dict[str, Any] = {
        **records.common(RECORD, KIND, machine.accelerator() or device),
        "clients": options.clients,
        "examples": options.examples,
        "rounds": {kind: own._asdict() for kind, own in rounds.items()},
        "columns": COLUMNS,
        "matrices": [own._asdict() for own in matrices],
    }
    records.write(record, options.results)
    return 0


def measure(clients: int, examples: int, turns: int) -> dict[str, Round]:
    """Rounds with each kind of links, which take turns after one round each that compiles."""
    rounds = {name: prepare(name, clients, examples) for name in KINDS}
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    sent = {name: once() for name, once in rounds.items()}
    for _ in range(turns):
        for name, once in rounds.items():
            started = time.perf_counter()
            sent[name] = once()
            seconds[name].append(time.perf_counter() - started)
    return {name: Round(tuple(seconds[name]), sent[name]) for name in rounds}


def prepare(kind: str, clients: int, examples: int) -> Callable[[], float]:
    """Returns a function that trains one more round and returns the bytes that a client sent."""
    import jax
    import numpy as np

    from experiments.configs import cifar_fed_kd
    from fedcodist.config.data import Data
    from fedcodist.config.experiment import build_experiment
    from fedcodist.config.normalisation import CIFAR_DEVIATION, CIFAR_MEAN
    from fedcodist.core.client_states import device_client_states
    from fedcodist.data import augmentation
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.run.placement import all_devices, replicate
    from fedcodist.run.programs import build_programs

    run, more = KINDS[kind]
    config = cifar_fed_kd.get_config(run)
    config.rounds, config.pools.main.cohort_size = MOST_ROUNDS, clients
    if more:
        config.training.compression.update(more)
    draws = np.random.default_rng(0)
    columns = {
        "image": draws.integers(0, 256, (clients * examples, 24, 24, 3), dtype=np.uint8),
        "label": draws.integers(0, 10, clients * examples, dtype=np.int32),
    }
    columns["label"][0] = 9  # all classes are there
    federated = FederatedData.from_arrays(columns, offsets=examples * np.arange(clients + 1))
    read = augmentation.image_preprocess(augmentation.normalise(CIFAR_MEAN, CIFAR_DEVIATION))
    splits = {"train": federated, "validation": federated, "test": federated}
    data = Data(splits, columns["image"][:1], read, read)
    experiment = build_experiment(config, data)
    mesh, algorithm = all_devices(), experiment.algorithm
    programs = build_programs(algorithm, 1, mesh)
    seeds = replicate(np.zeros(1, np.uint32), mesh)
    hyper = replicate(jax.tree.map(np.float32, algorithm.hyper), mesh)
    own = replicate(experiment.data, mesh)
    state = [
        programs.init(seeds),
        replicate(device_client_states(algorithm.client_states, 1), mesh),
    ]

    def once() -> float:
        nonlocal state
        *state, history = programs.train(*state, seeds, np.int32(0), np.int32(1), hyper, own)
        jax.block_until_ready(state)
        sent = history.get("main/client_bytes_up")
        return algorithm.communication["main"].up if sent is None else float(sent[0, 0])

    return once


def decompose(
    numbers: Mapping[tuple[int, int], int], columns: int, turns: int
) -> list[Decomposition]:
    """Times both kinds in turn on the same matrices, after compiling; 95 % of the energy is kept.

    Args:
      numbers: shape -> how many such matrices a layer has.
      columns: of the random subspace.
      turns: how often each is decomposed.
    """
    import jax
    import numpy as np

    from fedcodist.compression.svd import WHOLE as AS_IT_IS
    from fedcodist.compression.svd import RangeFinder, svd

    compressors = {EXACTLY: svd(0.95, 0.95), WITHIN: svd(0.95, 0.95, RangeFinder(columns))}
    programs = {
        kind: jax.jit(lambda tree, key, of=of: of.compress(tree, of.init(tree), key, 1.0)[0])
        for kind, of in compressors.items()
    }
    key, draws = jax.random.key(0), np.random.default_rng(0)
    found = []
    for (shape, number), (spectrum, power) in itertools.product(numbers.items(), SPECTRA.items()):
        full = min(shape)
        sides = [np.linalg.qr(draws.normal(size=(size, full)))[0] for size in shape]
        values = np.arange(1, full + 1, dtype=np.float64) ** power
        matrix = np.asarray((sides[0] * values) @ sides[1].T, np.float32)
        ranks = {kind: int(once([matrix], key)[0].rank) for kind, once in programs.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in programs}
        for _ in range(turns):
            for kind, once in programs.items():
                started = time.perf_counter()
                jax.block_until_ready(once([matrix], key))
                seconds[kind].append(time.perf_counter() - started)
        for kind, kept in ranks.items():
            rank = None if kept == AS_IT_IS else kept
            own = Decomposition(shape, number, spectrum, kind, tuple(seconds[kind]), rank)
            found.append(own)
    return found


def of_a_layer(matrices: Sequence[Decomposition], spectrum: str, kind: str) -> float:
    """Seconds for all matrices of a layer, by the medians."""
    return sum(
        own.of_a_layer * statistics.median(own.seconds)
        for own in matrices
        if (own.spectrum, own.kind) == (spectrum, kind)
    )


def shares(rounds: Mapping[str, Round], kind: str) -> list[float]:
    """The share of a round's time by which it is longer than a round without SVD, turn by turn."""
    pairs = zip(rounds[WHOLE].seconds, rounds[kind].seconds, strict=True)
    return [1 - without / own for without, own in pairs]


def share(rounds: Mapping[str, Round], kind: str) -> float:
    """The median of `shares`."""
    return statistics.median(shares(rounds, kind))


def table(rounds: Mapping[str, Round]) -> str:
    """The figures of rounds, as text."""
    lines = [f"{'':<24}{'ms/round':>10}{'of it SVD':>12}{'KB up':>10}"]
    for kind, own in rounds.items():
        lines.append(
            f"{kind:<24}{1000 * statistics.median(own.seconds):10.1f}"
            f"{100 * share(rounds, kind):10.1f} %{own.bytes_up / 1000:10.1f}"
        )
    return "\n".join(lines)


def table_of_matrices(matrices: Sequence[Decomposition]) -> str:
    """The figures of single matrices, as text."""
    lines = [f"{'matrix':<12}{'singular values':<18}{'SVD':<16}{'ms':>10}{'rank':>8}"]
    for own in matrices:
        lines.append(
            f"{own.shape[0]:>4} x {own.shape[1]:<5}{own.spectrum:<18}{own.kind:<16}"
            f"{1000 * statistics.median(own.seconds):10.1f}{own.rank or 'whole':>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
