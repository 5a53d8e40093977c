"""Labelled validation data on which a method evaluates models within a round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import batches
from fedcodist.core.checks import check_integer
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.inputs import Examples
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.metrics import predicted_label
from fedcodist.core.model import Model, Variables

VALIDATION = "validation"


class ValidationData(NamedTuple):
    """Labelled examples on which a method evaluates models within a round.

    Attributes:
      num_examples: of the data set `validation`, which has labels.
      batch_size: examples per step.
      preprocess: (batch, key, positions) -> batch for evaluation.
    """

    num_examples: int
    batch_size: int = 500
    preprocess: Callable[..., Any] = lambda batch, key, positions: batch


def check_validation_data(name: str, data: ValidationData) -> None:
    """Raises ValueError or TypeError that names what is not allowed in `data`."""
    if not isinstance(data, ValidationData):
        raise TypeError(f"{name} must be a ValidationData, got {data!r}.")
    check_integer(f"{name}.num_examples", data.num_examples, low=1)
    check_integer(f"{name}.batch_size", data.batch_size, low=1)


def validation_indices(data: ValidationData) -> jax.Array:
    """Indices of all examples, int32 [steps, batch]; the last example fills up the last batch."""
    size = min(data.batch_size, data.num_examples)
    steps = -(-data.num_examples // size)
    indices = jnp.arange(steps * size, dtype=jnp.int32).reshape(steps, size)
    return jnp.minimum(indices, data.num_examples - 1)


def validation_accuracy(
    model: Model,
    variables: Variables,
    examples: Examples,
    data: ValidationData,
    axis_name: str | None = None,
) -> jax.Array:
    """Share of validation examples that the model labels correctly; 0 if all logits are NaN."""
    steps, size = examples.indices.shape
    devices, device = this_device(axis_name)
    labels_of = lambda batch: class_labels(batch["label"], max(model.num_classes, 2))

    def add(index: jax.Array, correct: jax.Array) -> jax.Array:
        step = index * devices + device
        places = batches.places(step, size, data.num_examples)
        indices = examples.indices[jnp.minimum(step, steps - 1)]
        batch = batches.read(
            examples.columns, indices, data.preprocess, jax.random.key(0), places.positions
        )
        logits = logits_of(model.apply(variables, batch)[0])
        # A model that has diverged predicts nothing, and not the first class.
        is_known = ~jnp.isnan(logits.reshape(size, -1)).any(axis=1)
        is_correct = is_known & (predicted_label(logits) == labels_of(batch)) & places.is_real
        return correct + jnp.sum(is_correct, dtype=jnp.int32)

    correct = jax.lax.fori_loop(0, -(-steps // devices), add, jnp.zeros((), jnp.int32))
    return sum_over_devices(correct, axis_name) / data.num_examples
