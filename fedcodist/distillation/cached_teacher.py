"""Cached teachers: outputs on all unlabelled examples are computed once and looked up in every step."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import batches
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.inputs import Examples
from fedcodist.distillation.loop import Distillation, Teacher

ANSWERS = "teacher"  # the column of the teacher's outputs


def cached_answers(
    teacher: Teacher, unlabelled: Examples, distillation: Distillation, axis_name: str | None = None
) -> tuple[Examples, Teacher]:
    """Returns the examples with a column of the teacher's outputs, and a teacher that looks these up.

    The outputs are computed for all examples of the columns: all unlabelled data if it is on the device,
    the round's examples if it is streamed.

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
    columns = {**unlabelled.columns, ANSWERS: answers}
    return Examples(columns, unlabelled.indices), lambda batch: batch[ANSWERS]


def _check_not_random(distillation: Distillation, columns: Mapping[str, jax.Array]) -> None:
    draws, positions = np.random.default_rng(0), jnp.arange(8)
    with jax.ensure_compile_time_eval():
        batch = {
            name: jnp.asarray(draws.integers(0, 2, (8, *column.shape[1:])), column.dtype)
            for name, column in columns.items()
        }
        first, *others = [
            distillation.preprocess(batch, jax.random.key(seed), positions) for seed in range(4)
        ]
        for other in others:
            if not all(np.array_equal(first[name], other[name]) for name in other):
                raise ValueError(
                    "distillation.preprocess must not be random where answers are cached: the teacher "
                    "would answer other images than the student sees."
                )


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
