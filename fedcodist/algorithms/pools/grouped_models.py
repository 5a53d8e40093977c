"""Several models of one architecture, each trained by a group of one cohort (FedSDD, Fed-ensemble)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.cohorts import draw_cohort
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import (
    TrainedPool,
    TrainedPools,
    by_pool,
    pool_keys,
    train_pool,
    train_pools,
    update_servers,
)
from fedcodist.core import keys
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Cohort, Round
from fedcodist.core.model import Variables

PyTree = Any
MAIN = "main"


def group_sizes_of(cohort: int, num_models: int, sizes: Sequence[int] | None) -> list[int]:
    """The clients per group: given, or as even as possible. Raises ValueError or TypeError."""
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
        raise TypeError(f"group_sizes must be a list of integers, one per model, got {sizes!r}.")
    if len(sizes) != num_models or sum(sizes) != cohort or min(sizes) < 1:
        raise ValueError(
            f"group_sizes must be {num_models} positive numbers that sum to the cohort's {cohort} "
            f"clients, got {list(sizes)}."
        )
    return list(sizes)


def groups_of(pool: Pool, sizes: Sequence[int], argument: str = "pool") -> dict[str, Pool]:
    """A pool for each model: `main`, `model_1`, ..., each with a part of the cohort.

    Args:
      pool: the clients, each of whom may be in any group, and their method.
      sizes: clients of each group in a round.
      argument: how messages call the pool.

    Raises:
      ValueError: a private method that divides every group's sum by the whole cohort; a secure sum of a
        single client.
    """
    if pool.method.reduce.mask is not None and min(sizes) < 2:
        raise ValueError(
            f"{argument} must have at least 2 clients per model to sum securely, got groups of "
            f"{list(sizes)}."
        )
    if pool.method.privacy is not None and pool.method.privacy.expected_clients is not None:
        raise ValueError(
            f"{argument}.method must be private without expected_clients, as its models are trained by "
            "parts of the cohort."
        )
    names = [MAIN, *(f"model_{k}" for k in range(1, len(sizes)))]
    return {name: pool._replace(cohort_size=n) for name, n in zip(names, sizes, strict=True)}


def drawn_groups(
    pool: Pool, sizes: Sequence[int], round: jax.Array, key: jax.Array, name: str = MAIN
) -> list[jax.Array]:
    """A round's clients of each group, int32 [size]; together they are the cohort that FedAvg draws.

    Args:
      pool, sizes: the clients, and how many each group has.
      round, key: as in `FederatedAlgorithm.select`.
      name: the pool's name, if there are several pools.
    """
    cohort = draw_cohort(jnp.asarray(pool.clients), pool.cohort_size, name, round, key)
    if len(sizes) > 1:
        shuffle = keys.derive(key, "groups", round, *(() if name == MAIN else (name,)))
        # `permuted_positions` does not make all subsets of a few clients equally likely.
        cohort = jax.random.permutation(shuffle, cohort)
    return jnp.split(cohort, np.cumsum(sizes)[:-1].tolist())


def train_groups(
    groups: Mapping[str, Pool],
    models: Mapping[str, PyTree],
    client_states: Mapping[str, PyTree],
    round: Round,
    hyper: PyTree,
    execution: Execution,
    stream: str = MAIN,
) -> tuple[dict[str, PyTree], TrainedPools]:
    """Every group trains its model and aggregates it.

    The server gets only sums over groups and no client's model.

    Args:
      groups: made by `groups_of`.
      models: name -> the method's server.
      client_states, round: as in `FederatedAlgorithm.round`.
      hyper: hyper-parameters of the clients' method, the same for all models.
      execution: how clients are executed.
      stream: the pool's name, if there are several pools.

    Returns:
      The servers after the round, and the other results of training.
    """
    # Every client belongs to one group, so all groups draw from one stream, as FedAvg would.
    cohorts = {name: round.inputs.cohorts[name] for name in groups}
    shared = next(iter(cohorts.values())).columns
    share_columns = all(cohort.columns is shared for cohort in cohorts.values())
    if len(groups) > 1 and share_columns and execution.loop != "eager":
        return _train_in_a_loop(groups, models, client_states, round, hyper, execution, stream)
    hyper_of = dict.fromkeys(groups, hyper)
    trained = train_pools(groups, models, client_states, round, hyper_of, execution, stream)
    return update_servers(groups, models, trained.aggregates, round.index, hyper_of), trained


def _train_in_a_loop(
    groups: Mapping[str, Pool],
    models: Mapping[str, PyTree],
    client_states: Mapping[str, PyTree],
    round: Round,
    hyper: PyTree,
    execution: Execution,
    stream: str,
) -> tuple[dict[str, PyTree], TrainedPools]:
    """Like `train_groups`, but with one program for all groups, so that it compiles once.

    It has as many slots as the largest group. Smaller groups have empty slots.
    """
    pool = next(iter(groups.values()))
    cohorts = {name: round.inputs.cohorts[name] for name in groups}
    sizes = {name: len(cohort.clients) for name, cohort in cohorts.items()}
    shared, slots = next(iter(cohorts.values())), max(sizes.values())

    def filled(name: str) -> tuple[PyTree, ...]:
        fill = lambda leaf: jnp.concatenate([leaf, *[leaf[-1:]] * (slots - sizes[name])])
        cohort, is_filled = cohorts[name], jnp.arange(slots) < sizes[name]
        return (
            models[name],
            jax.tree.map(fill, client_states[name]),
            jax.tree.map(fill, (cohort.clients, cohort.starts, cohort.sizes)),
            None if len(set(sizes.values())) == 1 else is_filled,
            pool_keys(round, name, stream),
        )

    def one_group(group: tuple[PyTree, ...]) -> tuple[PyTree, TrainedPool]:
        server, states, (clients, starts, client_sizes), present, keys_of_group = group
        cohort = Cohort(shared.columns, clients, starts, client_sizes, shared.capacity, present)
        trained = train_pool(pool, server, states, cohort, round, keys_of_group, hyper, execution)
        return pool.method.server_update(server, trained.aggregate, round.index, hyper), trained

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(filled(name) for name in groups))
    servers, trained = {}, {}
    for name, of_group in zip(groups, _unstacked(jax.lax.map(one_group, stacked)), strict=True):
        servers[name], trained[name] = of_group
        states = jax.tree.map(lambda leaf, n=sizes[name]: leaf[:n], trained[name].client_states)
        trained[name] = trained[name]._replace(client_states=states)
    return servers, by_pool(trained)


def first_models(groups: Mapping[str, Pool], key: jax.Array) -> dict[str, PyTree]:
    """The servers before the first round, with other initial values in every group."""
    pool = next(iter(groups.values()))
    draws = jnp.stack([keys.derive(key, "init", name) for name in groups])
    return dict(zip(groups, _unstacked(jax.lax.map(pool.method.init, draws)), strict=True))


def _unstacked(tree: PyTree) -> list[PyTree]:
    """The inverse of stacking trees along the first axis."""
    count = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, k=k: leaf[k], tree) for k in range(count)]


def stacked_models(groups: Mapping[str, Pool], models: Mapping[str, PyTree]) -> Variables:
    """All groups' models, leaves [models, ...]."""
    variables = [pool.method.variables(models[name]) for name, pool in groups.items()]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)
