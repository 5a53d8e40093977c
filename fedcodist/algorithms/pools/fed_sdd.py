"""FedSDD (Kwan and Song, 2023): several aggregated models over several rounds teach one of them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.pools.client_ensembles import (
    ClientModels,
    check_client_ensembles,
    client_ensemble,
)
from fedcodist.algorithms.pools.pool import (
    Pool,
    assemble,
    check_pools,
    train_pools,
    update_servers,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Examples, Selection
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.core.shuffling import permuted_positions, sample_without_replacement
from fedcodist.distillation.cached_teacher import cached_answers
from fedcodist.distillation.ensembles import Ensemble, ensemble_predictor, mean_logits
from fedcodist.distillation.loop import (
    UNLABELLED,
    Distillation,
    check_distillation,
    distill,
    kl_divergence,
    softened,
    softened_target,
    unlabelled_rows,
)

PyTree = Any
MAIN, ENSEMBLE = "main", "ensemble"


class FedSDDState(NamedTuple):
    """Everything that the server keeps.

    Attributes:
      models: name -> the method's server state, the main model first.
      buffer: aggregated models of the last rounds, before any distillation; leaves
        [rounds kept, models, ...].
      weights: float [rounds kept], 1 where the buffer has a round's models and 0 where not yet.
      clients: ClientModels where client ensembles are measured, else None. Keeping them is for
        measurements alone: the method itself needs sums over groups and no client's model.
    """

    models: dict[str, PyTree]
    buffer: Variables
    weights: jax.Array
    clients: ClientModels | None


class FedSDDHyper(NamedTuple):
    """Floats of FedSDD; traced.

    Attributes:
      method: hyper-parameters of the clients' method, the same for all models.
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and student.
    """

    method: PyTree
    learning_rate: Any = 0.1
    temperature: Any = 4.0


def fed_sdd(
    pool: Pool,
    columns: Mapping[str, Any],
    num_unlabelled: int,
    num_models: int = 4,
    rounds_kept: int = 1,
    distillation: Distillation = Distillation(5000, 256, optax.sgd, mixup_beta=0),
    learning_rate: float = 0.1,
    temperature: float = 4.0,
    scaled: bool = True,
    distilled: str = "main",
    warm_up: int = 0,
    cached: bool = False,
    group_sizes: Sequence[int] | None = None,
    measured: Sequence[str] = (),
    execution: Execution = Execution(),
    name: str = "fed_sdd",
) -> FederatedAlgorithm:
    """K models of one architecture, each trained by its own part of every round's clients.

    A round (algorithm 1): the cohort is drawn and divided anew into K groups; each group trains and
    aggregates its model; aggregates enter a buffer of the last R rounds; the teacher is the mean of
    the K R models' logits; the main model alone is distilled from it. What enters the buffer is never
    distilled, and models other than the main one go on from their aggregates.

    Args:
      pool: the clients, the cohort of all groups together, and the clients' method (FedAvg, FedProx,
        SCAFFOLD, ...), whose server optimizer is the group's. Client states (SCAFFOLD's variates)
        are kept per client and model.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: rows of the data set `unlabelled`, see `resident_data`.
      num_models: K.
      rounds_kept: R.
      distillation: steps, batch size, optimizer, augmentation; 0 steps leave distillation out.
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and student.
      scaled: whether the divergence is multiplied by T squared (Hinton et al.; the paper does not say).
      distilled: 'main', or 'all' models by the same teacher (the paper's "basic" distillation).
      warm_up: rounds at the start without distillation.
      cached: evaluate the teacher once a round on all unlabelled data that are on the device, which are
        the round's own where they are streamed; refused where the distillation augments its images.
      group_sizes: clients of each group; as even as can be, the first ones larger, where not given.
      measured: ensembles of the clients' models to evaluate too, any of `CLIENT_ENSEMBLES`, see
        `client_ensemble`; 'gaussian' and 'dirichlet' for one model only.
      execution: how clients are executed.
      name: the method's name in tables.

    Raises:
      ValueError: a number that makes no sense; names it.
    """
    check_arguments(fed_sdd, locals())
    pool = check_pools({"pool": pool})["pool"]
    counts = _group_sizes(pool.cohort_size, num_models, group_sizes)
    check_integer("rounds_kept", rounds_kept, low=1)
    check_integer("warm_up", warm_up, low=0)
    check_distillation(distillation, num_unlabelled)
    check_number("learning_rate", learning_rate, low=0)
    check_number("temperature", temperature, above=0)
    if distilled not in ("main", "all"):
        raise ValueError(f"distilled must be 'main' or 'all', got {distilled!r}.")
    if cached and distillation.mixup_beta > 0:
        raise ValueError("cached needs distillation.mixup_beta=0: mixed images differ every time.")
    check_client_ensembles("measured", measured, pool, num_models)
    method = pool.method
    names = [MAIN, *(f"model_{k}" for k in range(1, num_models))]
    sizes = dict(zip(names, counts, strict=True))
    groups = {n: pool._replace(cohort_size=size) for n, size in sizes.items()}
    students = names if distilled == "all" else [MAIN]

    def init(key):
        models = {n: method.init(keys.derive(key, "init", n)) for n in names}
        newest = _stacked([method.variables(models[n]) for n in names])
        room = lambda leaf: jnp.zeros((rounds_kept, *leaf.shape), leaf.dtype).at[0].set(leaf)
        clients = None
        if measured:
            main = method.variables(models[MAIN])
            each = _stacked([method.variables(models[n]) for n in names for _ in range(sizes[n])])
            clients = ClientModels(main, main, each, jax.random.key_data(key))
        weights = jnp.zeros(rounds_kept).at[0].set(1)
        return FedSDDState(models, jax.tree.map(room, newest), weights, clients)

    def select(round, key):
        draw = keys.derive(key, "cohort", round, MAIN)
        drawn = sample_without_replacement(draw, len(pool.clients), pool.cohort_size)
        if num_models > 1:
            places = jnp.arange(pool.cohort_size)
            shuffle = keys.derive(key, "groups", round)
            drawn = drawn[permuted_positions(shuffle, places, pool.cohort_size)]
        chosen = jnp.asarray(pool.clients)[drawn]
        parts = jnp.split(chosen, np.cumsum(counts)[:-1].tolist())
        examples = {}
        if distillation.steps:
            examples[UNLABELLED] = unlabelled_rows(key, round, distillation, num_unlabelled)
        return Selection(dict(zip(names, parts, strict=True)), examples)

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        # Every client belongs to one group, so all groups draw from one stream, as FedAvg would.
        trained = train_pools(
            groups,
            state.models,
            client_states,
            round,
            dict.fromkeys(names, hyper.method),
            execution,
            stream=MAIN,
            members=bool(measured),
        )
        models = update_servers(
            groups,
            state.models,
            trained.aggregates,
            round.index,
            dict.fromkeys(names, hyper.method),
        )
        newest = _stacked([method.variables(models[n]) for n in names])
        at = round.index % rounds_kept
        buffer = jax.tree.map(lambda kept, new: kept.at[at].set(new), state.buffer, newest)
        clients = None
        if measured:
            each = jax.tree.map(
                lambda *leaves: jnp.concatenate(leaves), *(trained.members[n] for n in names)
            )
            clients = ClientModels(
                method.variables(state.models[MAIN]),
                method.variables(models[MAIN]),
                each,
                jax.random.key_data(keys.derive(key, "samples", round.index)),
            )
        state = FedSDDState(models, buffer, state.weights.at[at].set(1), clients)
        if distillation.steps:

            def teach(models):
                taught = _taught(
                    method.model,
                    buffered(state),
                    {n: method.variables(models[n]) for n in students},
                    inputs.examples[UNLABELLED],
                    round.index,
                    key,
                    hyper,
                    distillation,
                    scaled,
                    cached,
                    axis_name,
                )
                return models | {
                    n: method.set_model(models[n], taught[n], reset_optimizer=False)
                    for n in students
                }

            models = jax.lax.cond(round.index >= warm_up, teach, lambda models: models, models)
        return state._replace(models=models), trained.client_states, trained.metrics

    algorithm = assemble(
        name,
        groups,
        columns,
        FedSDDHyper(method.hyper, learning_rate, temperature),
        round_,
        data_set_sizes={UNLABELLED: num_unlabelled} if distillation.steps else {},
        servers=lambda state: state.models,
    )
    predictors = dict(algorithm.predictors)
    predictors[ENSEMBLE] = ensemble_predictor(method.model, buffered)
    for kind in measured:
        predictors[kind] = ensemble_predictor(method.model, functools.partial(_clients_as, kind))
    return algorithm._replace(init=init, select=select, predictors=predictors)


def buffered(state: FedSDDState) -> Ensemble:
    """The ensemble of all aggregated models in the buffer; before round 1 the initial ones."""
    models = jax.tree.leaves(state.buffer.params)[0].shape[1]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), state.buffer)
    return Ensemble(flat, jnp.repeat(jnp.asarray(state.weights), models))


def _clients_as(kind: str, state: FedSDDState) -> Ensemble:
    assert state.clients is not None
    return client_ensemble(kind, state.clients)


def _taught(
    model: Model,
    ensemble: Ensemble,
    students: Mapping[str, Variables],
    unlabelled: Examples,
    round: jax.Array,
    key: jax.Array,
    hyper: FedSDDHyper,
    distillation: Distillation,
    scaled: bool,
    cached: bool,
    axis_name: str | None,
) -> dict[str, Variables]:
    """The students after distillation (equations 4 and 5)."""
    teacher = mean_logits(model, ensemble)
    if cached:
        unlabelled, teacher = cached_answers(teacher, unlabelled, distillation, axis_name)
    return distill(
        models=dict.fromkeys(students, model),
        students=students,
        teachers={ENSEMBLE: teacher},
        targets=lambda _, outputs: softened_target(outputs[ENSEMBLE], hyper.temperature),
        unlabelled=unlabelled,
        key=keys.derive(key, "distillation", round),
        learning_rates=dict.fromkeys(students, hyper.learning_rate),
        settings=distillation,
        axis_name=axis_name,
        divergence=softened(kl_divergence(distillation.direction), hyper.temperature, scaled),
    ).students


def _stacked(models: Sequence[Variables]) -> Variables:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)


def _group_sizes(cohort: int, num_models: int, sizes: Sequence[int] | None) -> list[int]:
    check_integer("num_models", num_models, low=1)
    if num_models > cohort:
        raise ValueError(
            f"num_models must be at most the cohort's {cohort} clients, so that no group is empty, "
            f"got {num_models}."
        )
    if sizes is None:
        return [len(part) for part in np.array_split(np.arange(cohort), num_models)]
    if not isinstance(sizes, Sequence) or not all(
        isinstance(size, int | np.integer) for size in sizes
    ):
        raise TypeError(f"group_sizes must be integers, one per model, got {sizes!r}.")
    if len(sizes) != num_models or sum(sizes) != cohort or min(sizes) < 1:
        raise ValueError(
            f"group_sizes must be {num_models} positive numbers that sum to the cohort's {cohort} "
            f"clients, got {list(sizes)}."
        )
    return list(sizes)
