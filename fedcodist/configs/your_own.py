r"""A file to copy with your own data, network, method, metrics, schedule and logger. No download.

    fedcodist run your_own.py --workdir runs/your_own

Every name in a config may be `module:function`, of an installed package or of a module beside the config
file, such as this file itself. Comments below name the modules of `fedcodist.config` that describe the
arguments and results of such functions. docs/your_own.md explains the parts one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import fedcodist as fc
from fedcodist.config import defaults
from fedcodist.core.inputs import ClientData
from fedcodist.core.model import Batch
from fedcodist.data.partition import dirichlet

CLASSES, SIZE, MEAN, DEVIATION = 10, 8, 128.0, 40.0
HERE = Path(__file__).stem  # the name by which this file can be imported


# Data: `fedcodist.config.referenced_data`.


def load(num_clients: int, concentration: float, seed: int) -> dict[str, Any]:
    """Noisy copies of one image per class, for clients with unequal shares of labels and for tests."""
    draw = np.random.default_rng(seed)
    of_class = draw.uniform(0, 255, (CLASSES, SIZE, SIZE, 1))

    def examples(count: int) -> dict[str, np.ndarray]:
        label = draw.integers(0, CLASSES, count)
        image = of_class[label] + draw.normal(0, 80, (count, SIZE, SIZE, 1))
        return {"image": np.clip(image, 0, 255).astype(np.uint8), "label": label.astype(np.int32)}

    train = examples(1200)
    of_clients = dirichlet(train["label"], num_clients, concentration, seed)
    return {
        "train": fc.FederatedData.from_arrays(train, partition=of_clients),
        "held_out": examples(400),
        "test": examples(400),
    }


def normalise(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
    """Pixels as networks read them; on the device, in every batch."""
    return {**batch, "image": (batch["image"].astype(jnp.float32) - MEAN) / DEVIATION}


def brightened(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
    """`normalise` for training, which also makes every image a little brighter or darker each time."""
    batch = normalise(batch, key, positions)
    # Of every example's place in the whole batch, so that devices which share a batch draw differently.
    draw = lambda position: jax.random.normal(jax.random.fold_in(key, position), (1, 1, 1))
    return {**batch, "image": batch["image"] + 0.1 * jax.vmap(draw)(positions)}


# The network: `fedcodist.config.referenced_networks`.


class Network(nnx.Module):
    """A convolution with batch normalisation, and dropout before the logits.

    `mask` [batch] is 0 for padding of a batch, which must not count in its statistics.
    """

    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(8 * (SIZE // 2) ** 2, num_classes, rngs=rngs)

    def __call__(self, image: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        mask = None if mask is None else mask[:, None, None, None] > 0
        hidden = nnx.relu(self.norm(self.convolution(image), mask=mask))
        hidden = nnx.avg_pool(hidden, (2, 2), (2, 2)).reshape(len(image), -1)
        return self.logits(self.dropout(hidden))


# The method: `fedcodist.config.registry`.


def clipped_fed_avg(
    model: fc.Model,
    training: fc.LocalTraining,
    limit: float,
    hyper: fc.FedAvgHyper = fc.FedAvgHyper(),
) -> fc.FederatedMethod:
    """FedAvg whose clients' updates have at most the norm `limit`."""
    base = fc.fed_avg(model, training, hyper=hyper)

    def client_update(
        message: Any, client_state: Any, data: ClientData, key: jax.Array, hyper: Any
    ) -> fc.ClientResult:
        result = base.client_update(message, client_state, data, key, hyper)
        squares = (jnp.sum(leaf**2) for leaf in jax.tree.leaves(result.update))
        factor = jnp.minimum(1, limit / (jnp.sqrt(sum(squares)) + 1e-12))
        return result._replace(update=jax.tree.map(lambda leaf: leaf * factor, result.update))

    return base._replace(client_update=client_update)


# Metrics: `fedcodist.config.metrics`.


def top_3(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Share of examples whose label is among the three largest logits: values, and their weights."""
    _, largest = jax.lax.top_k(outputs, 3)
    hit = jnp.any(largest == batch["label"][:, None], axis=-1).astype(jnp.float32)
    return hit, jnp.ones_like(hit)


def _counts(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    predicted = jax.nn.one_hot(outputs.argmax(-1), CLASSES, dtype=jnp.int32)
    actual = jax.nn.one_hot(batch["label"], CLASSES, dtype=jnp.int32)
    return predicted * actual, predicted + actual


def _mean_over_classes(sums: tuple[jax.Array, jax.Array]) -> jax.Array:
    hits, counted = sums
    scores = 2 * hits / jnp.maximum(counted, 1)
    return jnp.sum(scores) / jnp.sum(counted > 0)


macro_f1 = fc.SummedMetric(_counts, _mean_over_classes)


# The logger: `fedcodist.config.loggers` and `fedcodist.run.callbacks`.


class Logger:
    """Writes the accuracy of every evaluation, and the norm of the model's parameters, to a file."""

    def __init__(self, workdir: Path):
        self.path = workdir / "my_log.txt"

    def start(self, config: Mapping[str, Any]) -> None:
        """Called whenever the run is started."""
        self._write(f"start of {config['name']}")

    def __call__(
        self, records: Sequence[Mapping[str, Any]], models: Callable[[], Mapping[str, fc.Variables]]
    ) -> None:
        params = jax.tree.leaves(models()["main"].params)  # [seeds, ...]
        length = np.sqrt(sum(np.sum(leaf[0] ** 2) for leaf in params))
        for record in records:
            if "macro_f1" in record:
                self._write(
                    f"round {record['round']}, {record['split']}: accuracy {record['accuracy']}, "
                    f"length {length:.2f}"
                )

    def _write(self, line: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def get_config() -> ConfigDict:
    """Returns the experiment."""
    config = defaults.experiment("your_own", 20)
    config.data = dict(
        name=f"{HERE}:load",
        preprocess=f"{HERE}:brightened",
        evaluation_preprocess=f"{HERE}:normalise",
        num_clients=30,  # these three are `load`'s
        concentration=0.3,
        seed=0,
    )
    config.training = defaults.training(
        method=f"{HERE}:clipped_fed_avg", clipped_fed_avg=dict(limit=2.0), epochs=2
    )
    config.pools = defaults.one_pool(f"{HERE}:Network", 8, 0.1)
    config.nested_pools = True
    config.algorithm = dict(name="fed_avg")  # or a server's method of your own
    config.metrics = dict(top_3=f"{HERE}:top_3", macro_f1=f"{HERE}:macro_f1")
    config.schedules = dict(client_learning_rate=dict(name="exponential_decay", factor=0.98))
    config.callbacks = dict(
        stop_early=dict(split="held_out", metric="macro_f1", patience=6, min_delta=0.0),
        keep_best=dict(split="held_out", metric="macro_f1"),
    )
    config.loggers = ("csv", f"{HERE}:Logger")  # or "tensorboard", "wandb", "mlflow"
    config.evaluation = defaults.evaluation(1, 5)
    config.execution = defaults.execution(processes=1)
    return config
