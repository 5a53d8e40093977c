"""Sums of a model's outputs per label on a party's own examples: what FD and FedProto send.

Shared by FD, whose outputs are logits, and by the methods of `prototypes`, whose outputs are embeddings.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import batches
from fedcodist.core.batches import Preprocess
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.model import Batch, Model, Variables

LEAST_STEPS = 8  # in which the party with the most examples computes its outputs


def label_sums(
    model: Model,
    variables: Variables,
    data: ClientData,
    num_classes: int,
    preprocess: Preprocess,
    batch_size: int,
    read_outputs: Callable[[Any], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Sums of outputs per label [classes, ...], and numbers of examples per label [classes].

    Args:
      model, variables: the party's model, in evaluation mode.
      data: the party's examples.
      num_classes: labels.
      preprocess: that of training, which makes inputs and labels; it gets one fixed key.
      batch_size: examples per step, at most.
      read_outputs: outputs -> array [batch, width].
    """
    # A step is always full. With large steps, a party with few examples would compute as many outputs
    # as the party with the most.
    size = min(batch_size, -(-data.capacity // LEAST_STEPS))

    def answer(batch: Batch) -> tuple[jax.Array, jax.Array]:
        return read_outputs(model.apply(variables, batch)[0]), class_labels(
            batch["label"], num_classes
        )

    outputs, labels = batches.on_examples(answer, data, preprocess, size)
    is_real = jnp.arange(data.capacity) < data.size
    # Rows beyond the party's are another's, and 0 times one that overflows is NaN.
    outputs = jnp.where(is_real[:, None], outputs, 0)
    is_of_label = jax.nn.one_hot(labels, num_classes) * is_real[:, None]
    # Sums over examples, which an accelerator's default precision would round.
    sums = jnp.matmul(is_of_label.T, outputs, precision="highest")
    return sums, jnp.sum(is_of_label, axis=0)
