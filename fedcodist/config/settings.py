"""Checks all settings of a config before anything is loaded, by the table of `allowed_settings`.

Builders check what depends on other settings or on the data. This module checks the rest: that there is
such a setting, its type, and the range in which a value makes sense for any method.
"""

import difflib
import json
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.allowed_settings import ALLOWED, GROUPS, OPTIONAL_GROUPS
from fedcodist.config.data_settings import OF_ALL
from fedcodist.config.references import is_reference
from fedcodist.config.registry import BASELINE, ENTRIES, is_of_the_library
from fedcodist.config.walk import settings_and_groups_of
from fedcodist.core.checks import check_names, shown

# Groups that only the library reads.
_CLOSED = (
    "evaluation.",
    "execution.",
    "parties.",
    "phases.",
    "pools.",
    *(
        f"{group}.{part}."
        for group in ("training", "algorithm")
        for part in ("privacy", "compression")
    ),
)
# Arguments of functions, which are checked when these are called.
_OF_FUNCTIONS = ("parties.graph.", "data.partition.")


def check_settings(config: ConfigDict) -> None:
    """Raises ValueError or TypeError that names a setting of another type or outside its range.

    Settings that no part of the library reads, such as a config's own notes, must only be storable as
    JSON, since they are written to a run's config.json. So must the arguments of a user's function that
    loads data. Groups that only the library reads have no settings of one's own, so a misspelt one is an
    error.
    """
    if isinstance(config.get("pools"), ConfigDict):
        check_names("pools", config.pools)
    has_own_data = is_reference(_value_or_none(config, "data", "name"))
    closed = _CLOSED if has_own_data else (*_CLOSED, "data.")
    for path, value in settings_and_groups_of(config):
        if (has_own_data and _is_of_loader(path)) or _is_of_own_method(path, config):
            if not isinstance(value, ConfigDict):
                _check_storable(path, value)
            continue
        if is_group := path in GROUPS or _matching(path, GROUPS):
            if not isinstance(value, ConfigDict) and not (
                value is None and path in OPTIONAL_GROUPS
            ):
                raise TypeError(f"{path} must be a group of settings, got {shown(value)}.")
        elif check := ALLOWED.get(path) or ALLOWED.get(_matching(path, ALLOWED)):
            check(path, value)
        elif nearest := _nearest_setting(path, value, config, closed):
            raise ValueError(f"{path} is no setting; did you mean {nearest}?")
        elif isinstance(value, ConfigDict) and _is_unread_group(path, config):
            warnings.warn(
                f"{path} is not read in this run: neither the library nor its method has such a group.",
                stacklevel=2,
            )
        if not is_group and not isinstance(value, ConfigDict):
            _check_storable(path, value)


def _nearest_setting(path: str, value: Any, config: ConfigDict, closed: tuple[str, ...]) -> str:
    """The setting that is meant by a path outside the table; '' where a config may have such a path.

    Args:
      path, value: of a setting or of a group.
      config: the whole config.
      closed: beginnings of paths that only the library reads.
    """
    is_setting = not isinstance(value, ConfigDict)
    if not is_setting and (nearest := _misspelt_group(path, config)):
        return nearest
    is_closed = path.startswith(closed) and not path.startswith(_OF_FUNCTIONS)
    # A group in `training` may be that of a method of one's own.
    is_of_training = path.rpartition(".")[0] == "training" and is_setting
    if is_closed or (is_of_training and _only_library_reads_training(config)):
        known = [name for name in ALLOWED if name.startswith((*closed, "training."))]
        (nearest,) = difflib.get_close_matches(path, known, n=1, cutoff=0)
        if nearest.startswith("pools.*.") and path.count(".") > 1:
            nearest = nearest.replace("*", path.split(".")[1], 1)
        return nearest
    return "" if "." in path else _misplaced(path)


def _only_library_reads_training(config: ConfigDict) -> bool:
    """Whether no setting of a method of one's own can be in `training`, but for groups.

    The settings of such a method are in its group, if it has one. Parties have theirs in `algorithm`.
    """
    method = str(_value_or_none(config, "training", "method")).rpartition(":")[2]
    return "parties" in config or isinstance(_value_or_none(config, "training", method), ConfigDict)


def _is_of_own_method(path: str, config: ConfigDict) -> bool:
    """Whether the path is in the group of a user's method, which may be called as one of the library."""
    method = _value_or_none(config, "training", "method")
    return is_reference(method) and path.startswith(f"training.{method.rpartition(':')[2]}.")


def _is_of_loader(path: str) -> bool:
    """Whether the path is an argument of a user's function that loads data, or within one."""
    group, _, name = path.partition(".")
    return group == "data" and name.partition(".")[0] not in ("", *OF_ALL)


def _misspelt_group(path: str, config: ConfigDict) -> str:
    """The group whose name the path nearly has, since without it a run would go on with defaults.

    A method of one's own may have a group with its name.
    """
    chosen = (
        _value_or_none(config, "training", "method"),
        _value_or_none(config, "algorithm", "name"),
    )
    *of, name = path.split(".")
    if is_group(path) or name in [str(method).rpartition(":")[2] for method in chosen]:
        return ""
    # A star stands for the name of a pool or a domain.
    known = [group.split(".") for group in sorted(GROUPS)]
    beside = [group for group in known if len(group) == len(of) + 1]
    spelt = [
        ".".join([*of, group[-1]])
        for group in beside
        if fnmatchcase(path, ".".join([*group[:-1], "*"]))
    ]
    return next(iter(difflib.get_close_matches(path, spelt, n=1, cutoff=0.9)), "")


def _misplaced(name: str) -> str:
    """The settings that are meant by a name outside of groups; '' for a name of the config's own."""
    known = [*ALLOWED, *GROUPS]
    outside = [path for path in known if "." not in path]
    if nearest := difflib.get_close_matches(name, outside, n=1, cutoff=0.9):
        return nearest[0]
    same = [path for path in known if path.rpartition(".")[2] == name]
    return " or ".join(sorted(same, key=lambda path: (path.startswith("phases."), path))[:3])


def is_group(path: str) -> bool:
    """Whether some part of the library, or a method of this name, has such a group of settings."""
    return path in GROUPS or path.rpartition(".")[2] in ENTRIES


def _is_unread_group(path: str, config: ConfigDict) -> bool:
    """Whether the path is a group in `training` or `algorithm` that no method of the library reads.

    It may be that of a method of one's own, which another run of the config has. Such a method may also
    have groups as arguments, so `bind` looks at its settings.
    """
    of = path.rpartition(".")[0]
    chosen = {
        "training": str(_value_or_none(config, "training", "method") or BASELINE),
        "algorithm": str(_value_or_none(config, "algorithm", "name")),
    }
    return of in chosen and is_of_the_library(chosen[of]) and not is_group(path)


def _value_or_none(config: ConfigDict, group: str, name: str) -> Any:
    """A setting's value; None where it or its group is missing, or the group is something else."""
    return config[group].get(name) if isinstance(config.get(group), ConfigDict) else None


def _matching(path: str, patterns: Mapping[str, Any] | set[str]) -> str:
    """The pattern that the path matches, with a star for a pool's or a domain's name; '' for none."""
    parts = path.count(".")
    return next(
        (p for p in patterns if "*" in p and p.count(".") == parts and fnmatchcase(path, p)), ""
    )


def _check_storable(path: str, value: Any) -> None:
    """Raises ValueError or TypeError unless config.json can hold the value and give it back."""
    try:
        json.dumps(value, allow_nan=False, default=_as_dictionary)
    except ValueError:
        raise ValueError(f"{path} must be finite, got {shown(value)}.") from None
    except (TypeError, RecursionError):
        raise TypeError(
            f"{path} must be numbers, text, True, False, None, or lists of these, got {shown(value)}."
        ) from None


def _as_dictionary(value: Any) -> dict[str, Any]:
    """A group inside a list, such as one of several graphs, for `json.dumps`."""
    if isinstance(value, ConfigDict):
        return value.to_dict()
    raise TypeError
