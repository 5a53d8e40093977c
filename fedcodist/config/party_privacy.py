"""Makes the parties of a config private as its `algorithm.privacy` says."""

from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.config_errors import named
from fedcodist.core.aggregation import Reduce
from fedcodist.core.checks import check_number
from fedcodist.core.method import PARTIES, PrivateCohorts
from fedcodist.privacy.accounting import calibrated_noise_multiplier
from fedcodist.privacy.private_parties import private_classes, private_scores

# Method -> the private sum of what its parties send.
_PRIVATE_SUMS: dict[str, Callable[..., Reduce]] = {
    "ds_fl": private_scores,
    "fd": private_classes,
    "fed_md": private_scores,
    "fed_proto": private_classes,
}


def party_noise_multiplier(config: ConfigDict, num_parties: int) -> float | None:
    """The noise multiplier of a config's parties; None where `algorithm.privacy` is not set.

    If it is not a setting, it is the least with which all rounds fit into the budget `epsilon`. All
    parties take part in every round.

    Raises:
      ValueError, TypeError, ImportError: names the setting.
    """
    settings = config.algorithm.get("privacy")
    if settings is None:
        return None
    if settings.get("noise_multiplier") is not None:
        return float(settings.noise_multiplier)
    if settings.get("epsilon") is None:
        raise ValueError(
            "algorithm.privacy must have a noise_multiplier, or an epsilon from which it follows."
        )
    everyone = PrivateCohorts(np.arange(num_parties), 0.0, num_parties, num_parties)
    with named("algorithm.privacy."):
        return calibrated_noise_multiplier(
            settings.epsilon, settings.delta, config.rounds, {PARTIES: everyone}
        )


def private_sum(config: ConfigDict, noise_multiplier: float) -> Reduce:
    """The private sum of what the parties of a config's method send.

    Raises:
      ValueError, TypeError: names the setting.
    """
    name, clip = config.algorithm.name, config.algorithm.privacy.clip
    if name not in _PRIVATE_SUMS:
        raise ValueError(
            f"algorithm.privacy must be of one of {sorted(_PRIVATE_SUMS)}, got algorithm.name={name}."
        )
    own: dict[str, Any] = {}
    if name == "fed_md" and (weights := config.algorithm.get("weights")) is not None:
        for index, weight in enumerate(weights):
            check_number(f"algorithm.weights[{index}]", weight, low=0)
        if not any(weights):
            raise ValueError("algorithm.weights must not be all 0.")
        own["max_weight"] = float(max(weights) / sum(weights))  # FedMD divides them by their sum
    if name == "fed_proto" and config.algorithm.get("weighting", "examples") != "parties":
        # A party's counts would be cut to one, and so its weight by examples would be lost.
        raise ValueError("algorithm.weighting must be 'parties' with algorithm.privacy.")
    with named("algorithm.privacy."):
        return _PRIVATE_SUMS[name](clip, noise_multiplier, **own)
