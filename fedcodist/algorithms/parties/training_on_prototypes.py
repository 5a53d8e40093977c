"""A server that trains on parties' prototypes: the examples of FedGH's head and of FedTGP's network."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedcodist.algorithms.parties.prototypes import Prototypes
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, check_training
from fedcodist.core.optimizer_factories import OptimizerFactory


class ServerTraining(NamedTuple):
    """How a server trains on prototypes: learning rate -> optimizer, prototypes per step, passes."""

    optimizer: OptimizerFactory = optax.sgd
    batch_size: int = 1
    epochs: int = 1


def on_prototypes(training: ServerTraining) -> LocalTraining:
    """The server's training as LocalTraining of a client whose examples are prototypes."""
    return LocalTraining(training.optimizer, training.batch_size, training.epochs)


def as_examples(prototypes: Prototypes) -> ClientData:
    """Parties' prototypes [parties, classes, ...] in the form of one client's examples, for a server.

    Columns are `embedding` and `label`. Existing prototypes come first, in the order of parties and
    classes; only they count as examples.
    """
    parties, classes, width = prototypes.vectors.shape
    has_class = prototypes.has_class.reshape(-1) > 0
    order = jnp.argsort(~has_class, stable=True)
    columns = {
        "embedding": prototypes.vectors.reshape(-1, width)[order],
        "label": jnp.tile(jnp.arange(classes), parties)[order],
    }
    size = jnp.sum(has_class, dtype=jnp.int32)
    return ClientData(columns, jnp.int32(0), size, size, parties * classes, ragged=False)


def check_server_training(training: ServerTraining) -> None:
    """Raises ValueError or TypeError that names the field of `server_training`."""
    check_training("server_training", on_prototypes(training))
