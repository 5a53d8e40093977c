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

    jax.config.update("jax_enable_x64", arguments.double)
    fedjax.set_for_each_client_backend("pmap" if arguments.processes > 1 else "jit")
    inputs = work.read_inputs(arguments.inputs, arguments.workload, arguments.double)
    # Devices must have batches of one shape. The jit backend compiles for each shape, without padding.
    # For the LSTM, which is unrolled, this would take minutes, to save the padding of one batch in 20.
    one_shape = arguments.processes > 1 or isinstance(inputs.pool.network, work.LanguageNetwork)
    padded = one_shape and bool(np.any(np.diff(inputs.offsets) % work.BATCH))
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
    shapes = jax.eval_shape(lambda: state)

    def train(rounds):
        nonlocal state
        for _ in range(rounds):
            clients = [
                (int(client), datasets[client], key)
                for client, key in zip(next(cohorts), keys, strict=True)
            ]
            state, _ = algorithm.apply(state, clients)
            # With this version of JAX an axis of devices remains, which Haiku refuses in the next round.
            state = jax.tree.map(lambda x, own: x.reshape(own.shape), state, shapes)
        jax.block_until_ready(state.params)

    def save():
        weights = common_weights(inputs.pool.network, state.params)
        measuring.save_weights({work.POOL: weights}, arguments)

    times = measuring.run(train, save, arguments, time.perf_counter)
    name = f"{version('fedjax')}, jax {version('jax')}"
    measuring.report("fedjax", name, arguments, times, measuring.peak_memory_mb())


def make_model(network: work.Network | work.LanguageNetwork):
    """FedJAX's own model of text; for images a workload's network, written like FedJAX's models."""
    import fedjax
    import haiku as hk
    import jax
    import numpy as np

    if isinstance(network, work.LanguageNetwork):
        jax.numpy.NINF = -np.inf  # this model uses it, and JAX no longer has it
        return fedjax.models.stackoverflow.create_lstm_model(
            network.vocabulary - 4,
            network.embedding,
            network.hidden,
            network.layers,
            expected_length=work.EXPECTED_LENGTH,
        )

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
    """A client's examples, which FedJAX's algorithm visits in order, each once."""
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
        layer, leaf = _own_name(inputs.pool.network, name)
        own = params.setdefault(layer, {})
        # Haiku joins an LSTM's two kernels; in the common layout the kernel of inputs comes first.
        own[leaf] = jnp.concatenate([own[leaf], value]) if leaf in own else jnp.asarray(value)
    return params


def common_weights(network: work.Network | work.LanguageNetwork, params):
    """Haiku's parameters in the common layout."""
    import numpy as np

    weights = {}
    for name, shape in work.weight_shapes(network).items():
        layer, leaf = _own_name(network, name)
        value = np.asarray(params[layer][leaf])
        if name.endswith("hidden_kernel"):
            value = value[-shape[0] :]
        weights[name] = value[: shape[0]]
    return weights


def _own_name(network: work.Network | work.LanguageNetwork, name: str) -> tuple[str, str]:
    """Haiku's names of a layer and a leaf."""
    layer, leaf = name.split("/")
    leaf = {"vectors": "embeddings", "bias": "b"}.get(leaf, "w")
    if isinstance(network, work.LanguageNetwork):
        # FedJAX does not name its layers, so Haiku numbers the layers of each kind.
        numbered = lambda kind, index: f"{kind}_{index}" if index else kind
        names = {"embedding": "embed", "output": numbered("linear", network.layers)}
        for index in range(network.layers):
            names[f"lstm{index + 1}"] = f"{numbered('lstm', index)}/linear"
            names[f"projection{index + 1}"] = numbered("linear", index)
        layer = names[layer]
    return layer, leaf


if __name__ == "__main__":
    sys.exit(main())
