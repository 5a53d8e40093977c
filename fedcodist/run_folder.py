"""A run's folder: config, metrics, summary and environment as JSON, and its checkpoints."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from fedcodist.checkpoint import write_atomically

_PACKAGES = ("fedcodist", "jax", "jaxlib", "flax", "optax", "chex", "ml-collections", "numpy")


class RunFolderError(ValueError):
    """The folder belongs to another run; the message is one line that says how they differ."""


class RunFolder:
    """Reads and writes one run's files.

    `metrics.jsonl` holds no clock times: a resumed run ends with the same bytes as one that was never
    stopped.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self._writes = writes

    def claim(self, config: Mapping[str, Any], plan: Mapping[str, Any], change_plan: bool) -> None:
        """Makes the folder this run's, or checks that it already is.

        Raises:
          RunFolderError: config.json is another experiment's, or the execution plan differs (the
            bits would) and `change_plan` does not allow it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run folder {self.path} is a file.")
        config, plan = json.loads(json.dumps(config)), json.loads(json.dumps(plan))
        for unfinished in self.path.glob(".*.json.*"):
            unfinished.unlink()
        if (self.path / "config.json").exists():
            if difference := _first_difference(self._read("config.json"), config):
                raise RunFolderError(
                    f"run folder {self.path} belongs to another config: {difference}. "
                    "Use another --workdir, or the same settings."
                )
            if (self.path / "environment.json").exists() and not change_plan:
                theirs = self._read("environment.json")["plan"]
                if difference := _first_difference(theirs, plan):
                    raise RunFolderError(
                        f"run folder {self.path} belongs to another execution plan: {difference}. "
                        "Results would differ in the last bits; --change_plan resumes all the same."
                    )
        elif self.path.exists() and any(path.name != "logs" for path in self.path.iterdir()):
            raise RunFolderError(f"folder {self.path} is not empty and holds no run.")
        self._write("config.json", config)
        environment = _environment(plan)
        if (self.path / "environment.json").exists():
            # What started the run stays; what continues it is added.
            first = self._read("environment.json")
            environment = {
                **first,
                "plan": plan,
                "resumed": [*first.get("resumed", []), environment],
            }
        self._write("environment.json", environment)

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Appends one line per record; returns the length of the file.

        Raises:
          RunFolderError: the disk is full or the file cannot be written.
        """
        if not self._writes:
            return 0
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            raise RunFolderError(f"cannot write {self.metrics}: {error.strerror}.") from error

    def keep_metrics(self, length: int) -> None:
        """Cuts off what was written after the checkpoint that a run resumes from."""
        if not self._writes:
            return
        present = self.metrics.stat().st_size if self.metrics.exists() else 0
        if present < length:
            raise RunFolderError(
                f"{self.metrics} has {present} bytes, but the checkpoint was made after {length}: "
                "it was truncated or edited."
            )
        if self.metrics.exists():
            os.truncate(self.metrics, length)

    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as finished."""
        self._write("summary.json", summary)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {self.path / name}: {error}.") from error

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=2) + "\n"
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path / name}: {error.strerror}.") from error


def _first_difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            missing = "nothing"
            inner = f"{where}.{name}" if where else name
            left, right = theirs.get(name, missing), ours.get(name, missing)
            if difference := _first_difference(left, right, inner):
                return difference
        return None
    return None if theirs == ours else f"{where} is {theirs!r} there and {ours!r} here"


def _environment(plan: Mapping[str, Any]) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "plan": plan,
        "versions": versions,
        "python": platform.python_version(),
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    try:
        git = subprocess.run(
            # With "-dirty" where files differ from the commit.
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
