"""The settings on which a run's results depend, as dotted keys."""

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from experiments.studies.archive import Record
from experiments.studies.codistillation.paper_numbers import MODELS
from experiments.studies.record import WITHOUT_UNLABELLED
from fedcodist.config.registry import BASELINE

Settings = dict[str, Any]

# Settings in which runs of one sample may differ, since they do not change the training.
NOT_SETTINGS = (
    *("name", "run", "seed", "seeds", "notes", "full_rounds", "evaluation.*"),
    *("training.compression.spectra", "training.compression.gradient_spectra"),
)
# Settings that configs got later, with the value that runs before them had.
ADDED = {"algorithm.same_start": False}
UNLABELLED = ("data.unlabelled_folder", "data.num_unlabelled")
# A codistillation method's own settings.
OWN = ("algorithm.*", "pools.*.teaching.*", "pools.*.alpha")
# Settings in a method's config that the method does not read.
UNREAD: dict[str | None, tuple[str, ...]] = {
    **dict.fromkeys(WITHOUT_UNLABELLED, UNLABELLED),
    BASELINE: (*OWN, *UNLABELLED),
    "periodic_codistillation": (
        "algorithm.alpha",
        "algorithm.alpha_schedule",
        "algorithm.skip_at_alpha_one",
        "pools.*.alpha",
    ),
    "merged_codistillation": ("algorithm.period",),
}


_FOUND: dict[tuple[int, str | None], tuple[Mapping[str, Any], Settings]] = {}


def method_of(record: Record) -> str | None:
    """The name of the run's algorithm."""
    return record.config.get("algorithm", {}).get("name")


def settings(record: Record, model: str | None = None) -> Settings:
    """The settings besides the seed on which the run's results depend.

    With `model`, those on which this model's results depend, since FedAvg trains every model by itself.
    """
    # Every record is compared with every other one. The config is kept too: its id is its own meanwhile.
    key = (id(record.config), model)
    if key not in _FOUND:
        _FOUND[key] = (record.config, _settings(record, model))
    return _FOUND[key][1]


def _settings(record: Record, model: str | None) -> Settings:
    method = method_of(record)
    # A setting that is not set is treated like one that the config did not have at that time.
    set_ = {
        key: value
        for key, value in flat(record.config).items()
        if value is not None and not (key in ADDED and value == ADDED[key])
    }
    found = without(set_, (*NOT_SETTINGS, *UNREAD.get(method, ())))
    if model is not None and method == BASELINE:
        found = without(found, _other_pools(model))
    return {"algorithm.name": method, **found}


def read_by_fed_avg(record: Record, model: str) -> Settings:
    """The run's settings that FedAvg of this model reads too."""
    return without(settings(record), (*OWN, *UNLABELLED, *_other_pools(model)))


def without(found: Mapping[str, Any], patterns: Sequence[str]) -> Settings:
    """The settings whose keys match none of the patterns."""
    unread = tuple(patterns)
    return {key: value for key, value in found.items() if not _matches(key, unread)}


def differences(grouped: Sequence[Sequence[Record]]) -> list[str]:
    """For each group the settings that differ from other groups, such as `algorithm.alpha=0.5`."""
    each = [settings(group[0]) for group in grouped]
    keys = dict.fromkeys(key for one in each for key in one)
    differing = [k for k in keys if len({json.dumps(one.get(k)) for one in each}) > 1]
    return [", ".join(f"{key}={_text(one.get(key))}" for key in differing) for one in each]


def flat(value: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested settings by dotted keys."""
    found: Settings = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


@cache
def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    # Kept, since every record is compared with every other one and all have the same few keys.
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _other_pools(model: str) -> list[str]:
    return [f"pools.{other}.*" for other in MODELS if other != model]


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
