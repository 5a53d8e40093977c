"""Training stops where an update or a model is not finite."""

from collections.abc import Mapping

import jax
import numpy as np

from fedcodist.core.method import FederatedAlgorithm
from fedcodist.run.metrics_lines import FINITE

# A method of parties tells by `finite_model` of what its server keeps, which is of no single party.
_WHAT = {"finite": "update", "finite_model": "model or server state"}
_STOPPED = "training stopped, the last good checkpoint stays. Lower learning rates may help."


class TrainingDiverged(RuntimeError):
    """An update was not finite. The message names the round and the pool."""


def check_finite(
    round: int, history: Mapping[str, np.ndarray], seeds: np.ndarray, algorithm: FederatedAlgorithm
) -> None:
    """Raises TrainingDiverged that names the first pool, in the first round, that was not finite."""
    # In a round, clients' updates are checked before the models made of them, which may be of other
    # pools.
    bad = [
        (index, pool, seed, _WHAT[metric])
        for metric in FINITE
        for pool in algorithm.communication
        if metric == "finite" or f"{pool}/{metric}" in history
        for seed, index in np.argwhere(~history[f"{pool}/{metric}"])
    ]
    if bad:
        index, pool, seed, what = min(bad, key=lambda entry: entry[0])
        raise TrainingDiverged(
            f"non-finite {what} in round {round + index + 1}, pool {pool!r}, seed {seeds[seed]}: "
            f"{_STOPPED}"
        )


def check_finite_models(round: int, finite: Mapping[str, jax.Array], seeds: np.ndarray) -> None:
    """Raises TrainingDiverged for a model that is not finite after codistillation or a server update."""
    for model, good in finite.items():
        if not np.all(good):
            raise TrainingDiverged(
                f"non-finite model by round {round}, model {model!r}, seed {seeds[np.argmin(good)]}: "
                f"{_STOPPED}"
            )
