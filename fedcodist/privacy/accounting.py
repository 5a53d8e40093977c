"""Privacy accounting: epsilon of a client at a given delta, computed by the library dp-accounting.

This module has no accountant of its own. A pool's round is an event of dp-accounting:

- A Poisson cohort is the Poisson-subsampled Gaussian mechanism, truncated to a random subset if the
  cohort has a bound. Neighbouring data differ in whether one client is present (add or remove). It is
  accounted with privacy loss distributions (PLD), or with RDP if there is no bound.
- A fixed-size cohort without replacement is `SampledWithoutReplacementDpEvent`, accounted with RDP. The
  number of clients is public, so in neighbouring data one client is replaced by another. A sum then
  changes by up to twice the bound, so the Gaussian has half the noise multiplier. Epsilon is at most
  that of a client who is drawn in all rounds, which is exact.

With noise that is correlated over rounds, a client can be drawn in one round of each cycle. The cost of
this round is that of independent noise, and the cycle's other rounds cost nothing. This is theorem 4 of
Choquette-Choo et al., 2023, https://arxiv.org/abs/2306.08153; jax-privacy has the same events.

If a client can be drawn in several pools, its epsilon is that of the composition over these pools.
Epsilon is infinite with a noise multiplier below 0.001.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcodist.core.checks import check_integer, check_number, check_text
from fedcodist.core.extras import check_installed
from fedcodist.core.method import PrivateCohorts

PLD, RDP = "pld", "rdp"
_TOLERANCE = 1e-3  # of a calibrated noise multiplier
# With less noise, epsilon is in the millions and counts as infinite; the accountants' numbers overflow.
LEAST_NOISE = 1e-3
LEAST_DELTA = 1e-14


class PrivacyBudget(NamedTuple):
    """The delta at which a run's epsilon is computed, and the largest epsilon.

    Attributes:
      delta: at least 1e-14 and below 1; choose it below 1 / (number of clients).
      epsilon: training ends before the round that would exceed it; None for no limit.
      accountant: 'pld' or 'rdp'; None for the tighter one that supports the sampling.
    """

    delta: float = 1e-5
    epsilon: float | None = None
    accountant: str | None = None

    def check(self, name: str) -> None:
        """Raises ValueError or TypeError that names the field which is not allowed."""
        check_delta(f"{name}.delta", self.delta)
        if self.epsilon is not None:
            check_number(f"{name}.epsilon", self.epsilon, above=0)
        if self.accountant is not None:
            check_text(f"{name}.accountant", self.accountant)
            if self.accountant not in (PLD, RDP):
                raise ValueError(
                    f"{name}.accountant must be 'pld' or 'rdp', got {self.accountant!r}."
                )


class Spending(NamedTuple):
    """The privacy cost of some rounds, by the pools in which a client can be drawn.

    Attributes:
      epsilon: the largest of any client.
      by_pools: names of pools, joined by ', ' -> epsilon of the clients that are in exactly these pools.
      clients: the same keys -> the number of these clients.
    """

    epsilon: float
    by_pools: dict[str, float]
    clients: dict[str, int]


class _Sampling(NamedTuple):
    """The parameters of one pool's event, without the clients' indices.

    Attributes:
      num_clients: the number of clients that can be drawn in one round.
      cycle: each client can be drawn in one of this many rounds.
    """

    noise_multiplier: float
    cohort_size: int
    num_clients: int
    most: int | None
    cycle: int

    def participations(self, rounds: int) -> int:
        """The largest number of these rounds in which one client can be drawn."""
        return math.ceil(rounds / self.cycle)


def spent(pools: Mapping[str, PrivateCohorts], rounds: int, budget: PrivacyBudget) -> Spending:
    """Epsilon after some rounds, in each of which every pool draws a cohort and sums it once.

    Args:
      pools: as in `FederatedAlgorithm.privacy`.
      rounds: from the start of the run.
      budget: delta, and the accountant.

    Raises:
      ValueError: there are no pools, they sample in different ways, a cohort is larger than its pool, or
        the accountant does not support their sampling.
      ImportError: dp-accounting is not installed.
    """
    check_accountant(pools, budget.accountant)
    groups = _groups(pools)
    by_pools = {
        ", ".join(names): _epsilon(
            tuple(sorted(_sampling(pools[name]) for name in names)),
            rounds,
            budget.delta,
            budget.accountant or _accountant_of(pools),
        )
        for names in groups
    }
    return Spending(
        max(by_pools.values()),
        by_pools,
        {", ".join(names): count for names, count in groups.items()},
    )


def rounds_within(pools: Mapping[str, PrivateCohorts], rounds: int, budget: PrivacyBudget) -> int:
    """How many of the rounds the budget allows, from 0 to `rounds`."""
    if budget.epsilon is None:
        return rounds
    fits = lambda count: spent(pools, count, budget).epsilon <= budget.epsilon
    if fits(rounds):
        return rounds
    low, high = 0, rounds  # `low` fits and `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrated_noise_multiplier(
    epsilon: float,
    delta: float,
    rounds: int,
    pools: Mapping[str, PrivateCohorts],
    accountant: str | None = None,
) -> float:
    """The least noise multiplier, to 0.001, with which the rounds of all pools cost at most epsilon.

    Args:
      epsilon, delta: the budget of the client with the largest cost.
      rounds: of the whole training.
      pools: as `private_cohorts` makes them of private methods. Their noise multipliers are not read,
        so methods can be made private with any noise multiplier before.
      accountant: as in `PrivacyBudget`.

    Raises:
      ValueError, TypeError: names the argument.
    """
    check_number("epsilon", epsilon, above=0)
    check_integer("rounds", rounds, low=1)
    for name, pool in pools.items():
        if not isinstance(pool, PrivateCohorts):
            raise TypeError(
                f"pools[{name!r}] must be PrivateCohorts, as private_cohorts makes them of pools, got a "
                f"{type(pool).__name__}."
            )
    budget = PrivacyBudget(delta, epsilon, accountant)
    budget.check("budget")

    def exceeds(noise_multiplier: float, pools: Mapping[str, PrivateCohorts]) -> bool:
        tried = {
            name: pool._replace(noise_multiplier=noise_multiplier) for name, pool in pools.items()
        }
        return spent(tried, rounds, budget).epsilon > epsilon

    check_accountant(pools, accountant)
    # Accounting for the bound on a Poisson cohort takes a second each time, so it comes last. Unless the
    # bound is near the cohort's size, it changes next to nothing.
    unbounded = {
        name: pool if pool.most is None else pool._replace(most=_num_eligible(pool))
        for name, pool in pools.items()
    }
    low, high = 0.0, 1.0
    while exceeds(high, unbounded):
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle, unbounded) else (low, middle)
    too_few, steps = -1, 0  # of the tolerance, added to `high`
    while exceeds(high + steps * _TOLERANCE, pools):
        too_few, steps = steps, 2 * steps + 1
    while steps - too_few > 1:
        middle = (too_few + steps) // 2
        is_too_few = exceeds(high + middle * _TOLERANCE, pools)
        too_few, steps = (middle, steps) if is_too_few else (too_few, middle)
    return high + steps * _TOLERANCE


def relation(pools: Mapping[str, PrivateCohorts]) -> str:
    """The neighbouring relation: 'add or remove a client', or 'replace a client'."""
    is_poisson = all(pool.most is not None for pool in pools.values())
    return "add or remove a client" if is_poisson else "replace a client"


def check_delta(name: str, delta: Any) -> None:
    """Raises ValueError or TypeError that names the argument unless delta is in (0, 1), and not tiny."""
    check_number(name, delta, above=0, below=1)
    if delta < LEAST_DELTA:
        raise ValueError(
            f"{name} must be at least {LEAST_DELTA:g}, below which the accountants' probabilities are "
            f"rounded away, got {delta:g}."
        )


def check_accountant(pools: Mapping[str, PrivateCohorts], accountant: str | None) -> None:
    """Raises ValueError if the accountant cannot compose the pools, ImportError without its library."""
    if not pools:
        raise ValueError(
            "pools must hold at least one pool with a private method, got none: see fedcodist.private."
        )
    check_installed("the accounting of privacy", "dp_accounting", "privacy")
    for name, pool in pools.items():
        if pool.cohort_size > _num_eligible(pool):
            raise ValueError(
                f"pools[{name!r}].cohort_size must be at most the {_num_eligible(pool)} clients that "
                f"can be drawn in a round, got {pool.cohort_size}."
            )
    kinds = {name: "fixed" if pool.most is None else "Poisson" for name, pool in pools.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            "pools must all have Poisson cohorts, or all cohorts of a fixed size, as what one client "
            f"changes differs, got {kinds}."
        )
    if accountant == PLD and "fixed" in kinds.values():
        raise ValueError(
            "accountant must be 'rdp' for cohorts of a fixed size without replacement, got 'pld'."
        )
    bounded = [name for name, pool in pools.items() if (pool.most or 0) < _num_eligible(pool)]
    if accountant == RDP and "Poisson" in kinds.values() and bounded:
        raise ValueError(
            f"accountant must be 'pld' for a Poisson cohort with a bound, got 'rdp' for {bounded[0]!r}."
        )


def _accountant_of(pools: Mapping[str, PrivateCohorts]) -> str:
    return RDP if any(pool.most is None for pool in pools.values()) else PLD


def _groups(pools: Mapping[str, PrivateCohorts]) -> dict[tuple[str, ...], int]:
    """Names of pools -> the number of clients that can be drawn in exactly these pools."""
    members = np.unique(np.concatenate([pool.clients for pool in pools.values()]))
    is_in = {name: np.isin(members, pool.clients) for name, pool in pools.items()}
    groups: dict[tuple[str, ...], int] = {}
    table, counts = np.unique(np.stack(list(is_in.values())), axis=1, return_counts=True)
    for column, count in zip(table.T, counts, strict=True):
        groups[tuple(name for name, flag in zip(is_in, column, strict=True) if flag)] = int(count)
    return groups


def _sampling(pool: PrivateCohorts) -> _Sampling:
    return _Sampling(
        float(pool.noise_multiplier),
        int(pool.cohort_size),
        _num_eligible(pool),
        pool.most,
        pool.cycle,
    )


def _num_eligible(pool: PrivateCohorts) -> int:
    """The number of clients that can be drawn in one round."""
    return len(pool.clients) // pool.cycle


@functools.lru_cache(maxsize=4096)
def _epsilon(samplings: tuple[_Sampling, ...], rounds: int, delta: float, accountant: str) -> float:
    if rounds == 0:
        return 0.0
    least = min(sampling.noise_multiplier for sampling in samplings)
    if least < LEAST_NOISE:
        return math.inf
    if accountant == PLD:
        # Distributions that are composed need the same interval.
        losses = [
            _loss_of_a_round(sampling, _interval(least)).self_compose(
                sampling.participations(rounds)
            )
            for sampling in samplings
        ]
        composed = functools.reduce(lambda first, second: first.compose(second), losses)
        return float(composed.get_epsilon_for_delta(delta))
    is_fixed = samplings[0].most is None
    if is_fixed and all(s.cohort_size == s.num_clients for s in samplings):
        return _epsilon_of_all(samplings, rounds, delta)
    import dp_accounting

    relations = dp_accounting.NeighboringRelation
    counted = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=relations.REPLACE_ONE if is_fixed else relations.ADD_OR_REMOVE_ONE
    )
    for sampling in samplings:
        counted.compose(_event(sampling), sampling.participations(rounds))
    epsilon = float(counted.get_epsilon(delta))
    return min(epsilon, _epsilon_of_all(samplings, rounds, delta)) if is_fixed else epsilon


def _epsilon_of_all(samplings: tuple[_Sampling, ...], rounds: int, delta: float) -> float:
    """Epsilon of replacing a client who is drawn whenever it can be.

    All rounds are then one Gaussian mechanism, whose epsilon is exact. A client who is drawn less often
    has no larger one. The bound by Rényi divergences can be above it, most of all with much noise.
    """
    import dp_accounting

    squares = (s.participations(rounds) * (2 / s.noise_multiplier) ** 2 for s in samplings)
    return float(dp_accounting.get_epsilon_gaussian(sum(squares) ** -0.5, delta))


def _event(sampling: _Sampling) -> Any:
    import dp_accounting

    z, cohort_size, num_clients, most, _ = sampling
    if most is None:
        gaussian = dp_accounting.GaussianDpEvent(z / 2)
        return dp_accounting.SampledWithoutReplacementDpEvent(num_clients, cohort_size, gaussian)
    gaussian = dp_accounting.GaussianDpEvent(z)
    return dp_accounting.PoissonSampledDpEvent(cohort_size / num_clients, gaussian)


def _interval(noise_multiplier: float) -> float:
    """The discretisation of privacy losses, which rounds them up.

    Losses are of size 1 / z^2, and so are the memory and the time of a fixed interval. A tenth of this
    interval changes epsilon by less than 0.0001 in 30 rounds, or by a few parts in 100,000 for z < 0.2.
    """
    return 1e-3 * max(1.0, 0.04 / noise_multiplier**2)


@functools.lru_cache(maxsize=256)
def _loss_of_a_round(sampling: _Sampling, interval: float) -> Any:
    """The privacy loss distribution of one round of a Poisson cohort; it takes seconds with a bound."""
    from dp_accounting.pld import privacy_loss_distribution as distributions

    z, cohort_size, num_clients, most, _ = sampling
    assert most is not None
    if most < num_clients:
        return distributions.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=num_clients,
            sampling_probability=cohort_size / num_clients,
            truncated_batch_size=most,
            noise_multiplier=z,
            value_discretization_interval=interval,
        )
    return distributions.from_gaussian_mechanism(
        z,
        sampling_prob=cohort_size / num_clients,
        value_discretization_interval=interval,
    )
