"""FedJAX's federated averaging; several processes are devices of its pmap backend.

One process runs FedJAX's jit backend. `--processes n` makes n virtual CPU devices in this process
and runs its pmap backend, which deals clients to devices.
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from peers import measuring
from peers import workload as work


def main() -> int:
    """Runs the benchmark."""
    arguments = measuring.parse_arguments(__doc__)
    measuring.limit_cores(arguments.processes * arguments.threads)
    devices = f"--xla_force_host_platform_device_count={arguments.processes}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    measure(arguments)
    return 0


def measure(arguments) -> None:
    """Trains and reports; FedJAX is imported only here, after the number of devices is set."""
    import fedjax
    import jax
    import numpy as np

    fedjax.set_for_each_client_backend("pmap" if arguments.processes > 1 else "jit")
    inputs = work.read_inputs(arguments.inputs, arguments.workload)
    # Devices must have batches of one shape; the jit backend compiles for each and wastes nothing.
    padded = arguments.processes > 1 and bool(np.any(np.diff(inputs.offsets) % work.BATCH))
    first, second = work.SERVER_BETAS
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(make_model(inputs.pool.network)),
        fedjax.optimizers.sgd(work.CLIENT_LEARNING_RATE),
        fedjax.optimizers.adam(
            work.SERVER_LEARNING_RATE, b1=first, b2=second, eps=work.SERVER_EPSILON
        ),
        fedjax.ShuffleRepeatBatchHParams(work.BATCH),
    )
    datasets = [client_dataset(inputs, i, padded) for i in range(len(inputs.offsets) - 1)]
    keys = list(jax.random.split(jax.random.PRNGKey(0), work.WORKLOADS[inputs.workload].cohort))
    cohorts = measuring.cohorts(inputs, arguments)
    state = algorithm.init(own_weights(inputs))

    def train(rounds):
        nonlocal state
        for _ in range(rounds):
            clients = [
                (int(client), datasets[client], key)
                for client, key in zip(next(cohorts), keys, strict=True)
            ]
            state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    def save():
        weights = common_weights(inputs.pool.network, state.params)
        measuring.save_weights({work.POOL: weights}, arguments)

    times = measuring.run(train, save, arguments, time.perf_counter)
    name = f"{version('fedjax')}, jax {version('jax')}"
    measuring.report("fedjax", name, arguments, times, measuring.peak_memory_mb())


def make_model(network: work.Network):
    """A workload's network in Haiku, as FedJAX's own models are written."""
    import fedjax
    import haiku as hk
    import jax
    import numpy as np

    def forward(batch):
        x = batch["x"]
        for index, (features, pooled) in enumerate(network.convolutions):
            layer = hk.Conv2D(features, 3, padding=network.padding, name=f"conv{index + 1}")
            x = jax.nn.relu(layer(x))
            if pooled:
                x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = hk.Flatten()(x)
        *hidden, output = work.dense_layers(network)
        for name, features in zip(hidden, network.hidden, strict=True):
            x = jax.nn.relu(hk.Linear(features, name=name)(x))
        return hk.Linear(network.classes, name=output)(x)

    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(forward),
        sample_batch={"x": np.zeros((1, *network.image), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, outputs: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], outputs
        ),
        eval_metrics={},
    )


def client_dataset(inputs: work.Inputs, client: int, padded: bool):
    """A client's examples, which FedJAX's algorithm gets in order, each once."""
    import fedjax

    rows = inputs.rows_of(client)
    dataset = fedjax.ClientDataset({"x": inputs.images[rows], "y": inputs.labels[rows]})

    class InOrder:
        # The stock batches fill the last one up with examples from the front.
        def __len__(self):
            return len(dataset)

        def shuffle_repeat_batch(self, hparams):
            batch = dataset.padded_batch if padded else dataset.batch
            return batch(batch_size=hparams.batch_size)

    return InOrder()


def own_weights(inputs: work.Inputs):
    """The file's initial weights as Haiku's parameters."""
    import jax.numpy as jnp

    params = {}
    for name, value in inputs.pool.weights.items():
        layer, leaf = name.split("/")
        params.setdefault(layer, {})[{"kernel": "w", "bias": "b"}[leaf]] = jnp.asarray(value)
    return params


def common_weights(network: work.Network, params):
    """Haiku's parameters in the common layout."""
    import numpy as np

    weights = {}
    for name in work.weight_shapes(network):
        layer, leaf = name.split("/")
        weights[name] = np.asarray(params[layer][{"kernel": "w", "bias": "b"}[leaf]])
    return weights


if __name__ == "__main__":
    sys.exit(main())
