"""The code that a config refers to, as a part of its run's identity."""

import re
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.references import is_reference, value_at
from fedcodist.config.registry import Entry, algorithm_entry, client_entry, function_of
from fedcodist.config.walk import settings_of
from fedcodist.run.described_code import described

# Settings that may be references and on which a run's results depend. Loggers only watch.
_OF_RESULTS = re.compile(
    r"data\.(name|preprocess|evaluation_preprocess|partition\.name)"
    r"|algorithm\.(name|divergence|server_model|optimizer|distillation_optimizer|generator_optimizer)"
    r"|training\.(method|client_optimizer|server_optimizer|server_schedule|fed_kd\.teacher)"
    r"|pools\.[^.]+\.model"
    r"|parties\.networks(\[\d+\])?|metrics\.[^.]+"
    r"|(callbacks|schedules)\.[^.]+\.name"
)


def described_references(config: ConfigDict) -> dict[str, Any]:
    """Setting -> description of the code to which it refers, if a run's results depend on this code.

    Methods that a module of `config.methods` registers are included. The descriptions are part of a
    run's identity: after an edit of the code the run is another one.
    """
    code = {
        setting: described(reference, _code_at(setting, reference))
        for setting, reference in _values(config)
        if is_reference(reference) and _OF_RESULTS.fullmatch(setting)
    }
    return code | {
        setting: described(entry.name, function_of(entry))
        for setting, entry in _entries(config)
        if setting not in code and not function_of(entry).__module__.startswith("fedcodist.")
    }


def _code_at(setting: str, reference: str) -> Any:
    """What a reference names; of a method's Entry its function, which the entry may name as text."""
    value = value_at(setting, reference)
    return function_of(value) if isinstance(value, Entry) else value


def _entries(config: ConfigDict) -> Iterator[tuple[str, Entry]]:
    """The methods that the config names, by their settings."""
    if config.get("algorithm") is not None:
        yield "algorithm.name", algorithm_entry(config)
    if config.get("training") is not None:
        yield "training.method", client_entry(config)


def _values(config: ConfigDict) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting, but of a list those of its entries."""
    for path, value in settings_of(config):
        if isinstance(value, list | tuple):
            yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(value))
        else:
            yield path, value
