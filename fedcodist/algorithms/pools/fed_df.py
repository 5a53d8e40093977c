"""FedDF (Lin et al., 2020): the round's client models, as one ensemble, teach the averaged models."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.pool import (
    Pool,
    TrainedPools,
    aggregate_of_some,
    assemble,
    check_class_counts,
    check_client_models,
    check_pools,
    train_pools,
    update_servers,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.distillation.early_stopping import EarlyStopping, distill_until
from fedcodist.distillation.ensembles import Ensemble, is_guessing, mean_logits, without_worst
from fedcodist.distillation.loop import (
    UNLABELLED,
    Distillation,
    Teacher,
    check_distillation,
    distill,
    kl_divergence,
    softened,
    softened_target,
    unlabelled_rows,
)
from fedcodist.distillation.validation import (
    VALIDATION,
    ValidationData,
    check_validation_data,
    validation_accuracy,
    validation_rows,
)

PyTree = Any


class FedDFValidation(NamedTuple):
    """How FedDF uses validation data.

    Attributes:
      data: the validation data.
      every: distillation steps between two evaluations.
      patience: steps without a new best after which distillation stops; the best is returned.
      or_start: whether the averaged model itself may be the best.
      drop_worst: leave out the teachers that `ensembles.without_worst` drops, and leave clients who only
        guess out of the average from which students start, unless all do.
    """

    data: ValidationData
    every: int = 100
    patience: int = 1000
    or_start: bool = False
    drop_worst: bool = False


class FedDFHyper(NamedTuple):
    """Floats of FedDF; traced.

    Attributes:
      methods: pool -> the hyper-parameters of its method.
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and student.
    """

    methods: Mapping[str, PyTree]
    learning_rate: Any = 1e-3
    temperature: Any = 1.0


def fed_df(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    distillation: Distillation = Distillation(steps=10_000, mixup_beta=0),
    learning_rate: float = 1e-3,
    temperature: float = 1.0,
    scaled: bool = False,
    validation: FedDFValidation | None = None,
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Every round all clients' models, of whatever architecture, teach each pool's averaged model.

    The target is softmax(mean of logits / T) over the clients of all pools; students start from
    their pool's aggregate and minimise the KL divergence from it, T dividing their logits too.

    Args:
      pools: name -> Pool, one architecture each.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: rows of the data set `unlabelled`, see `resident_data`.
      distillation: steps, batch size, optimizer, augmentation.
      learning_rate: of the distillation's optimizer.
      temperature: T > 0.
      scaled: whether the divergence is multiplied by T squared; FedDF's code does not.
      validation: early stopping and drop-worst; neither without it.
      execution: how clients are executed.

    Raises:
      ValueError: a pool, number or class count that makes no sense; names it.
    """
    check_arguments(fed_df, locals())
    pools = check_pools(pools)
    models = {name: pool.method.model for name, pool in pools.items()}
    check_class_counts(pools)
    check_client_models(pools)
    check_distillation(distillation, num_unlabelled)
    check_number("learning_rate", learning_rate, low=0)
    check_number("temperature", temperature, above=0)
    if validation is not None:
        _check_validation(validation, distillation)
    methods = {name: pool.method.hyper for name, pool in pools.items()}
    hyper = FedDFHyper(methods, learning_rate, temperature)

    def select_examples(round, key):
        examples = {UNLABELLED: unlabelled_rows(key, round, distillation, num_unlabelled)}
        if validation is not None:
            examples[VALIDATION] = validation_rows(validation.data)
        return examples

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        trained = train_pools(
            pools,
            state,
            client_states,
            round,
            hyper.methods,
            execution,
            members=True,
        )

        def accuracy(name, variables):
            assert validation is not None
            examples = inputs.examples[VALIDATION]
            return validation_accuracy(
                models[name], variables, examples, validation.data, axis_name
            )

        aggregates = trained.aggregates
        weights = {name: jnp.ones(pool.cohort_size) for name, pool in pools.items()}
        if validation is not None and validation.drop_worst:
            reduce_key = keys.derive(key, "reduce", round.index)
            weights, aggregates = _without_worst(pools, state, trained, accuracy, reduce_key)
        state = update_servers(pools, state, aggregates, round.index, hyper.methods)
        teachers = {
            name: _summed(models[name], Ensemble(trained.members[name], weights[name]))
            for name in pools
        }
        num_teachers = sum(jnp.sum(each) for each in weights.values())

        def targets(student, outputs):
            logits = sum(outputs.values()) / num_teachers
            return softened_target(logits, hyper.temperature)

        students = {name: pool.method.variables(state[name]) for name, pool in pools.items()}
        arguments = dict(
            models=models,
            students=students,
            teachers=teachers,
            targets=targets,
            unlabelled=inputs.examples[UNLABELLED],
            key=keys.derive(key, "distillation", round.index),
            learning_rates=dict.fromkeys(pools, hyper.learning_rate),
            settings=distillation,
            axis_name=axis_name,
            divergence=softened(kl_divergence(distillation.direction), hyper.temperature, scaled),
        )
        metrics = trained.metrics
        if validation is None:
            students = distill(**arguments).students
        else:
            stopping = EarlyStopping(
                lambda students: {name: accuracy(name, own) for name, own in students.items()},
                validation.every,
                validation.patience,
                validation.or_start,
            )
            stopped = distill_until(stopping, **arguments)
            students = stopped.students
            metrics = metrics | {
                f"{name}/distillation_steps": stopped.steps.astype(jnp.float32) for name in pools
            }
        state = {
            name: pool.method.set_model(state[name], students[name], reset_optimizer=False)
            for name, pool in pools.items()
        }
        return state, trained.client_states, metrics

    data_set_sizes = {UNLABELLED: num_unlabelled}
    if validation is not None:
        data_set_sizes[VALIDATION] = validation.data.num_examples
    return assemble("fed_df", pools, columns, hyper, round_, select_examples, data_set_sizes)


def _without_worst(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    trained: TrainedPools,
    accuracy: Callable[[str, Variables], jax.Array],
    key: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, Aggregate]]:
    """Teachers' weights, 0 of the worst, and aggregates without the clients who guess."""
    found = {
        name: jax.lax.map(functools.partial(accuracy, name), trained.members[name])
        for name in pools
    }
    classes = next(iter(pools.values())).method.model.num_classes
    kept = without_worst(jnp.concatenate(list(found.values())), classes)
    ends = np.cumsum([pool.cohort_size for pool in pools.values()])[:-1].tolist()
    weights = dict(zip(pools, jnp.split(kept, ends), strict=True))
    aggregates = {
        name: aggregate_of_some(
            pool.method,
            state[name],
            trained.results[name],
            ~is_guessing(found[name], classes),
            keys.derive(key, name),
        )._replace(extra=trained.aggregates[name].extra)  # what clients keep goes with it
        for name, pool in pools.items()
    }
    return weights, aggregates


def _summed(model: Model, ensemble: Ensemble) -> Teacher:
    """The sum of the members' logits: pools differ in how many teachers they have."""
    mean, total = mean_logits(model, ensemble), jnp.sum(ensemble.weights)
    # Where all of a pool's clients are dropped there is no mean.
    return lambda batch: jnp.where(total > 0, total * mean(batch), 0)


def _check_validation(validation: FedDFValidation, distillation: Distillation) -> None:
    check_validation_data("validation.data", validation.data)
    check_integer("validation.every", validation.every, low=1)
    check_integer("validation.patience", validation.patience, low=1)
    if distillation.steps % validation.every:
        raise ValueError(
            f"validation.every must divide distillation.steps={distillation.steps}, "
            f"got {validation.every}."
        )
