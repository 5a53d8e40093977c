"""The parts of a round of pools: cohorts train, and servers take a step or get another model."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.pools.cohorts import number_drawn
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, mask_of_round
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import ClientData, Cohort, Round
from fedcodist.core.method import FederatedMethod, client_key, message_to_reduce
from fedcodist.core.model import Variables
from fedcodist.core.padding_checks import training_clients

PyTree = Any


class TrainedPools(NamedTuple):
    """The results of a round of local training, by pool.

    Attributes:
      aggregates: what the servers get.
      client_states: the cohorts' new client states.
      metrics: `<pool>/<name>` -> scalar.
      members, results: the clients' trained models, and their ClientResults; leaves [cohort, ...]. Only
        if `train_pools` was called with `members`.
    """

    aggregates: dict[str, Aggregate]
    client_states: dict[str, PyTree]
    metrics: dict[str, jax.Array]
    members: dict[str, Variables]
    results: dict[str, ClientResult]


class TrainedPool(NamedTuple):
    """The results of a round of local training in one pool, see `TrainedPools`."""

    aggregate: Aggregate
    client_states: PyTree
    metrics: dict[str, jax.Array]
    members: Variables | None
    results: ClientResult | None


class PoolKeys(NamedTuple):
    """The keys of a pool's round.

    Attributes:
      clients: the clients' keys are derived from it. Pools that divide one cohort share it.
      masks, reduction: for the masks that hide clients' updates, and for the reduction's draws, such as
        its noise. No two pools share these.
    """

    clients: jax.Array
    masks: jax.Array
    reduction: jax.Array


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
      state: pool -> its method's server.
      client_states: pool -> states of the cohort, leaves [cohort, ...].
      round: the `Round`, with a cohort for each pool.
      hyper: pool -> hyper-parameters of its method, such as `hyper.methods`.
      stream: the name from which clients' keys are derived in all pools; by default each pool's own
        name. Pools that divide one cohort share a name.
      members: whether to return every client's model and result.
    """
    trained = {}
    for name, pool in pools.items():
        cohort, drawn = round.inputs.cohorts[name], None
        if pool.poisson is not None:
            size = (pool.poisson.num_eligible(len(pool.clients)), pool.cohort_size)
            drawn = number_drawn(*size, name, round.index, round.key)
            cohort = replace(cohort, present=jnp.arange(len(cohort.clients)) < drawn)
        trained[name] = train_pool(
            pool,
            state[name],
            client_states[name],
            cohort,
            round,
            pool_keys(round, name, stream),
            hyper[name],
            execution,
            members,
        )
        if drawn is not None:
            # Clients beyond the bound on a cohort, see `PoissonCohort`.
            left_out = jnp.maximum(drawn - len(cohort.clients), 0)
            metrics = trained[name].metrics | {"clients_left_out": left_out}
            trained[name] = trained[name]._replace(metrics=metrics)
    return by_pool(trained)


def pool_keys(round: Round, name: str, stream: str | None = None) -> PoolKeys:
    """The keys of a pool's round, see `train_pools` for `stream`."""
    clients = client_key(round.key, round.index, stream or name)
    return PoolKeys(clients, keys.derive(clients, name), keys.derive(clients, "reduce", name))


def train_pool(
    pool: Pool,
    server: PyTree,
    client_states: PyTree,
    cohort: Cohort,
    round: Round,
    keys_of_pool: PoolKeys,
    hyper: PyTree,
    execution: Execution,
    members: bool = False,
) -> TrainedPool:
    """Runs one pool's cohort. Arguments are those of `train_pools`, for this pool."""
    method, message = pool.method, pool.method.broadcast(server)
    with training_clients(pool.clients):
        result = for_each_client(
            functools.partial(_client_update, method, hyper),
            method.reduce.prepare,
            message,
            client_states,
            cohort,
            keys_of_pool.clients,
            execution,
            round.axis_name,
            individual_results=members,
            mask=mask_of_round(method.reduce, cohort.clients, keys_of_pool.masks, cohort.present),
        )
    models = None
    if result.results is not None:
        trained = jax.tree.map(jnp.subtract, message.params, result.results.update)
        models = Variables(trained, result.results.mutable)
    aggregate = method.reduce.finalize(
        result.total, message_to_reduce(method, server, message), keys_of_pool.reduction
    )
    norm = optax.tree.norm(aggregate.pseudo_gradient)
    new_states, present = result.client_states, cohort.present
    if present is not None:
        new_states = _where(present, new_states, client_states)

    def mean(values: jax.Array) -> jax.Array:
        if present is None:
            return jnp.mean(values, 0)
        # NaN without clients, and if it is a client's value.
        total = jnp.sum(_where(present, values * 1.0, jnp.zeros(values.shape)), 0)
        return total / jnp.sum(present)

    sent = [
        leaf for leaf in jax.tree.leaves(aggregate.extra) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    is_finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in (norm, *sent)])
    metrics = {"pseudo_gradient_norm": norm, "finite": is_finite}
    metrics |= {f"client_{name}": mean(values) for name, values in result.metrics.items()}
    if taken := metrics.keys() & aggregate.metrics.keys():
        raise ValueError(
            f"method.reduce must not have {min(taken)!r} among its Aggregate.metrics, since the library "
            "measures it."
        )
    metrics |= aggregate.metrics
    return TrainedPool(aggregate, new_states, metrics, models, result.results)


def by_pool(trained: Mapping[str, TrainedPool]) -> TrainedPools:
    """The results of several pools as one TrainedPools."""
    return TrainedPools(
        aggregates={name: pool.aggregate for name, pool in trained.items()},
        client_states={name: pool.client_states for name, pool in trained.items()},
        metrics={
            f"{name}/{metric}": value
            for name, pool in trained.items()
            for metric, value in pool.metrics.items()
        },
        members={n: pool.members for n, pool in trained.items() if pool.members is not None},
        results={n: pool.results for n, pool in trained.items() if pool.results is not None},
    )


def _where(flags: jax.Array, chosen: PyTree, other: PyTree) -> PyTree:
    """Leaves [slots, ...] of `chosen` where the flag is true, and of `other` elsewhere."""
    expanded = lambda leaf: flags.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda a, b: jnp.where(expanded(a), a, b), chosen, other)


def aggregate_of_some(
    method: FederatedMethod,
    server: PyTree,
    results: ClientResult,
    is_kept: jax.Array,
    key: jax.Array,
) -> Aggregate:
    """The aggregate of some of a cohort's clients; of all clients if none is kept.

    Args:
      method: the clients' method.
      server: the server before the round.
      results: the clients' results, leaves [cohort, ...].
      is_kept: bool [cohort].
      key: for the draws of the reduction.
    """
    is_kept = is_kept | ~jnp.any(is_kept)

    def total(leaf: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_kept.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0), axis=0)

    count = len(results.weight)
    prepared = jax.vmap(method.reduce.prepare)(results, jax.random.split(key, count))
    message = message_to_reduce(method, server, method.broadcast(server))
    return method.reduce.finalize(jax.tree.map(total, prepared), message, key)


def update_servers(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    aggregates: Mapping[str, Aggregate],
    round: jax.Array,
    hyper: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Every pool's server after a step of its optimizer on the aggregate.

    Args:
      pools: whose servers they are.
      state: pool -> its method's server.
      aggregates: pool -> what its server gets, see `TrainedPools`.
      round: the round's number, `round.index`, int32.
      hyper: pool -> hyper-parameters of its method.
    """
    return {
        name: pool.method.server_update(state[name], aggregates[name], round, hyper[name])
        for name, pool in pools.items()
    }


def set_models(
    pools: Mapping[str, Pool],
    state: Mapping[str, PyTree],
    models: Mapping[str, Variables],
    reset_optimizer: bool = False,
) -> dict[str, PyTree]:
    """Every pool's server with another model, and with a fresh optimizer if `reset_optimizer`."""
    return {
        name: pool.method.set_model(state[name], models[name], reset_optimizer)
        for name, pool in pools.items()
    }


def _client_update(
    method: FederatedMethod,
    hyper: PyTree,
    message: PyTree,
    client_state: PyTree,
    data: ClientData,
    key: jax.Array,
) -> ClientResult:
    return method.client_update(message, client_state, data, key, hyper)
