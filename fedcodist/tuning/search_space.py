"""Search spaces: the floats of a config that a tuner varies, with their bounds.

A dimension is named by the setting that it varies, such as `pools.small.server_learning_rate`. A star
stands for every name in its place: `pools.*.client_learning_rate` is one value that all pools share.

A config may replace its algorithm's space:

    config.tuning = dict(
        space=(
            ("pools.*.client_learning_rate", 0.01, 0.1, "log"),
            ("algorithm.alpha", 0.3, 0.9, "linear"),
        )
    )
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedcodist.config.command_line import nearest_name
from fedcodist.config.config_errors import as_settings, named
from fedcodist.config.registry import BASELINE, CODISTILLATION, OF_LEVELS
from fedcodist.config.walk import settings_of
from fedcodist.core.checks import shown


class Dimension(NamedTuple):
    """One value that is searched.

    Attributes:
      low, high: inclusive bounds.
      scale: 'log' or 'linear': the scale on which values are uniform.
      settings: dotted names of all settings of the config that take the value.
    """

    low: float
    high: float
    scale: str
    settings: tuple[str, ...]


Space = dict[str, Dimension]
# config -> (structure, floats) of what its algorithm's compiled programs take
Traced = Callable[[ConfigDict], tuple[Any, Sequence[float]]]


def search_space(config: ConfigDict) -> Space:
    """The search space of the config, or that of its algorithm.

    Raises:
      ValueError: bounds out of range, or a setting that does not exist, is no float or is named twice.
    """
    for name in config.get("tuning") or ():
        if name != "space":
            raise ValueError(f"tuning has one setting, 'space', got {name!r}.")
    entries = default_space(config) if is_default(config) else config.tuning.space
    if not isinstance(entries, list | tuple):
        raise TypeError(
            f"tuning.space must be a list of (setting, low, high, scale), got {shown(entries)}."
        )
    settings = flat(config)
    space: Space = {}
    for entry in entries:
        name, low, high, scale = _checked(entry)
        if name in space:
            raise ValueError(f"tuning.space names {name!r} twice.")
        space[name] = Dimension(low, high, scale, _matching(name, settings))
    if not space:
        raise ValueError("tuning.space must name at least one setting, got none.")
    taken: dict[str, str] = {}
    for name, dimension in space.items():
        for setting in dimension.settings:
            if setting in taken:
                raise ValueError(f"tuning.space: {taken[setting]!r} and {name!r} set {setting}.")
            taken[setting] = name
            group, last = _group(config, setting)
            if (kind := group.get_type(last)) is not float:
                raise ValueError(
                    f"tuning.space names {setting!r}, which must be a float, is {kind.__name__}."
                )
    return space


def is_default(config: ConfigDict) -> bool:
    """Whether the config leaves the space to its algorithm."""
    group = config.get("tuning")
    return group is None or group.get("space") is None


def default_space(config: ConfigDict) -> list[tuple[str, float, float, str]]:
    """The space of Knowledge Codistillation, appendix F.

    The paper searches the decay in (0, 1) on a log scale; here it starts at 1e-3. It searches rates in
    (1e-4, 0.1), with Adam as the server's optimizer. Where a rate of the config lies outside, as that of
    an SGD server does, its bounds are widened to ten times that rate, or to a tenth of it.
    """
    if config.get("pools") is None:
        raise ValueError(
            f"tuning.space must be set for algorithm.name={config.algorithm.name!r}, which has no pools."
        )
    settings, pools = flat(config), list(config.pools)

    def rate(name: str) -> tuple[str, float, float, str]:
        values = [value for key in _matching(name, settings) if (value := settings[key])]
        low = min([1e-4, *(value / 10 for value in values if value < 1e-4)])
        high = max([1e-1, *(value * 10 for value in values if value > 1e-1)])
        return name, low, high, "log"

    space = [rate("pools.*.client_learning_rate")]
    if config.algorithm.name in OF_LEVELS:  # all have one server
        return [*space, rate("pools.*.server_learning_rate")]
    space += [rate(f"pools.{pool}.server_learning_rate") for pool in pools]
    if config.algorithm.name in CODISTILLATION:
        space += [rate(f"pools.{pool}.teaching.learning_rate") for pool in pools]
        teaching = {
            "decay": (1e-3, 1.0, "log"),
            "temperature": (0.1, 10.0, "log"),
            "interpolation": (1e-3, 0.5, "log"),
        }
        for name, bounds in teaching.items():
            space += [(f"pools.{pool}.teaching.{name}", *bounds) for pool in pools]
    if config.algorithm.name == "merged_codistillation":
        space.append(("algorithm.alpha", 0.05, 0.95, "linear"))
    return space


def checked_space(config: ConfigDict, space: Space, traced: Traced) -> Space:
    """The dimensions of a space that change an argument of the compiled programs.

    All trials share one program, so changes of any other value would be ignored silently. A default
    space loses such dimensions; a space of the config's own must not have any.

    Args:
      config: the experiment.
      space: its search space.
      traced: raises ValueError for values out of range.

    Raises:
      ValueError: a dimension without an effect, one that also changes another setting, or one for which
        trials would need another program than the config.
    """
    structure, _ = traced(config)
    kept = {}
    for name, dimension in space.items():
        bounds = (dimension.low, dimension.high)
        ends = [with_values(config, space, {name: bound}) for bound in bounds]
        _check_alone(config, name, dimension, ends)
        with named(f"tuning.space {name!r}: "), as_settings(config):
            structures, floats = zip(*map(traced, ends), strict=True)
        for bound, structure_at_bound in zip(bounds, structures, strict=True):
            if structure_at_bound != structure:
                raise ValueError(
                    f"tuning.space names {name!r}, whose bounds must need the same compiled program as "
                    f"the config's {flat(config)[dimension.settings[0]]!r}, {bound:g} does not."
                )
        if list(floats[0]) != list(floats[1]):
            kept[name] = dimension
        elif not is_default(config):
            raise ValueError(
                f"tuning.space names {name!r}, which changes none of the floats that trials of "
                f"{method_name(flat(config))} may differ in."
            )
    if not kept:
        raise ValueError(
            f"tuning.space must be set for {method_name(flat(config))}, "
            "as no dimension of the default space has an effect."
        )
    return kept


def _check_alone(
    config: ConfigDict, name: str, dimension: Dimension, ends: Sequence[ConfigDict]
) -> None:
    before = flat(config)
    others = {
        setting
        for end in ends
        for setting, value in flat(end).items()
        if value != before[setting] and setting not in dimension.settings
    }
    if others:
        raise ValueError(
            f"tuning.space names {name!r}, which also changes {min(others)!r} in this config."
        )


def method_name(settings: Mapping[str, Any]) -> str:
    """The name of the server's method, or of the clients' method if the server takes means."""
    name = settings["algorithm.name"]
    return (settings.get("training.method") or name) if name == BASELINE else name


def with_values(config: ConfigDict, space: Space, values: Mapping[str, float]) -> ConfigDict:
    """A copy of the config with the values of a trial, by dimension."""
    changed = copy.deepcopy(config)
    for name, value in values.items():
        for setting in space[name].settings:
            group, last = _group(changed, setting)
            group[last] = float(value)
    return changed


def own_values(config: ConfigDict, space: Space) -> dict[str, float]:
    """The config's values by dimension, without those that are outside the space."""
    settings, values = flat(config), {}
    for name, dimension in space.items():
        choices = {settings[setting] for setting in dimension.settings}
        value = choices.pop()
        if not choices and value is not None and dimension.low <= value <= dimension.high:
            values[name] = float(value)
    return values


def overrides(space: Space, values: Mapping[str, float]) -> list[str]:
    """Command-line arguments that set a trial's values, to the last bit."""
    return [
        f"--config.{setting}={value!r}"
        for name, value in values.items()
        for setting in space[name].settings
    ]


def flat(config: ConfigDict) -> dict[str, Any]:
    """Every setting's value by its dotted name."""
    return dict(settings_of(config))


def _group(config: ConfigDict, setting: str) -> tuple[ConfigDict, str]:
    *groups, last = setting.split(".")
    for name in groups:
        config = config[name]
    return config, last


def _matching(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    patterns = name.split(".")
    matching = tuple(
        setting
        for setting in settings
        if len(keys := setting.split(".")) == len(patterns)
        and all(pattern in ("*", key) for pattern, key in zip(patterns, keys, strict=True))
    )
    if not matching:
        nearest = nearest_name(name, list(settings))
        raise ValueError(
            f"tuning.space names {name!r}, which is no setting of the config; did you mean {nearest!r}?"
        )
    return matching


def _checked(entry: Any) -> tuple[str, float, float, str]:
    try:
        name, low, high, scale = entry
        low, high = float(low), float(high)
        well_formed = isinstance(name, str) and scale in ("log", "linear")
    except (TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise ValueError(
            f"tuning.space must hold (setting, low, high, 'log' or 'linear'), got {entry!r}."
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"tuning.space: {name} must have finite bounds low < high, got {entry!r}.")
    if scale == "log" and low <= 0:
        raise ValueError(f"tuning.space: {name} must be above 0 on a log scale, got {low:g}.")
    return name, low, high, scale
