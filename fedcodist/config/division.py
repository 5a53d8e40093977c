"""`data.division_per_seed`: every seed divides the data among clients in another way.

Seeds that are trained in one program share their data, but FedSDD's paper has a division for each seed.
With this setting a run has one seed, and `data.seed` + `seed` takes the place of `data.seed`.
`fedcodist.report` and `experiments.studies` count runs that differ only in their seed as one method's.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.data_partition import PARTITIONS
from fedcodist.config.references import choice_or_reference, function_at, is_reference, signature_of

# Data whose clients are those of the folder, unless they are dealt anew.
_WITH_CLIENTS = ("prepared", "prepared_text")
# Settings that draw with a seed in any partition.
_DRAW_OF_PARTITIONS = ("examples", "validation", "feature_noise", "feature_rotations")


def divided(config: ConfigDict) -> ConfigDict:
    """Returns the config with the `data.seed` of its seed, or as it is where seeds share a division.

    Applied again it changes nothing.

    Raises:
      ValueError: names `seeds` if there are several, or `data.division_per_seed` if no seed is read.
      TypeError: names the setting if it is neither True nor False.
    """
    per_seed = config.data.get("division_per_seed", False)
    if not isinstance(per_seed, bool):
        raise TypeError(f"data.division_per_seed must be True or False, got {per_seed!r}.")
    if not per_seed:
        return config
    if config.seeds != 1:
        raise ValueError(
            f"seeds must be 1 with data.division_per_seed, since seeds of one program share their data, "
            f"got {config.seeds}; run them one by one, with --config.seed=0, 1, ... and a folder each."
        )
    if not _is_drawn(config.data):
        raise ValueError(
            f"data.division_per_seed must be False with data.name={config.data.name!r}, whose clients "
            "are the same for every seed: neither its function nor data.partition draws with a seed."
        )
    of_seed = config.copy_and_resolve_references()
    of_seed.data.seed = config.data.seed + config.seed
    of_seed.data.division_per_seed = False
    return of_seed


def _is_drawn(data: ConfigDict) -> bool:
    """Whether which examples a client has depends on `data.seed`."""
    if data.get("client_test_share") is not None or data.get("domains") is not None:
        return True
    if (partition := data.get("partition")) is not None:
        deal = choice_or_reference("data.partition.name", partition.name, PARTITIONS)
        if _has_seed(deal) or any(partition.get(name) for name in _DRAW_OF_PARTITIONS):
            return True
    if is_reference(data.name):
        return _has_seed(function_at("data.name", data.name))
    return data.name not in _WITH_CLIENTS


def _has_seed(function: Callable[..., Any]) -> bool:
    return "seed" in signature_of(function).parameters
