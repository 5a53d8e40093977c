"""A run's folder: config, metrics, summary and environment as JSON, and its checkpoints."""

import datetime
import fnmatch
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import jax

from fedcodist.checkpoint import write_atomically
from fedcodist.commit import running_commit

try:
    import fcntl
except ImportError:  # Windows has none: two processes in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
PHASES = "phases"  # run folders of what comes before a run's first round
# What a start that was killed at once may leave.
_BEGINNINGS = ("logs", PHASES, _LOCK, ".*.json.*")
_PACKAGES = ("fedcodist", "jax", "jaxlib", "flax", "optax", "chex", "ml-collections", "numpy")


class RunFolderError(ValueError):
    """The folder is another run's, in use or cannot be written; the message is one line."""


class RunFolder:
    """Reads and writes one run's files.

    `metrics.jsonl` holds no clock times: a resumed run ends with the same bytes as one that was never
    stopped. A folder that was claimed is free for other processes at the end of a `with` statement.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self._writes = writes
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def claim(self, config: Mapping[str, Any], plan: Mapping[str, Any], change_plan: bool) -> None:
        """Makes the folder this run's, or checks that it already is, and keeps other processes out.

        Raises:
          RunFolderError: another process has the folder, config.json is another experiment's, or the
            execution plan differs (the bits would) and `change_plan` does not allow it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run folder {self.path} is a file.")
        names = {path.name for path in self.path.glob("*")}
        # Before the lock, whose file a folder of other things must not get.
        if "config.json" not in names and not all(map(_is_beginning, names)):
            raise RunFolderError(f"folder {self.path} is not empty and holds no run.")
        self._keep_others_out()
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

    def _keep_others_out(self) -> None:
        """Locks the folder. The operating system releases it however this process ends."""
        if fcntl is None:
            return
        path = self.path / _LOCK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path, "ab")  # noqa: SIM115
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"run folder {self.path} is in use by another process. "
                "Wait for its end, or use another --workdir."
            ) from None
        except OSError:
            pass  # some network file systems have no locks

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


def _is_beginning(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _BEGINNINGS)


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
        "commit": running_commit(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
