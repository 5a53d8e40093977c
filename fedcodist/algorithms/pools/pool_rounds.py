"""What rounds of pools are made of: cohorts train, servers take a step or another model."""

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
from fedcodist.core.padding_checks import of_clients

PyTree = Any


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


class TrainedPool(NamedTuple):
    """What a round of local training leaves in one pool, see `TrainedPools`."""

    aggregate: Aggregate
    client_states: PyTree
    metrics: dict[str, jax.Array]
    members: Variables | None
    results: ClientResult | None


class PoolKeys(NamedTuple):
    """The keys of a pool's round.

    Attributes:
      clients: from which the clients' own are derived; pools that divide one cohort share it.
      masks, reduction: of what hides the clients' updates, and of what a reduction draws, such as its
        noise; no two pools share these.
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
      state, client_states, round, hyper: as an algorithm's round gets them.
      stream: name under which all pools' clients draw their random numbers; each pool's own where
        not given. Pools that divide one cohort among them share a name.
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
            # Beyond the bound on their number, see `PoissonCohort`.
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
    draws: PoolKeys,
    hyper: PyTree,
    execution: Execution,
    members: bool = False,
) -> TrainedPool:
    """Runs one pool's cohort; arguments as `train_pools` has them, of this pool."""
    method, message = pool.method, pool.method.broadcast(server)
    with of_clients(pool.clients):
        result = for_each_client(
            functools.partial(_client_update, method, hyper),
            method.reduce.prepare,
            message,
            client_states,
            cohort,
            draws.clients,
            execution,
            round.axis_name,
            individual_results=members,
            mask=mask_of_round(method.reduce, cohort.clients, draws.masks, cohort.present),
        )
    models = None
    if result.results is not None:
        trained = jax.tree.map(jnp.subtract, message.params, result.results.update)
        models = Variables(trained, result.results.mutable)
    aggregate = method.reduce.finalize(
        result.total, message_to_reduce(method, server, message), draws.reduction
    )
    norm = optax.tree.norm(aggregate.pseudo_gradient)
    new_states, present = result.client_states, cohort.present
    if present is not None:
        new_states = _where(present, new_states, client_states)

    def mean(values: jax.Array) -> jax.Array:
        if present is None:
            return jnp.mean(values, 0)
        return jnp.nanmean(_where(present, values * 1.0, jnp.full(values.shape, jnp.nan)), 0)

    metrics = {"pseudo_gradient_norm": norm, "finite": jnp.isfinite(norm)}
    metrics |= {f"client_{name}": mean(values) for name, values in result.metrics.items()}
    return TrainedPool(aggregate, new_states, metrics, models, result.results)


def by_pool(trained: Mapping[str, TrainedPool]) -> TrainedPools:
    """The rounds of several pools as one."""
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
    """The trees' leaves [slots, ...], of the first one where the flag is true."""
    expanded = lambda leaf: flags.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda a, b: jnp.where(expanded(a), a, b), chosen, other)


def aggregate_of_some(
    method: FederatedMethod,
    server: PyTree,
    results: ClientResult,
    is_kept: jax.Array,
    key: jax.Array,
) -> Aggregate:
    """The aggregate of some of a cohort's clients; of all where it would be of none.

    Args:
      method: the clients'.
      server: as they received it.
      results: what they returned, leaves [cohort, ...].
      is_kept: bool [cohort].
      key: of what the reduction draws.
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
    """Every pool's server after a step of its optimizer on the aggregate."""
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
    """Every pool's server with another model, and a fresh optimizer where it says so."""
    return {
        name: pool.method.set_model(state[name], models[name], reset_optimizer=reset_optimizer)
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
