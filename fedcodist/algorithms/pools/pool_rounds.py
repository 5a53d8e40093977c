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
from fedcodist.core.inputs import Round
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
        count, present = _present(name, pool, round)
        cohort = replace(round.inputs.cohorts[name], present=present)
        with of_clients(pool.clients):
            result = for_each_client(
                functools.partial(_client_update, method, hyper[name]),
                method.reduce.prepare,
                message,
                client_states[name],
                cohort,
                clients_key,
                execution,
                round.axis_name,
                individual_results=members,
                # Pools that share a stream must not share masks.
                mask=mask_of_round(
                    method.reduce, cohort.clients, keys.derive(clients_key, name), present
                ),
            )
        if result.results is not None:
            trained = jax.tree.map(jnp.subtract, message.params, result.results.update)
            models[name] = Variables(trained, result.results.mutable)
            results[name] = result.results
        # Pools that share a stream must not share what a reduction draws, such as its noise.
        aggregates[name] = method.reduce.finalize(
            result.total,
            message_to_reduce(method, state[name], message),
            keys.derive(clients_key, "reduce", name),
        )
        new_client_states[name] = result.client_states
        norm = optax.tree.norm(aggregates[name].pseudo_gradient)
        metrics[f"{name}/pseudo_gradient_norm"] = norm
        metrics[f"{name}/finite"] = jnp.isfinite(norm)
        if present is None:
            metrics |= {f"{name}/client_{k}": jnp.mean(v, 0) for k, v in result.metrics.items()}
            continue
        new_client_states[name] = _where(present, result.client_states, client_states[name])
        metrics[f"{name}/clients_left_out"] = jnp.maximum(count - len(present), 0)
        of_present = functools.partial(_where, present)
        metrics |= {
            f"{name}/client_{k}": jnp.nanmean(of_present(v * 1.0, jnp.full(v.shape, jnp.nan)), 0)
            for k, v in result.metrics.items()
        }
    return TrainedPools(aggregates, new_client_states, metrics, models, results)


def _present(name, pool, round):
    """(clients drawn, which slots take part) of a Poisson cohort; (None, None) of others."""
    if pool.poisson is None:
        return None, None
    size = (pool.poisson.num_eligible(len(pool.clients)), pool.cohort_size)
    count = number_drawn(*size, name, round.index, round.key)
    return count, jnp.arange(len(round.inputs.cohorts[name].clients)) < count


def _where(flags, chosen, other):
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

    def total(leaf):
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


def _client_update(method, hyper, message, client_state, data, key):
    return method.client_update(message, client_state, data, key, hyper)
