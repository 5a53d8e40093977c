"""How many examples of each label a client has."""

import jax
import jax.numpy as jnp

from fedcodist.core import batches
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels


def label_counts(data: ClientData, classes: int) -> jax.Array:
    """The number of a client's examples of each label as they are stored, float [classes]."""
    _, rows, is_real = batches.places(0, data.capacity, data.size)
    labels = class_labels(data.columns["label"][data.start + rows], classes)
    return jnp.sum(jax.nn.one_hot(labels, classes) * is_real[:, None], axis=0)
