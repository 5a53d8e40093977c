"""Pools of clients, one federated model each: what FedAvg baselines and codistillation share."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_clients, check_columns, check_integer, check_names
from fedcodist.core.client_states import ClientStates
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import Round, Selection
from fedcodist.core.method import (
    FederatedAlgorithm,
    FederatedMethod,
    PersonalModel,
    client_key,
    communication_of,
    single_model,
)
from fedcodist.core.model import Variables, is_finite
from fedcodist.core.padded_statistics import of_clients
from fedcodist.core.shuffling import sample_without_replacement

PyTree = Any


class Pool(NamedTuple):
    """Clients that train one model.

    Attributes:
      method: any single-model method.
      clients: int [pool], the clients' indices in the federated data. Pools may overlap.
      cohort_size: clients drawn per round, without replacement, independently of other pools.
    """

    method: FederatedMethod
    clients: np.ndarray
    cohort_size: int


def independent_pools(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    execution: Execution = Execution(),
    name: str = "",
) -> FederatedAlgorithm:
    """Every pool on its own: the baseline that codistillation is compared with.

    Args:
      pools: name -> Pool.
      columns: the federated data's columns (arrays or shapes), for counting bytes.
      execution: how clients are executed.
      name: the method's name in tables; where not given, the names of the pools' methods.
    """
    check_arguments(independent_pools, locals())
    pools = check_pools(pools)
    methods = dict.fromkeys(pool.method.name for pool in pools.values() if pool.method.name)
    name = name or ", ".join(methods) or "independent pools"

    def round_(state, client_states, round, hyper):
        trained = train_pools(pools, state, client_states, round, hyper, execution)
        state = update_servers(pools, state, trained.aggregates, round.index, hyper)
        return state, trained.client_states, trained.metrics

    return assemble(
        name, pools, columns, {n: pool.method.hyper for n, pool in pools.items()}, round_
    )


def assemble(
    name: str,
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    hyper: PyTree,
    round_: Callable[..., Any],
    select_examples: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] = lambda round, key: {},
    data_set_sizes: Mapping[str, int] = {},
    servers: Callable[[PyTree], Mapping[str, PyTree]] | None = None,
) -> FederatedAlgorithm:
    """Makes an algorithm of pools and a round.

    Args:
      name, pools, columns, hyper: as an algorithm's own arguments.
      round_: FederatedAlgorithm.round.
      select_examples: (round, key) -> data set -> places of a round's examples that are not clients'.
      data_set_sizes: data set -> examples that it must have.
      servers: state -> pool -> the method's server; the state itself where not given.
    """
    has_server = servers is None
    servers = servers or (lambda state: state)

    check_columns("columns", columns)

    def init(key):
        return {n: pool.method.init(keys.derive(key, "init", n)) for n, pool in pools.items()}

    def watched(state, client_states, round, hyper):
        state, client_states, metrics = round_(state, client_states, round, hyper)
        models = {n: pool.method.variables(servers(state)[n]) for n, pool in pools.items()}
        return (
            state,
            client_states,
            metrics | {f"{n}/finite_model": is_finite(m) for n, m in models.items()},
        )

    def select(round, key):
        clients = {}
        for n, pool in pools.items():
            draw = keys.derive(key, "cohort", round, n)
            chosen = sample_without_replacement(draw, len(pool.clients), pool.cohort_size)
            clients[n] = jnp.asarray(pool.clients)[chosen]
        return Selection(clients, select_examples(round, key))

    def predictor(n, method):
        return single_model(method.model, lambda state: method.variables(servers(state)[n]))

    def kept(n, method):
        return _personal_models(n, method, lambda state: servers(state)[n])

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={
            n: ClientStates(pool.clients, pool.method.init_client_state())
            for n, pool in pools.items()
        },
        select=select,
        round=watched,
        predictors={n: predictor(n, pool.method) for n, pool in pools.items()},
        communication={
            n: communication_of(pool.method, columns, has_server) for n, pool in pools.items()
        },
        num_clients=1 + max(int(pool.clients[-1]) for pool in pools.values()),
        data_set_sizes=data_set_sizes,
        personal_models={n: kept(n, pool.method) for n, pool in pools.items()},
    )


def _personal_models(
    pool: str, method: FederatedMethod, server: Callable[[PyTree], PyTree]
) -> dict[str, PersonalModel]:
    """The method's models that a pool's clients keep, `<pool>_<name>`, of the algorithm's state.

    Args:
      pool: its name.
      method: the pool's.
      server: algorithm's state -> the method's server.
    """

    def of_algorithm(kept):
        return kept._replace(
            variables=lambda state, client_state: kept.variables(server(state), client_state)
        )

    return {f"{pool}_{name}": of_algorithm(kept) for name, kept in method.personal_models.items()}


class TrainedPools(NamedTuple):
    """What a round of local training leaves, by pool.

    Attributes:
      aggregates: what the servers learn.
      client_states: what the cohorts' clients keep.
      metrics: `<pool>/<name>` -> scalar.
      members, results: the clients' trained models, and all that they returned; leaves [cohort, ...],
        where asked for.
    """

    aggregates: dict[str, Aggregate]
    client_states: dict[str, PyTree]
    metrics: dict[str, jax.Array]
    members: dict[str, Variables]
    results: dict[str, ClientResult]


def train_pools(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    client_states: Mapping[str, PyTree],
    round: Round,
    hyper: Mapping[str, PyTree],
    execution: Execution,
    stream: str | None = None,
    members: bool = False,
) -> TrainedPools:
    """Runs one cohort per pool.

    Args:
      pools, execution: who trains and how.
      state, client_states, round, hyper: as an algorithm's round gets them.
      stream: name under which all pools' clients draw their random numbers; each pool's own where
        not given. Pools that divide one cohort among them share a name.
      members: whether to return every client's model and result.
    """
    aggregates, new_client_states, metrics, models, results = {}, {}, {}, {}, {}
    for name, pool in pools.items():
        method, message = pool.method, pool.method.broadcast(state[name])
        clients_key = client_key(round.key, round.index, stream or name)
        with of_clients(pool.clients):
            result = for_each_client(
                functools.partial(_client_update, method, hyper[name]),
                method.reduce.prepare,
                message,
                client_states[name],
                round.inputs.cohorts[name],
                clients_key,
                execution,
                round.axis_name,
                individual_results=members,
            )
        if result.results is not None:
            trained = jax.tree.map(jnp.subtract, message.params, result.results.update)
            models[name] = Variables(trained, result.results.mutable)
            results[name] = result.results
        aggregates[name] = method.reduce.finalize(
            result.total, message, keys.derive(clients_key, "reduce")
        )
        new_client_states[name] = result.client_states
        norm = optax.tree.norm(aggregates[name].pseudo_gradient)
        metrics[f"{name}/pseudo_gradient_norm"] = norm
        metrics[f"{name}/finite"] = jnp.isfinite(norm)
        metrics |= {f"{name}/client_{k}": jnp.mean(v, 0) for k, v in result.metrics.items()}
    return TrainedPools(aggregates, new_client_states, metrics, models, results)


def aggregate_of_some(
    method: FederatedMethod, server: PyTree, results: ClientResult, kept: jax.Array, key: jax.Array
) -> Aggregate:
    """The aggregate of some of a cohort's clients; of all where it would be of none.

    Args:
      method: the clients'.
      server: as they received it.
      results: what they returned, leaves [cohort, ...].
      kept: bool [cohort].
      key: of what the reduction draws.
    """
    kept = kept | ~jnp.any(kept)

    def total(leaf):
        return jnp.sum(jnp.where(kept.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0), axis=0)

    count = len(results.weight)
    prepared = jax.vmap(method.reduce.prepare)(results, jax.random.split(key, count))
    return method.reduce.finalize(jax.tree.map(total, prepared), method.broadcast(server), key)


def update_servers(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    aggregates: Mapping[str, Aggregate],
    round: jax.Array,
    hyper: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Every pool's server after a step of its optimizer on the aggregate."""
    return {
        name: pool.method.server_update(state[name], aggregates[name], round, hyper[name])
        for name, pool in pools.items()
    }


def check_pools(pools: Mapping[str, Pool], called: str = "pools") -> dict[str, Pool]:
    """Returns the pools with sorted clients, or raises one line that names what is wrong.

    Args:
      pools: name -> Pool.
      called: the argument's name.
    """
    if not pools:
        raise ValueError(f"{called} must hold at least one pool, got none.")
    check_names(called, pools)
    checked = {}
    for name, pool in pools.items():
        clients = check_clients(f"{called}[{name!r}].clients", pool.clients)
        if not isinstance(pool.cohort_size, int | np.integer):
            check_integer(f"{called}[{name!r}].cohort_size", pool.cohort_size, low=1)
        if not 1 <= pool.cohort_size <= clients.size:
            raise ValueError(
                f"{called}[{name!r}].cohort_size must be between 1 and the pool's {clients.size} "
                f"clients, got {pool.cohort_size}."
            )
        check_integer(f"{called}[{name!r}].cohort_size", pool.cohort_size, low=1)
        if pool.method.num_clients not in (None, clients.size):
            raise ValueError(
                f"{called}[{name!r}].method must be told of the pool's {clients.size} clients, its "
                f"num_clients is {pool.method.num_clients}."
            )
        checked[name] = pool._replace(clients=clients)
    return checked


def check_class_counts(pools: Mapping[str, Pool]) -> None:
    """Raises one line unless the pools' models, which teach each other, have as many classes."""
    classes = {name: pool.method.model.num_classes for name, pool in pools.items()}
    if 1 in classes.values():
        raise ValueError(
            "pools must have models of at least two classes to teach each other by probabilities, got "
            f"{classes}: give a network of one logit a second one."
        )
    if len(set(classes.values())) > 1:
        raise ValueError(
            f"pools must have models of equal class counts to teach each other, got {classes}."
        )


def check_client_models(pools: Mapping[str, Pool]) -> None:
    """Raises one line unless clients' models are told by what they send."""
    for name, pool in pools.items():
        if not pool.method.sends_models:
            raise ValueError(
                f"pools[{name!r}].method must send how far its clients came, from which their models "
                "are told; FetchSGD's sends sketches, FedKD's by steps gradients."
            )


def _client_update(method, hyper, message, client_state, data, key):
    return method.client_update(message, client_state, data, key, hyper)
