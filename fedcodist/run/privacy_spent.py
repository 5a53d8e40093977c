"""A run's epsilon in metrics lines and the summary, and the end of a run whose budget is spent.

Epsilon is a function of the round alone, so a resumed run continues with the correct value.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedcodist.core.method import PARTIES, PrivateCohorts
from fedcodist.privacy.accounting import (
    PrivacyBudget,
    check_accountant,
    relation,
    rounds_within,
    spent,
)
from fedcodist.run.metrics_lines import Record


class PrivacyMeter:
    """Counts the epsilon of a run's rounds; does nothing if no method is private.

    Attributes:
      last_round: the last round that the budget allows, at most the run's.
    """

    def __init__(
        self, pools: Mapping[str, PrivateCohorts], rounds: int, budget: PrivacyBudget | None
    ) -> None:
        self._pools = pools
        self._budget = budget or PrivacyBudget()
        self.last_round = rounds_within(pools, rounds, self._budget) if pools else rounds

    def with_epsilon(
        self, round: int, records: Sequence[Record], models: Collection[str] | None = None
    ) -> list[Record]:
        """The metrics lines with `epsilon`, the largest of any client; null if infinite.

        Only lines of `models` get it, or all lines if `models` is None.
        """
        if not self._pools:
            return list(records)
        epsilon = {"epsilon": _as_json(spent(self._pools, round, self._budget).epsilon)}
        is_named = lambda model: models is None or model in models
        return [record | (epsilon if is_named(record["model"]) else {}) for record in records]

    def why_stopped(self, round: int) -> str:
        """Why the run ends after this round; empty where the budget allows another one."""
        if not self._pools or self._budget.epsilon is None or round < self.last_round:
            return ""
        epsilon = spent(self._pools, round, self._budget).epsilon
        return (
            f"the privacy budget is spent: epsilon {epsilon:.4g} of {self._budget.epsilon:g} at delta "
            f"{self._budget.delta:g}, and the next round would exceed it"
        )

    def summary(self, round: int) -> dict[str, Any]:
        """The part `privacy` of summary.json; empty if no method is private."""
        if not self._pools:
            return {}
        spending = spent(self._pools, round, self._budget)
        return {
            "privacy": {
                "epsilon": _as_json(spending.epsilon),
                "delta": float(self._budget.delta),
                "budget": None if self._budget.epsilon is None else float(self._budget.epsilon),
                "neighbours": relation(self._pools),
                "by_pools": {
                    names: {"epsilon": _as_json(epsilon), "clients": spending.clients[names]}
                    for names, epsilon in spending.by_pools.items()
                },
                "noise_multiplier": {
                    name: float(pool.noise_multiplier) for name, pool in self._pools.items()
                },
            }
        }


def check_privacy(experiment: Any) -> None:
    """Raises ValueError, TypeError or ImportError, one line, for epsilon that cannot be counted."""
    budget, pools = experiment.privacy, experiment.algorithm.privacy
    if budget is not None:
        if not isinstance(budget, PrivacyBudget):
            raise TypeError(f"privacy must be a PrivacyBudget, got {type(budget).__name__}.")
        budget.check("privacy")
        if not pools:
            raise ValueError(
                "privacy must be None for an algorithm without a private method: see fedcodist.private."
            )
    if any(pool.select not in (None, experiment.algorithm.select) for pool in pools.values()):
        raise ValueError(
            "algorithm.select must be the algorithm's own where it is private: epsilon is computed for "
            "the clients that it draws."
        )
    # Parties' rounds before `start` may be pre-training, in which they share nothing. Their algorithms
    # have no client states; a pool has, whatever its name.
    of_parties = set(pools) == {PARTIES} and not experiment.algorithm.client_states
    if experiment.start is not None and pools and not of_parties:
        raise ValueError(
            "start must be None for a private algorithm: its earlier rounds would not be counted, and "
            "their noise would be drawn again."
        )
    if pools:
        check_accountant(pools, (budget or PrivacyBudget()).accountant)


def _as_json(epsilon: float) -> float | None:
    return float(f"{epsilon:.6g}") if math.isfinite(epsilon) else None
