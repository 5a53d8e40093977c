"""`RunFolder`: a run's config, metrics, summary and environment as JSON, and its checkpoints."""

import codecs
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedcodist.core.files import write_atomically
from fedcodist.run.environment import environment_of
from fedcodist.run.folder_check import (
    CHECKPOINTS,
    LOCK,
    RunFolderError,
    check_folder,
    is_unfinished,
)
from fedcodist.run.folder_start import check_start, is_finished, summary_of
from fedcodist.run.identity import Identity

try:
    import fcntl
except ImportError:  # Windows lacks it; there, a second process in a folder is not noticed
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """Reads and writes the files of one run.

    Files to which an editor has added a byte order mark are read too. `metrics.jsonl` has no times, so a
    resumed run ends with the same bytes as one that was never stopped. At the end of a `with`
    statement a claimed folder is free for other processes.

    Args:
      path: the folder.
      writes: whether this process writes; one process of a run does.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True):
        self.path = Path(path)
        self.checkpoints = self.path / CHECKPOINTS
        self.metrics = self.path / "metrics.jsonl"
        self._writes = writes
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def claim(
        self,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        change_plan: bool,
        identity: Identity | None = None,
        keeper: str = "",
    ) -> None:
        """Makes the folder this run's, or checks that it already is, and locks it.

        Args:
          config: the content of config.json.
          plan: how the run is executed.
          change_plan: whether the plan may be another one than before.
          identity: what distinguishes the run beside its config, kept in environment.json. A folder of
            an earlier version, which has none, gets this one.
          keeper: what keeps the best round's models; empty where nothing does.

        Raises:
          RunFolderError: another process uses the folder; its config or identity is that of another
            experiment; or the plan differs, which would change bits of results, without `change_plan`.
        """
        # Before locking, so that no lock file is written into a folder that is not a run folder.
        check_folder(self.path)
        config, plan = json.loads(json.dumps(config)), json.loads(json.dumps(plan))
        if not (self.path / LOCK).exists():  # nor into another run's, which may be an old copy
            check_start(self.path, config, plan, change_plan, identity, keeper)
        self._take_lock()
        first = check_start(self.path, config, plan, change_plan, identity, keeper)
        for path in self.path.glob(".*"):
            if is_unfinished(path.name):
                path.unlink()
        if identity is not None and first and identity.is_longer(first.get("identity", {})):
            # A run that grows is not finished any more, even if this start is killed.
            self.remove_summary()
        self._write("config.json", config)
        environment = environment_of(plan)
        if first:
            # The environment of the first start stays, also its plan; that of each later start is added.
            resumed = first.get("resumed", [])
            later = environment | ({"only_reads": True} if is_finished(self.path) else {})
            resumed = [*(resumed if isinstance(resumed, list) else []), later]
            environment = {**first, "resumed": resumed}
        else:
            environment["keeper"] = keeper
        if identity is not None:
            environment["identity"] = identity.content
        self._write("environment.json", environment)

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Appends metrics lines; returns the length of the file in bytes.

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
        """Cuts metrics.jsonl to the bytes that it had at the checkpoint from which a run resumes.

        Raises:
          RunFolderError: the file is shorter, or cannot be cut.
        """
        if not self._writes:
            return
        try:
            if self.metrics.exists():
                self._remove_byte_order_mark()
            present = self.metrics.stat().st_size if self.metrics.exists() else 0
            if present < length:
                raise RunFolderError(
                    f"{self.metrics} has {present} bytes, but the checkpoint was made after {length}: "
                    "it was truncated or edited."
                )
            if self.metrics.exists():
                os.truncate(self.metrics, length)
        except OSError as error:
            raise RunFolderError(f"cannot write {self.metrics}: {error.strerror}.") from error

    def _remove_byte_order_mark(self) -> None:
        """Removes a byte order mark, so that the file has the length that checkpoints know."""
        with open(self.metrics, "rb") as file:
            if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                write_atomically(self.metrics, file.read())

    def records(self, names: Sequence[str] = ("round",)) -> list[dict[str, Any]]:
        """All metrics lines of metrics.jsonl, each of which must have the keys `names`.

        Raises:
          RunFolderError: the file cannot be read, or one of its lines is not a metrics line.
        """
        if not self.metrics.exists():
            return []
        try:
            lines = self.metrics.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {self.metrics}: {error}.") from error
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or not record.keys() >= {*names}:
                raise RunFolderError(
                    f"cannot read {self.metrics}: line {number} is no record, the file was edited."
                )
            records.append(record)
        return records

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as finished."""
        self._write("summary.json", summary)

    def kept_metrics(self, round: int) -> dict[str, Any] | None:
        """Those of the models that a finished run has kept of a round; None if it has none."""
        kept = summary_of(self.path).get("kept") or {}
        return kept.get("final") if kept.get("round") == round else None

    def remove_summary(self) -> bool:
        """Makes the run one that is not finished; returns whether it was.

        Raises:
          RunFolderError: the file cannot be removed.
        """
        path = self.path / "summary.json"
        if not self._writes or not path.exists():
            return False
        try:
            path.unlink()
        except OSError as error:
            raise RunFolderError(f"cannot remove {path}: {error.strerror}.") from error
        return True

    def _take_lock(self) -> None:
        """Locks the folder. The operating system releases the lock however this process ends."""
        if fcntl is None:
            return
        path = self.path / LOCK
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

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=2) + "\n"
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path / name}: {error.strerror}.") from error
