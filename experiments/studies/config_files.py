"""The present settings of the config files beside this package."""

import functools
import importlib
import json
from typing import Any

# Groups of a config that are not written to a run's config.json.
NOT_RECORDED = ("execution", "loggers")


@functools.cache
def config_of(experiment: str, run: str) -> dict[str, Any] | None:
    """A run's config as records have it; None if there is no such file, or no such run in it."""
    name = f"experiments.configs.{experiment}"
    try:
        config = importlib.import_module(name).get_config(run)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    except ValueError:  # a run that the file had in an earlier version
        return None
    values = json.loads(config.to_json_best_effort())
    return {name: value for name, value in values.items() if name not in NOT_RECORDED}
