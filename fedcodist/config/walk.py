"""Walks through a config. Every setting has a dotted path, such as `training.epochs`."""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict


def settings_of(config: ConfigDict) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting, without the groups."""
    for path, value in settings_and_groups_of(config):
        if not isinstance(value, ConfigDict):
            yield path, value


def settings_and_groups_of(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every setting, and of every group before the settings in it."""
    for name, value in config.items():
        path = f"{prefix}{name}"
        yield path, value
        if isinstance(value, ConfigDict):
            yield from settings_and_groups_of(value, f"{path}.")
