"""The work of benchmarks/peers/ done by fedcodist, with the same arguments and the same report.

    python benchmarks/ours.py --workload cnn_small --inputs build/benchmarks/cnn_small.npz \
        --processes 2

A client's examples are visited in an order drawn from the seed. So that the first round visits them
in the order of the file, as the peers do, they are stored where that round's order finds them; the
drawing itself stays in the measured time. Cohorts and initial weights are the file's.
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from peers import measuring
from peers import workload as work

from fedcodist import launch

POOL, SEED = "clients", 0


def main() -> int:
    """Starts the processes, or measures in one of them."""
    arguments = measuring.parse_arguments(__doc__)
    if not launch.is_child():
        measuring.limit_cores(arguments.processes * arguments.threads)
        return launch.supervise([sys.executable, *sys.argv], arguments.processes)
    launch.join()
    measure(arguments)
    return 0


def measure(arguments) -> None:
    """Runs the benchmark and reports from the first process."""
    import jax
    import numpy as np

    from fedcodist import simulation
    from fedcodist.sources import resident_data

    inputs = work.read_inputs(arguments.inputs, arguments.workload)
    mesh = simulation.all_devices()
    federated = make_data(inputs)
    algorithm = make_algorithm(inputs, federated)
    programs = simulation.build_programs(algorithm, arguments.rounds_per_repetition, mesh)
    data = simulation.replicate(resident_data(federated), mesh)
    hyper = simulation.replicate(jax.tree.map(np.float32, algorithm.hyper), mesh)
    seeds = simulation.replicate(np.full(1, SEED, np.uint32), mesh)
    state = programs.init(seeds), {POOL: None}

    def train(rounds):
        # Always from round 0: every repetition trains on the same cohorts.
        nonlocal state
        arguments_of_rounds = (seeds, np.int32(0), np.int32(rounds), hyper, data)
        state = jax.block_until_ready(programs.train(*state, *arguments_of_rounds)[:2])

    def save():
        if jax.process_index() == 0:
            params = state[0][POOL].params
            measuring.save_weights(common_weights(inputs.network, params), arguments)

    times = measuring.run(train, save, arguments, time.perf_counter)
    if jax.process_index() == 0:
        memory = measuring.peak_memory_mb(os.getppid())
        measuring.report("fedcodist", version("fedcodist"), arguments, times, memory)


def make_data(inputs: work.Inputs):
    """The clients' examples, stored so that round 0 visits them in the order of the file."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedcodist import keys
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.federated_algorithm import client_key
    from fedcodist.shuffling import permuted_positions

    sizes = np.diff(inputs.offsets)
    positions = jnp.arange(sizes.max())

    @jax.jit
    def order_of(client, size):
        key = keys.derive(client_key(jax.random.key(SEED), 0, POOL), client, "order")
        return permuted_positions(key, positions, size)

    images, labels = inputs.images.copy(), inputs.labels.copy()
    for client in inputs.cohorts[0]:
        rows, size = inputs.rows_of(client), sizes[client]
        order = rows.start + np.asarray(order_of(client, size))[:size]
        images[order], labels[order] = inputs.images[rows], inputs.labels[rows]
    columns = {"image": images, "label": labels}
    return FederatedData.from_arrays(columns, offsets=inputs.offsets)


def make_algorithm(inputs: work.Inputs, federated):
    """Federated averaging from the file's weights on the file's cohorts."""
    import functools

    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.fed_avg import FedAvgHyper, fed_avg
    from fedcodist.algorithms.pools import Pool, independent_pools
    from fedcodist.client_training import LocalTraining
    from fedcodist.cohort import Selection
    from fedcodist.model import Variables, from_flax_linen

    model = from_flax_linen(make_network(inputs.workload), jnp.zeros((1, *inputs.network.image)))
    model = model._replace(init=lambda key: Variables(own_weights(inputs), {}))
    first, second = work.SERVER_BETAS
    method = fed_avg(
        model,
        LocalTraining(optax.sgd, work.BATCH, epochs=1),
        functools.partial(optax.adam, b1=first, b2=second, eps=work.SERVER_EPSILON),
        hyper=FedAvgHyper(work.CLIENT_LEARNING_RATE, work.SERVER_LEARNING_RATE),
    )
    pool = Pool(method, np.arange(federated.num_clients), work.COHORT)
    cohorts = jnp.asarray(inputs.cohorts)
    return independent_pools({POOL: pool}, federated.columns)._replace(
        select=lambda round, key: Selection({POOL: cohorts[round % len(cohorts)]}, {})
    )


def make_network(workload: str):
    """The library's network of a workload."""
    from fedcodist.models import cnn, digits, emnist

    networks = {
        "cnn_small": cnn.small_cnn,
        "cnn_large": cnn.large_cnn,
        "digits": lambda: digits.MLP(hidden=(64,)),
        "emnist": lambda: emnist.emnist_cnn(dropout=(0.0, 0.0)),
    }
    return networks[workload]()


def own_weights(inputs: work.Inputs):
    """The file's initial weights as this library's parameters."""
    params = {}
    for name, value in inputs.weights.items():
        layer, leaf = name.split("/")
        params.setdefault(_own_name(inputs.network, layer), {})[leaf] = value
    return params


def common_weights(network: work.Network, params):
    """Trained parameters, which have a leading axis of one seed, in the common layout."""
    import numpy as np

    weights = {}
    for name in work.weight_shapes(network):
        layer, leaf = name.split("/")
        value = params[_own_name(network, layer)][leaf]
        weights[name] = np.asarray(value.addressable_data(0))[0]
    return weights


def _own_name(network: work.Network, layer: str) -> str:
    # The library's networks without convolutions leave it to Flax to name their layers.
    return layer if network.convolutions else f"Dense_{work.dense_layers(network).index(layer)}"


if __name__ == "__main__":
    sys.exit(main())
