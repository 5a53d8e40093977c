"""Distillation that averages a student's weights over steps: stochastic weight averaging (SWA)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.devices import this_device
from fedcodist.core.inputs import Examples
from fedcodist.core.model import Model, Variables
from fedcodist.distillation.loop import (
    DistillationCarry,
    Distilled,
    agree_on_mutable,
    distillation_loop,
)
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import batches_of_steps

PyTree = Any


class WeightAveraging(NamedTuple):
    """At which steps a student's parameters are averaged (SWA, Izmailov et al. 2018).

    https://arxiv.org/abs/1803.05407

    Attributes:
      start: the first model is that after `start` steps.
      every: steps from one averaged model to the next.
    """

    start: int = 500
    every: int = 25


def distill_averaged(
    averaging: WeightAveraging,
    num_unlabelled: int,
    *,
    models: Mapping[str, Model],
    students: Mapping[str, Variables],
    unlabelled: Examples,
    key: jax.Array,
    settings: Distillation,
    axis_name: str | None = None,
    **others: Any,
) -> Distilled:
    """`distill` that returns the mean of each student's parameters over steps.

    Batch statistics start from those of the last student. Then the mean model updates them, as a running
    average, over the batches of one pass, or of all steps if these are fewer. So a little of the
    student's statistics stays. (Other implementations of SWA begin anew and take the mean over a pass.)

    Args:
      averaging: at which steps parameters are averaged.
      num_unlabelled: examples in a pass.
      models: as for `distill`.
      students: as for `distill`.
      unlabelled: as for `distill`.
      key: as for `distill`.
      settings: as for `distill`.
      axis_name: as for `distill`.
      others: further arguments of `distill`, by name.

    Raises:
      ValueError: names `averaging.start` unless it is within the steps.
    """
    start, step = distillation_loop(
        models=models,
        students=students,
        unlabelled=unlabelled,
        key=key,
        settings=settings,
        axis_name=axis_name,
        **others,
    )
    params_of = lambda trained: {name: values.params for name, values in trained.items()}
    count = len(range(averaging.start, settings.steps + 1, averaging.every))
    if averaging.start < 1 or not count:
        raise ValueError(
            f"averaging.start must be between 1 and the {settings.steps} steps, got {averaging.start}."
        )

    def summed_step(
        carry: tuple[DistillationCarry, PyTree], index: jax.Array
    ) -> tuple[tuple[DistillationCarry, PyTree], dict[str, jax.Array]]:
        training, total = carry
        training, losses = step(training, index)
        after = index + 1 - averaging.start
        counts = (after >= 0) & (after % averaging.every == 0)
        add = lambda sum_, leaf: sum_ + jnp.where(counts, leaf, 0)
        return (training, jax.tree.map(add, total, params_of(training[0]))), losses

    # A sum of 16 bits would soon stop to grow.
    precise = lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
    nothing = jax.tree.map(precise, params_of(students))
    ((trained, _), total), losses = jax.lax.scan(
        summed_step, (start, nothing), jnp.arange(settings.steps)
    )
    params = jax.tree.map(
        lambda sum_, leaf: (sum_ / count).astype(leaf.dtype), total, params_of(students)
    )
    batch_at = batches_of_steps(unlabelled, key, settings, axis_name)
    # Devices must not use the same dropout for their parts, as in the steps.
    _, device = this_device(axis_name)

    def update_statistics(
        mutable: dict[str, PyTree], index: jax.Array
    ) -> tuple[dict[str, PyTree], None]:
        batch, mask = batch_at(index)
        for name in students:
            _, new = models[name].apply(
                Variables(params[name], mutable[name]),
                batch,
                train=True,
                key=keys.derive(key, index, "statistics", name, device),
                mask=mask,
                axis_name=axis_name,
            )
            mutable = mutable | {name: new}
        return mutable, None

    mutable = {name: values.mutable for name, values in trained.items()}
    if jax.tree.leaves(mutable):
        num_batches = min(settings.steps, -(-num_unlabelled // settings.batch_size))
        mutable, _ = jax.lax.scan(update_statistics, mutable, jnp.arange(num_batches))
    averaged = {name: Variables(params[name], mutable[name]) for name in students}
    first, last = ({name: by_step[index] for name, by_step in losses.items()} for index in (0, -1))
    return Distilled(agree_on_mutable(averaged, settings.batch_size, axis_name), first, last)
