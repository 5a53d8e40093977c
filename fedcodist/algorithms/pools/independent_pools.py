"""Pools of clients that each train a federated model, without distillation between pools."""

from collections.abc import Mapping
from typing import Any

import jax

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.pool import Pool, check_pools
from fedcodist.algorithms.pools.pool_rounds import train_pools, update_servers
from fedcodist.core.arguments import check_arguments
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm

PyTree = Any


def independent_pools(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    execution: Execution = Execution(),
    name: str = "",
) -> FederatedAlgorithm:
    """Every pool trains on its own: the baseline of codistillation.

    Args:
      pools: name -> Pool.
      columns: the federated data's columns (arrays or shapes), for counting bytes.
      execution: how clients are executed.
      name: the method's name in tables; by default the names of the pools' methods.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.
    """
    check_arguments(independent_pools, locals())
    pools = check_pools(pools)
    methods = dict.fromkeys(pool.method.name for pool in pools.values() if pool.method.name)
    name = name or ", ".join(methods) or "independent pools"

    def round_(
        state: dict[str, PyTree], client_states: PyTree, round: Round, hyper: dict[str, PyTree]
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        trained = train_pools(pools, state, client_states, round, hyper, execution)
        state = update_servers(pools, state, trained.aggregates, round.index, hyper)
        return state, trained.client_states, trained.metrics

    return assemble(
        name, pools, columns, {n: pool.method.hyper for n, pool in pools.items()}, round_
    )
