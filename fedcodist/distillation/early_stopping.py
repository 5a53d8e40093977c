"""Distillation with early stopping on validation data, which returns the best students."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.model import Variables
from fedcodist.distillation.loop import DistillationCarry, agree_on_mutable, distillation_loop
from fedcodist.distillation.settings import Distillation

# (training; student's name -> best variables, -> their accuracy, -> their step; steps done)
Search = tuple[
    DistillationCarry, dict[str, Variables], dict[str, jax.Array], dict[str, jax.Array], jax.Array
]


class EarlyStopping(NamedTuple):
    """When a distillation ends before its last step.

    Attributes:
      accuracy: (name -> student's Variables) -> (name -> accuracy on validation data, a scalar).
      every: steps from one validation to the next; divides the distillation's steps.
      patience: a student is done at the first validation after this many steps without a new best.
      or_start: whether a student's variables before distillation are a candidate for the best too.
    """

    accuracy: Callable[[Mapping[str, Variables]], Mapping[str, jax.Array]]
    every: int = 100
    patience: int = 1000
    or_start: bool = False


class StoppedEarly(NamedTuple):
    """The best students on validation data, their accuracies, and the number of steps done."""

    students: dict[str, Variables]
    accuracy: dict[str, jax.Array]
    steps: jax.Array


def distill_until(
    stopping: EarlyStopping,
    *,
    students: Mapping[str, Variables],
    settings: Distillation,
    axis_name: str | None = None,
    **others: Any,
) -> StoppedEarly:
    """`distill` that returns, for every student, the variables that were best on validation data.

    Every student has its own best step. The loop ends when all students are done, or after
    `settings.steps`. Among equal accuracies the first is the best.

    Args:
      stopping: validation and patience.
      students: as for `distill`.
      settings: as for `distill`.
      axis_name: as for `distill`.
      others: further arguments of `distill`, by name.
    """
    start, step = distillation_loop(
        students=students, settings=settings, axis_name=axis_name, **others
    )

    def accuracy_of(models: Mapping[str, Variables]) -> dict[str, jax.Array]:
        return {n: jnp.asarray(a, jnp.float32) for n, a in stopping.accuracy(models).items()}

    best = {name: jnp.full((), -jnp.inf, jnp.float32) for name in students}
    if stopping.or_start:
        best = accuracy_of(students)
    if settings.steps == 0:
        return StoppedEarly(dict(students), best, jnp.zeros((), jnp.int32))
    best_at = {name: jnp.zeros((), jnp.int32) for name in students}

    def continues(carry: Search) -> jax.Array:
        _, _, _, best_at, done = carry
        waited = jnp.stack([done - best_at[name] for name in students])
        return (done < settings.steps) & jnp.any(waited < stopping.patience)

    def block(carry: Search) -> Search:
        training, best_students, best, best_at, done = carry
        training, _ = jax.lax.scan(step, training, done + jnp.arange(stopping.every))
        trained = agree_on_mutable(training[0], settings.batch_size, axis_name)
        accuracy = accuracy_of(trained)
        now = done + stopping.every
        for name in students:
            is_better = accuracy[name] > best[name]
            if len(students) > 1:
                # A student that is done keeps its best variables while others continue.
                is_better &= done - best_at[name] < stopping.patience
            choose = lambda new, old, is_better=is_better: jnp.where(is_better, new, old)
            best_students = best_students | {
                name: jax.tree.map(choose, trained[name], best_students[name])
            }
            best = best | {name: choose(accuracy[name], best[name])}
            best_at = best_at | {name: choose(now, best_at[name])}
        return training, best_students, best, best_at, now

    _, best_students, best, _, steps = jax.lax.while_loop(
        continues, block, (start, dict(students), best, best_at, jnp.zeros((), jnp.int32))
    )
    return StoppedEarly(best_students, best, steps)
