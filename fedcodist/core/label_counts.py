"""How many examples of each label a client has."""

import jax
import jax.numpy as jnp

from fedcodist.core import batches
from fedcodist.core.batches import Preprocess
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels

LABELS_PER_STEP = 500


def label_counts(data: ClientData, classes: int, preprocess: Preprocess) -> jax.Array:
    """The number of a client's examples of each label, float [classes].

    Args:
      data: the client's examples.
      classes: labels.
      preprocess: that of training, which may change labels; it gets one fixed key.
    """
    labels = batches.on_examples(
        lambda batch: class_labels(batch["label"], classes), data, preprocess, LABELS_PER_STEP
    )
    is_real = jnp.arange(data.capacity) < data.size
    return jnp.sum(jax.nn.one_hot(labels, classes) * is_real[:, None], axis=0)
