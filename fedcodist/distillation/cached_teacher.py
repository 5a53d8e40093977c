"""Cached teachers: outputs on all unlabelled examples are computed once and looked up in every step."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import batches
from fedcodist.core.batches import TARGET, beside_targets
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.inputs import Examples
from fedcodist.distillation.loop import Teacher
from fedcodist.distillation.settings import Distillation

# A preprocessing that flips a coin for each batch passes with a chance of two in 2^32.
_COMPARED_KEYS = 32


def cached_answers(
    teacher: Teacher, unlabelled: Examples, distillation: Distillation, axis_name: str | None = None
) -> tuple[Examples, Teacher, Distillation]:
    """Returns the examples with a column of the teacher's outputs, and what looks these up.

    That is a teacher, and the distillation with a preprocessing that passes the outputs on. The outputs
    are computed for all examples of the columns: all unlabelled data if it is on the device, the round's
    examples if it is streamed.

    Args:
      teacher: batch -> outputs [batch, ...].
      unlabelled: as for `distill`.
      distillation: its preprocessing, which must not be random, and its batch size are used.
      axis_name: mesh axis whose devices share the examples.

    Raises:
      ValueError: names `distillation.preprocess` if it depends on its key.
    """
    _check_not_random(distillation, unlabelled.columns)
    answers = _on_all(teacher, unlabelled, distillation, axis_name)
    examples = Examples({**unlabelled.columns, TARGET: answers}, unlabelled.indices)
    passes_on = distillation._replace(preprocess=beside_targets(distillation.preprocess))
    return examples, lambda batch: batch[TARGET], passes_on


def _check_not_random(distillation: Distillation, columns: Mapping[str, jax.Array]) -> None:
    draws = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        positions = jnp.asarray(np.arange(8, dtype=np.int32))
        batch = {
            name: jnp.asarray(draws.integers(0, 2, (8, *column.shape[1:])), column.dtype)
            for name, column in columns.items()
        }
        first = distillation.preprocess(batch, jax.random.key(0), positions)
        for seed in range(1, _COMPARED_KEYS):
            other = distillation.preprocess(batch, jax.random.key(seed), positions)
            if not all(_is_same(first[name], other[name]) for name in other):
                raise ValueError(
                    "distillation.preprocess must not be random where answers are cached: the teacher "
                    "would answer other images than the student sees."
                )


def _is_same(one: jax.Array, other: jax.Array) -> bool:
    if isinstance(one, jax.core.Tracer):  # values are unknown in a shard_map that is not compiled
        return True
    # Rows that are normalised are NaN where all of their drawn numbers are equal.
    may_be_nan = jnp.issubdtype(one.dtype, jnp.inexact)
    return np.array_equal(one, other, equal_nan=may_be_nan)


def _on_all(
    teacher: Teacher, unlabelled: Examples, distillation: Distillation, axis_name: str | None
) -> jax.Array:
    count = next(iter(unlabelled.columns.values())).shape[0]
    devices, device = this_device(axis_name)
    size = min(distillation.batch_size, count)

    def answer(positions: jax.Array) -> jax.Array:
        indices = jnp.minimum(positions, count - 1)
        batch = batches.read(
            unlabelled.columns, indices, distillation.preprocess, jax.random.key(0), positions
        )
        return teacher(batch)

    answers = batches.on_all(answer, count, size, count, devices, device)
    return sum_over_devices(answers, axis_name)
