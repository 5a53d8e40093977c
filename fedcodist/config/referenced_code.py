"""The code that a config refers to, as a part of its run's identity."""

import re
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.references import is_reference, value_at
from fedcodist.run.identity import described

# Settings that may be references and on which a run's results depend. Loggers only watch.
_OF_RESULTS = re.compile(
    r"data\.(name|preprocess|evaluation_preprocess|partition\.name)|algorithm\.name|training\.method"
    r"|pools\.\w+\.model|training\.fed_kd\.teacher|parties\.networks(\[\d+\])?|metrics\.\w+"
    r"|callbacks\.\w+\.name"
)


def described_references(config: ConfigDict) -> dict[str, Any]:
    """Setting -> what its reference is made of, of all references on which a run's results depend.

    It is part of a run's identity: after an edit of the code the run is another one.
    """
    return {
        setting: described(reference, value_at(setting, reference))
        for setting, reference in _values(config)
        if is_reference(reference) and _OF_RESULTS.fullmatch(setting)
    }


def _values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every setting; of a list every entry."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _values(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield from ((f"{prefix}{name}[{index}]", entry) for index, entry in enumerate(value))
        else:
            yield f"{prefix}{name}", value
