"""`Pool`: clients with one federated model; checks of pools."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcodist.algorithms.pools.cohorts import PoissonCohort
from fedcodist.core.checks import check_clients, check_integer, check_names
from fedcodist.core.method import FederatedMethod


class Pool(NamedTuple):
    """Clients that train one model.

    Attributes:
      method: any single-model method.
      clients: int [pool], the clients' indices in the federated data. Pools may overlap.
      cohort_size: clients drawn per round, without replacement, independently of other pools; with
        `poisson` the expected number of them.
      poisson: for cohorts whose clients are drawn one by one; None for a fixed size.
    """

    method: FederatedMethod
    clients: np.ndarray
    cohort_size: int
    poisson: PoissonCohort | None = None

    @property
    def slots(self) -> int:
        """The number of client slots in a round."""
        if self.poisson is None:
            return self.cohort_size
        return self.poisson.slots(len(self.clients), self.cohort_size)


def check_pools(pools: Mapping[str, Pool], called: str = "pools") -> dict[str, Pool]:
    """Returns the pools with sorted clients, or raises ValueError or TypeError that names the argument.

    Args:
      pools: name -> Pool.
      called: the argument's name.
    """
    if not pools:
        raise ValueError(f"{called} must hold at least one pool, got none.")
    check_names(called, pools)
    return {name: check_pool(f"{called}[{name!r}]", pool) for name, pool in pools.items()}


def check_pool(where: str, pool: Pool) -> Pool:
    """The pool with sorted clients. Raises ValueError or TypeError that begins with `where`."""
    clients = check_clients(f"{where}.clients", pool.clients)
    if not isinstance(pool.cohort_size, int | np.integer) or isinstance(pool.cohort_size, bool):
        check_integer(f"{where}.cohort_size", pool.cohort_size, low=1)
    if not 1 <= pool.cohort_size <= clients.size:
        raise ValueError(
            f"{where}.cohort_size must be between 1 and the pool's {clients.size} clients, got "
            f"{pool.cohort_size}."
        )
    if pool.method.num_clients not in (None, clients.size):
        raise ValueError(
            f"{where}.method must be made with num_clients={clients.size}, the pool's, got "
            f"{pool.method.num_clients}."
        )
    checked = pool._replace(clients=clients)
    _check_cohorts(where, checked)
    return checked


def check_no_methods(field: str, hyper_of_methods: Any) -> None:
    """Raises ValueError for hyper-parameters beside those that the pools' methods bring along."""
    if hyper_of_methods:
        raise ValueError(
            f"hyper.{field} must be left out: the hyper-parameters of a pool's method are those with "
            "which it was made."
        )


def _check_cohorts(where: str, pool: Pool) -> None:
    """Raises ValueError for a Poisson cohort that does not fit the pool, or not a private sum."""
    if pool.poisson is not None:
        pool.poisson.check_pool(where, len(pool.clients), pool.cohort_size)
    if pool.method.privacy is None:
        return
    _check_bands(where, pool, pool.method.privacy.bands)
    expected = pool.method.privacy.expected_clients
    if pool.poisson is not None and expected is None:
        raise ValueError(
            f"{where}.method must be private with expected_clients={pool.cohort_size}: otherwise the "
            "size of a Poisson cohort shows whether a client took part."
        )
    if expected not in (None, pool.cohort_size):
        raise ValueError(
            f"{where}.method must be private with expected_clients={pool.cohort_size}, the pool's "
            f"cohort_size, got {expected}."
        )


def _check_bands(where: str, pool: Pool, bands: int) -> None:
    """Raises ValueError unless a client takes part at most once in the rounds that share noise."""
    cycle = 1 if pool.poisson is None else pool.poisson.cycle
    if cycle < bands:
        raise ValueError(
            f"{where}.poisson must be PoissonCohort(cycle={bands}) or of a longer cycle: noise of "
            f"{bands} bands hides a client who takes part at most once in {bands} rounds."
        )


def check_fixed_cohorts(name: str, pools: Mapping[str, Pool]) -> dict[str, Pool]:
    """The pools. Raises ValueError for Poisson cohorts, in methods with a fixed number of clients."""
    return {pool_name: check_fixed_cohort("pools", name, pool) for pool_name, pool in pools.items()}


def check_fixed_cohort(where: str, name: str, pool: Pool) -> Pool:
    """The pool. Raises ValueError that begins with `where` for a Poisson cohort."""
    if pool.poisson is not None:
        raise ValueError(
            f"{where} must have poisson=None for {name}, whose rounds need a fixed number of clients."
        )
    return pool


def check_class_counts(pools: Mapping[str, Pool]) -> None:
    """Raises ValueError unless the pools' models, which teach each other, have equally many classes."""
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


def check_sends_models(pools: Mapping[str, Pool], argument: str = "pools[{!r}]") -> None:
    """Raises ValueError unless the server can compute clients' models from what they send.

    Messages call a pool by `argument`, with its name in place of {}.
    """
    check_fixed_cohorts("a server that reads the clients' models", pools)
    for name, pool in pools.items():
        if pool.method.privacy is not None:
            raise ValueError(
                f"{argument.format(name)}.method must not be private: the server would need every "
                "client's model, and a private method tells it noised sums only."
            )
        if not pool.method.sends_models:
            raise ValueError(
                f"{argument.format(name)}.method must send changes of whole models, from which the "
                f"server knows every client's model, got {pool.method.name}: FetchSGD sends sketches, "
                "FedKD by steps gradients, partly shared methods only a part, and a secure sum hides "
                "them."
            )
