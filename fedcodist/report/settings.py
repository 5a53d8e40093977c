"""Settings of runs by their dotted names, and those in which runs differ."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcodist.report.runs import Run, mapping_of

# Settings in which two runs of one method may differ: the seed, and the run's name.
NOT_OF_A_METHOD = ("seed", "seeds", "name", "run", "workdir")
_SHOWN = 8  # digits of a checksum


def settings_of_run(run: Run) -> dict[str, Any]:
    """`settings_of` what determines the run."""
    return settings_of(with_identity(run))


def with_identity(run: Run) -> dict[str, Any]:
    """The run's config, and what environment.json says of the run that the config does not say.

    Of a run of the command, that is the precision, the checksums of prepared folders, and the code to
    which settings refer. Of a run of Python it is all of the experiment, since experiments of different
    networks, data or rounds would look the same, and a config that Python gives may say something else.
    The seeds are left out, since runs of one method differ in them.
    """
    identity = mapping_of(run.environment, "identity")
    settings = mapping_of(identity, "settings")
    whole = run.config
    if any(key in run.config for key in ("evaluation", "phase")):
        prepared = {
            name: value[:_SHOWN] if isinstance(value, str) else value
            for name, value in mapping_of(identity, "prepared").items()
        }
        whole = {**run.config, "precision": _precision(run.environment), "prepared": prepared}
        if "hyper" not in settings:  # they are described only of an experiment that Python made
            return whole
    if not identity:
        return whole
    settings = {key: value for key, value in settings.items() if key not in NOT_OF_A_METHOD}
    if "start" in settings:  # its values may depend on the seed, as initial values do
        settings["start"] = bool(settings["start"])
    return {**whole, "identity": {**identity, "settings": settings}}


def _precision(environment: Mapping[str, Any]) -> str:
    """The precision in which networks computed, in the order of the run's starts if it changed."""
    later = environment.get("resumed", [])
    starts = [environment, *(start for start in later if not start.get("only_reads"))]
    return ", then ".join(
        distinct(mapping_of(start, "plan").get("precision", "float32") for start in starts)
    )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config flattened to dotted keys, without those in which runs of one method may differ."""
    return {key: value for key, value in flatten(config).items() if key not in NOT_OF_A_METHOD}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one mapping with dotted keys; empty groups stay."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def differing_settings(
    settings: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]
) -> list[str]:
    """One run's `name=value` of the settings that differ among several; a name is short if it can be."""
    differing = differing_keys(alike)
    short = [key.rsplit(".", 1)[-1] for key in differing]
    return [
        f"{last if short.count(last) == 1 else key}={shown_setting(settings, key)}"
        for key, last in zip(differing, short, strict=True)
    ]


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ."""
    keys = distinct(key for flat in settings for key in flat)
    return [key for key in keys if len({shown_setting(flat, key) for flat in settings}) > 1]


def shown_setting(settings: Mapping[str, Any], key: str) -> str:
    """A setting as text, a dash where it is missing."""
    if key not in settings:
        return "–"
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order."""
    return list(dict.fromkeys(values))
