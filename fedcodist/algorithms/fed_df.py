"""FedDF (Lin et al., 2020): the round's client models, as one ensemble, teach the averaged models."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist import keys
from fedcodist.aggregation import Aggregate
from fedcodist.algorithms.pools import (
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
from fedcodist.checks import check_integer, check_number
from fedcodist.distillation import (
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
from fedcodist.early_stopping import EarlyStopping, distill_until
from fedcodist.ensembles import Ensemble, is_guessing, mean_logits, without_worst
from fedcodist.federated_algorithm import FederatedAlgorithm
from fedcodist.for_each_client import Execution
from fedcodist.model import Model, Variables
from fedcodist.validation import (
    VALIDATION,
    ValidationData,
    validation_accuracy,
    validation_rows,
)

PyTree = Any


class Validated(NamedTuple):
    """How FedDF uses validation data.

    Attributes:
      data: which they are.
      every: distillation steps between two looks at them.
      patience: steps without a new best after which distillation stops; the best is returned.
      or_start: whether the averaged model itself may be the best.
      drop_worst: leave out teachers that `ensembles.without_worst` drops, and of the average that
        students start from clients who guess, where there are others.
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
    validated: Validated | None = None,
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
      validated: early stopping and drop-worst; neither without it.
      execution: how clients are executed.

    Raises:
      ValueError: a pool, number or class count that makes no sense; names it.
    """
    pools = check_pools(pools)
    models = {name: pool.method.model for name, pool in pools.items()}
    check_class_counts(pools)
    check_client_models(pools)
    check_distillation(distillation, num_unlabelled)
    check_number("learning_rate", learning_rate, low=0)
    check_number("temperature", temperature, above=0)
    if validated is not None:
        _check_validated(validated, distillation)
    methods = {name: pool.method.hyper for name, pool in pools.items()}
    hyper = FedDFHyper(methods, learning_rate, temperature)

    def select_examples(round, key):
        examples = {UNLABELLED: unlabelled_rows(key, round, distillation, num_unlabelled)}
        if validated is not None:
            examples[VALIDATION] = validation_rows(validated.data)
        return examples

    def round_(state, rows, inputs, round, key, hyper, axis_name=None):
        trained = train_pools(
            pools,
            state,
            rows,
            inputs,
            round,
            key,
            hyper.methods,
            execution,
            axis_name,
            members=True,
        )

        def accuracy(name, variables):
            assert validated is not None
            examples = inputs.examples[VALIDATION]
            return validation_accuracy(models[name], variables, examples, validated.data, axis_name)

        aggregates = trained.aggregates
        weights = {name: jnp.ones(pool.cohort_size) for name, pool in pools.items()}
        if validated is not None and validated.drop_worst:
            weights, aggregates = _without_worst(pools, state, trained, accuracy)
        state = update_servers(pools, state, aggregates, round, hyper.methods)
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
            key=keys.derive(key, "distillation", round),
            learning_rates=dict.fromkeys(pools, hyper.learning_rate),
            settings=distillation,
            axis_name=axis_name,
            divergence=softened(kl_divergence(distillation.direction), hyper.temperature, scaled),
        )
        metrics = trained.metrics
        if validated is None:
            students = distill(**arguments).students
        else:
            stopping = EarlyStopping(
                lambda students: {name: accuracy(name, own) for name, own in students.items()},
                validated.every,
                validated.patience,
                validated.or_start,
            )
            stopped = distill_until(stopping, **arguments)
            students = stopped.students
            metrics = metrics | {
                f"{name}/distillation_steps": stopped.steps.astype(jnp.float32) for name in pools
            }
        state = {
            name: pool.method.with_model(state[name], students[name])
            for name, pool in pools.items()
        }
        return state, trained.rows, metrics

    data_set_sizes = {UNLABELLED: num_unlabelled}
    if validated is not None:
        data_set_sizes[VALIDATION] = validated.data.num_examples
    return assemble("fed_df", pools, columns, hyper, round_, select_examples, data_set_sizes)


def _without_worst(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    trained: TrainedPools,
    accuracy: Callable[[str, Variables], jax.Array],
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
            pool.method, state[name], trained.results[name], ~is_guessing(found[name], classes)
        )._replace(extra=trained.aggregates[name].extra)  # what clients keep goes with it
        for name, pool in pools.items()
    }
    return weights, aggregates


def _summed(model: Model, ensemble: Ensemble) -> Teacher:
    """The sum of the members' logits: pools differ in how many teachers they have."""
    mean, total = mean_logits(model, ensemble), jnp.sum(ensemble.weights)
    # Where all of a pool's clients are dropped there is no mean.
    return lambda batch: jnp.where(total > 0, total * mean(batch), 0)


def _check_validated(validated: Validated, distillation: Distillation) -> None:
    if validated.data.num_examples < 1:
        raise ValueError(
            f"validated.data.num_examples must be at least 1, got {validated.data.num_examples}: this "
            "method needs labelled validation data."
        )
    check_integer("validated.data.batch_size", validated.data.batch_size, low=1)
    check_integer("validated.every", validated.every, low=1)
    check_integer("validated.patience", validated.patience, low=1)
    if distillation.steps % validated.every:
        raise ValueError(
            f"validated.every must divide distillation.steps={distillation.steps}, "
            f"got {validated.every}."
        )
