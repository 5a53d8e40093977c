"""The server's labelled validation data, for methods that look at it within a round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.aggregation import sum_over_devices, this_device
from fedcodist.cohort import Examples
from fedcodist.distillation import Distillation
from fedcodist.model import Model, Variables
from fedcodist.models.layered import logits_of

VALIDATION = "validation"


class Validated(NamedTuple):
    """How a distillation uses validation data.

    Attributes:
      num_examples: rows of the data set `validation`, with labels.
      every: distillation steps between two looks at it.
      patience: steps without a new best after which distillation stops; the best is returned.
      or_start: whether the averaged model itself may be the best.
      drop_worst: leave out teachers that `ensembles.without_worst` drops, and of the average that
        students start from clients who guess, where there are others.
      batch_size: examples per step of an evaluation.
      preprocess: (batch, key, positions) -> batch for evaluation.
    """

    num_examples: int
    every: int = 100
    patience: int = 1000
    or_start: bool = False
    drop_worst: bool = False
    batch_size: int = 500
    preprocess: Callable[..., Any] = lambda batch, key, positions: batch


def check_validation(validated: Validated, distillation: Distillation) -> None:
    """Raises one line for a setting of validation that makes no sense."""
    for name in ("num_examples", "every", "patience", "batch_size"):
        if getattr(validated, name) < 1:
            raise ValueError(
                f"validated.{name} must be at least 1, got {getattr(validated, name)}: this method "
                "needs labelled validation data."
                if name == "num_examples"
                else f"validated.{name} must be at least 1, got {getattr(validated, name)}."
            )
    if distillation.steps % validated.every:
        raise ValueError(
            f"validated.every must divide distillation.steps={distillation.steps}, "
            f"got {validated.every}."
        )


def validation_rows(validated: Validated) -> jax.Array:
    """All rows in batches, int32 [steps, batch]; the last row again fills up the last batch."""
    size = min(validated.batch_size, validated.num_examples)
    steps = -(-validated.num_examples // size)
    rows = jnp.arange(steps * size, dtype=jnp.int32).reshape(steps, size)
    return jnp.minimum(rows, validated.num_examples - 1)


def validation_accuracy(
    model: Model,
    variables: Variables,
    examples: Examples,
    validated: Validated,
    axis_name: str | None = None,
) -> jax.Array:
    """Share of validation examples that the model labels rightly, a scalar."""
    steps, size = examples.indices.shape
    devices, device = this_device(axis_name)

    def add(index, correct):
        step = index * devices + device
        positions = step * size + jnp.arange(size)
        mask = positions < validated.num_examples
        at = examples.indices[jnp.minimum(step, steps - 1)]
        batch = {name: column[at] for name, column in examples.columns.items()}
        batch = validated.preprocess(batch, jax.random.key(0), positions)
        predicted = jnp.argmax(logits_of(model.apply(variables, batch)[0]), axis=-1)
        return correct + jnp.sum((predicted == batch["label"]) & mask)

    correct = jax.lax.fori_loop(0, -(-steps // devices), add, jnp.zeros((), jnp.int32))
    return sum_over_devices(correct, axis_name) / validated.num_examples
