"""Ensembles of one round's client models, with which FedSDD's paper compares its ensemble (Table 5)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.fed_sdd import FedSDDState
from fedcodist.algorithms.pools.grouped_models import MAIN
from fedcodist.algorithms.pools.pool import Pool, check_pool, check_sends_models
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.checks import check_several, shown
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod, PersonalModel, Predictor
from fedcodist.core.model import Model, Variables, variable_shapes
from fedcodist.distillation.ensembles import (
    Ensemble,
    concatenated,
    dirichlet_samples,
    ensemble_predictor,
    equal_weights,
    gaussian_samples,
)

PyTree = Any
Reader = TypeVar("Reader", Predictor, PersonalModel)
CLIENT_ENSEMBLES = ("clients", "gaussian", "dirichlet")
SAMPLES = 10  # models drawn for the last two


class MeasuredClients(NamedTuple):
    """The clients' models of the last round, kept for evaluation.

    Attributes:
      received: the main model before the round, from which the clients of its group started.
      average: the main model after aggregation, before distillation.
      members: the clients' models of all groups, leaves [cohort, ...].
      key: uint32, data of the key that draws samples around them.
    """

    received: Variables
    average: Variables
    members: Variables
    key: jax.Array


class MeasuredState(NamedTuple):
    """FedSDD's state, and the clients' models, which are only kept for evaluation."""

    fed_sdd: FedSDDState
    clients: MeasuredClients


class StateAndTrainedModel(NamedTuple):
    """A client state within a round: the method's, and the client's trained model."""

    method: PyTree
    trained: Variables


def with_client_ensembles(
    build: Callable[[Pool], FederatedAlgorithm], pool: Pool, measured: Sequence[str]
) -> FederatedAlgorithm:
    """FedSDD that also evaluates ensembles of its clients' models. Training does not change.

    FedSDD itself needs only sums over groups and no client's model. For the evaluation, clients put
    their trained models into their client states. From there the models move to the algorithm's state.

    Args:
      build: pool -> FedSDD, that is `fed_sdd` with all other arguments.
      pool: its pool.
      measured: any of `CLIENT_ENSEMBLES`, which are also the names in results. 'clients' are the
        clients' models alone. 'gaussian' and 'dirichlet', which need num_models=1, add the average and
        ten models sampled around the clients' models (FedBE).

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    plain = build(pool)
    names = list(plain.client_states)
    pool = check_pool("pool", pool)
    check_client_ensembles("measured", measured, pool, num_models=len(names))
    state = jax.eval_shape(plain.init, keys.key_shape())
    if not isinstance(state, FedSDDState):
        raise ValueError(
            f"measured must be empty for {plain.name}: FedSDD alone has these ensembles."
        )
    algorithm = build(pool._replace(method=keeping_models(pool.method)))
    model = pool.method.model

    def main_model(state: FedSDDState) -> Variables:
        return algorithm.predictors[MAIN].variables(state)

    def init(key: jax.Array) -> MeasuredState:
        state = algorithm.init(key)
        cohorts = jax.eval_shape(algorithm.select, 0, key).clients
        members = [
            algorithm.predictors[name].variables(state)
            for name in names
            for _ in range(len(cohorts[name]))
        ]
        members = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
        main = main_model(state)
        return MeasuredState(state, MeasuredClients(main, main, members, jax.random.key_data(key)))

    def round_(
        state: MeasuredState, client_states: PyTree, round: Round, hyper: PyTree
    ) -> tuple[MeasuredState, PyTree, dict[str, jax.Array]]:
        received = main_model(state.fed_sdd)
        cohorts = {name: len(cohort.clients) for name, cohort in round.inputs.cohorts.items()}
        keeping = {
            name: StateAndTrainedModel(client_states[name], _no_models(model, cohorts[name]))
            for name in names
        }
        after, keeping, metrics = algorithm.round(state.fed_sdd, keeping, round, hyper)
        members = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), *(keeping[name].trained for name in names)
        )
        place = round.index % len(after.weights)
        average = jax.tree.map(lambda leaf: leaf[place, 0], after.buffer)
        draw = jax.random.key_data(keys.derive(round.key, "samples", round.index))
        clients = MeasuredClients(received, average, members, draw)
        client_states = {name: keeping[name].method for name in names}
        return MeasuredState(after, clients), client_states, metrics

    def restart(state: MeasuredState) -> MeasuredState:
        return state._replace(fed_sdd=restart_fed_sdd(state.fed_sdd))

    restart_fed_sdd = plain.restart or (lambda state: state)

    def of_fed_sdd(reader: Reader) -> Reader:
        """A Predictor or a PersonalModel that reads FedSDD's state from a MeasuredState."""
        return reader._replace(variables=within(reader.variables))

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, *more: function(state.fed_sdd, *more)

    predictors = {name: of_fed_sdd(reader) for name, reader in plain.predictors.items()}
    predictors |= {kind: _predictor(model, kind) for kind in measured}
    return plain._replace(
        init=init,
        round=round_,
        predictors=predictors,
        personal_models={
            name: {kind: of_fed_sdd(reader) for kind, reader in readers.items()}
            for name, readers in plain.personal_models.items()
        },
        client_models={
            name: models._replace(
                variables=within(models.variables),
                fine_tuned=models.fine_tuned and within(models.fine_tuned),
            )
            for name, models in plain.client_models.items()
        },
        restart=restart,
    )


def _predictor(model: Model, kind: str) -> Predictor:
    return ensemble_predictor(model, lambda state: client_ensemble(kind, state.clients))


def keeping_models(method: FederatedMethod) -> FederatedMethod:
    """The method with StateAndTrainedModel as client state, which includes the trained model."""

    def client_update(
        message: PyTree,
        client_state: StateAndTrainedModel,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> ClientResult:
        result = method.client_update(message, client_state.method, data, key, hyper)
        params = jax.tree.map(jnp.subtract, message.params, result.update)
        trained = Variables(params, result.mutable)
        return result._replace(client_state=StateAndTrainedModel(result.client_state, trained))

    def init_client_state() -> StateAndTrainedModel:
        room = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
        nothing = jax.tree.map(room, variable_shapes(method.model))
        return StateAndTrainedModel(method.init_client_state(), nothing)

    return method._replace(
        client_update=client_update, init_client_state=init_client_state, after_sending=None
    )


def _no_models(model: Model, count: int) -> Variables:
    """Zeros in place of `count` models, leaves [count, ...]."""
    return jax.tree.map(
        lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), variable_shapes(model)
    )


def client_ensemble(kind: str, clients: MeasuredClients) -> Ensemble:
    """An ensemble of the clients' models, of a kind in `CLIENT_ENSEMBLES`."""
    if kind == "clients":
        return equal_weights(clients.members)
    key = jax.random.wrap_key_data(jnp.asarray(clients.key))
    if kind == "gaussian":
        samples = gaussian_samples(key, clients.received, clients.members, SAMPLES)
    else:
        samples = dirichlet_samples(key, clients.members, SAMPLES)
    average = jax.tree.map(lambda leaf: leaf[None], clients.average)
    return concatenated(*(equal_weights(models) for models in (clients.members, average, samples)))


def check_client_ensembles(name: str, kinds: Sequence[str], pool: Pool, num_models: int) -> None:
    """Raises ValueError or TypeError for kinds that do not exist, or not for this pool."""
    if isinstance(kinds, str):
        raise TypeError(f"{name} must be several of {CLIENT_ENSEMBLES}, got the string {kinds!r}.")
    check_several(name, kinds)
    kinds = list(kinds)
    if unknown := [kind for kind in kinds if kind not in CLIENT_ENSEMBLES]:
        raise ValueError(f"{name} must be among {CLIENT_ENSEMBLES}, got {shown(unknown)}.")
    if num_models > 1 and (around := sorted(set(kinds) & {"dirichlet", "gaussian"})):
        raise ValueError(
            f"{name} must not name {around} with num_models above 1: between models that began apart "
            "there is nothing to sample."
        )
    if kinds:
        check_sends_models({"": pool}, argument="pool")
