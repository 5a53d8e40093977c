"""FedDF's use of validation data: early stopping, and dropping the worst teachers and clients."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import TrainedPools, aggregate_of_some
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.checks import check_integer
from fedcodist.core.inputs import Round
from fedcodist.core.model import Model, Variables
from fedcodist.distillation.early_stopping import EarlyStopping, distill_until
from fedcodist.distillation.ensembles import is_guessing, without_worst
from fedcodist.distillation.loop import distill
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.validation import (
    VALIDATION,
    ValidationData,
    check_validation_data,
    validation_accuracy,
)

PyTree = Any


class FedDFValidation(NamedTuple):
    """How FedDF uses validation data.

    Attributes:
      data: the validation data.
      every: distillation steps between two evaluations.
      patience: distillation stops after this many steps without a new best; the best is returned.
      or_start: whether the averaged model itself may be the best.
      drop_worst: leave out the teachers that `ensembles.without_worst` drops. Also leave clients that
        only guess out of the average from which students start, unless all clients guess.
    """

    data: ValidationData
    every: int = 100
    patience: int = 1000
    or_start: bool = False
    drop_worst: bool = False


def check_fed_df_validation(validation: FedDFValidation, distillation: Distillation) -> None:
    """Raises ValueError or TypeError that names the field which is not allowed."""
    check_validation_data("validation.data", validation.data)
    check_integer("validation.every", validation.every, low=1)
    check_integer("validation.patience", validation.patience, low=1)
    if distillation.steps % validation.every:
        raise ValueError(
            f"validation.every must divide distillation.steps={distillation.steps}, "
            f"got {validation.every}."
        )


def accuracy_within(
    models: Mapping[str, Model],
    validation: FedDFValidation,
    round: Round,
    name: str,
    variables: Variables,
) -> jax.Array:
    """The accuracy of a pool's model on the validation data."""
    examples = round.inputs.examples[VALIDATION]
    return validation_accuracy(models[name], variables, examples, validation.data, round.axis_name)


def without_worst_clients(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    trained: TrainedPools,
    accuracy: Callable[[str, Variables], jax.Array],
    key: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, Aggregate]]:
    """Teachers' weights, 0 for the worst, and aggregates without the clients that only guess."""
    accuracies = {
        name: jax.lax.map(functools.partial(accuracy, name), trained.members[name])
        for name in pools
    }
    classes = next(iter(pools.values())).method.model.num_classes
    is_kept = without_worst(jnp.concatenate(list(accuracies.values())), classes)
    ends = np.cumsum([pool.cohort_size for pool in pools.values()])[:-1].tolist()
    weights = dict(zip(pools, jnp.split(is_kept, ends), strict=True))
    aggregates = {
        name: aggregate_of_some(
            pool.method,
            state[name],
            trained.results[name],
            ~is_guessing(accuracies[name], classes),
            keys.derive(key, name),
        )._replace(extra=trained.aggregates[name].extra)  # what clients keep goes with it
        for name, pool in pools.items()
    }
    return weights, aggregates


def distill_validated(
    validation: FedDFValidation | None,
    accuracy: Callable[[str, Variables], jax.Array] | None,
    **lesson: Any,
) -> tuple[dict[str, Variables], dict[str, jax.Array]]:
    """The students after all steps, or the best ones on validation data; and metrics.

    Args:
      validation: when to stop; None: after all steps.
      accuracy: (pool's name, its model) -> accuracy on validation data.
      lesson: arguments of `distill`, by name.
    """
    if validation is None or accuracy is None:
        return distill(**lesson).students, {}
    stopping = EarlyStopping(
        lambda students: {name: accuracy(name, model) for name, model in students.items()},
        validation.every,
        validation.patience,
        validation.or_start,
    )
    stopped = distill_until(stopping, **lesson)
    steps = stopped.steps.astype(jnp.float32)
    return stopped.students, {f"{name}/distillation_steps": steps for name in stopped.students}
