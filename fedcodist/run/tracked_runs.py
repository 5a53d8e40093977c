"""Shared code of loggers to services: identifiers of their runs, one per seed, and final metrics."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcodist.core.files import write_atomically


class LoggerError(RuntimeError):
    """A service to which metrics are logged cannot be used. The message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class TrackedRuns:
    """Seed -> identifier of its run, in a file, so that a resumed run continues the same ones."""

    def __init__(self, path: Path):
        self._path = path
        self._ids: dict[str, str] | None = None

    def id_of(self, seed: int, create: Callable[[], str]) -> str:
        """The seed's identifier; made by `create` the first time."""
        if (known := self.known(seed)) is not None:
            return known
        self._read()[str(seed)] = create()
        try:
            write_atomically(self._path, json.dumps(self._ids).encode())
        except OSError as error:
            raise LoggerError(f"cannot write {self._path}: {error.strerror}.") from error
        return self._read()[str(seed)]

    def known(self, seed: int) -> str | None:
        """The seed's identifier; None if none was made."""
        return self._read().get(str(seed))

    def _read(self) -> dict[str, str]:
        if self._ids is None:
            try:
                text = self._path.read_text(encoding="utf-8") if self._path.exists() else "{}"
                ids = json.loads(text)
            except (OSError, ValueError) as error:
                raise LoggerError(f"cannot read {self._path}: {error}.") from error
            if not isinstance(ids, dict):
                raise LoggerError(f"cannot read {self._path}: it is no JSON object.")
            self._ids = ids
        return self._ids


def seeds_of(config: Mapping[str, Any]) -> range:
    """The seeds that a config runs."""
    first = config.get("seed", 0)
    return range(first, first + config.get("seeds", 0))


def final_scalars(summary: Mapping[str, Any], index: int) -> dict[str, float]:
    """`<model>/<split>/<metric>` -> the final value of a seed, by its index among the run's seeds."""
    return {
        f"{model}/{split}/{metric}": values[index]
        for model, splits in summary["final"].items()
        for split, metrics in splits.items()
        for metric, values in metrics.items()
        if values[index] is not None
    }
