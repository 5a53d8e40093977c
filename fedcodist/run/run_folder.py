"""`RunFolder`: a run's config, metrics, summary and environment as JSON, and its checkpoints."""

import codecs
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax

from fedcodist.core.files import write_atomically
from fedcodist.run.checkpoint import newest_beyond, notes_of
from fedcodist.run.commit import running_commit
from fedcodist.run.folder_check import LOCK, RunFolderError, check_folder, is_unfinished
from fedcodist.run.identity import Identity, first_difference

try:
    import fcntl
except ImportError:  # Windows lacks it; there, a second process in a folder is not noticed
    fcntl = None  # type: ignore[assignment]

# Keys that the plans of older run folders lack, where they are not compared.
_ADDED_LATER = ("seeds_loop", "execution", "stream", "processes", "devices", "platform")
# Keys of runs from Python alone. Commands have settings in their place.
_OF_PYTHON = ("seeds_loop", "execution", "stream")
_PACKAGES = ("fedcodist", "jax", "jaxlib", "flax", "optax", "chex", "ml-collections", "numpy")


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
        self.checkpoints = self.path / "checkpoints"
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
            self._check_start(config, plan, change_plan, identity, keeper)
        self._take_lock()
        first = self._check_start(config, plan, change_plan, identity, keeper)
        for path in self.path.glob(".*"):
            if is_unfinished(path.name):
                path.unlink()
        if identity is not None and first and identity.is_longer(first.get("identity", {})):
            # A run that grows is not finished any more, even if this start is killed.
            self.remove_summary()
        self._write("config.json", config)
        environment = _environment(plan)
        if first:
            # The environment of the first start stays, also its plan; that of each later start is added.
            resumed = first.get("resumed", [])
            later = environment | ({"only_reads": True} if self._is_finished() else {})
            resumed = [*(resumed if isinstance(resumed, list) else []), later]
            environment = {**first, "resumed": resumed}
        else:
            environment["keeper"] = keeper
        if identity is not None:
            environment["identity"] = identity.content
        self._write("environment.json", environment)

    def _is_finished(self) -> bool:
        """Whether the run has its summary, and the checkpoint of its last round."""
        last_round = self._summary().get("rounds")
        return isinstance(last_round, int) and notes_of(self.checkpoints, last_round) is not None

    def _check_start(
        self,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        change_plan: bool,
        identity: Identity | None,
        keeper: str,
    ) -> dict[str, Any]:
        """Checks that the run may start or continue here; returns its environment.json, empty at first.

        Nothing is written. Raises RunFolderError as `claim` does.
        """
        if not (self.path / "config.json").exists():
            return {}
        first: dict[str, Any] = {}
        if (self.path / "environment.json").exists():
            first = self._read("environment.json")
            for part in ("plan", *(["identity"] if "identity" in first else [])):
                if not isinstance(first.get(part), dict):
                    path = self.path / "environment.json"
                    raise RunFolderError(f"cannot read {path}: no {part}.")
        self._check_same_run(config, identity, first.get("identity"))
        if identity is not None:
            self._check_not_without_checkpoints()
            self._check_not_longer(identity.content["rounds"])
            self._check_not_cut_short(identity.content["rounds"], first.get("identity", {}))
            will_train = identity.is_longer(first.get("identity", {})) or not self._is_finished()
            self._check_same_keeper(keeper, first.get("keeper"), will_train)
        if first and not change_plan:
            self._check_same_plan(plan, first)
        return first

    def _check_same_keeper(self, keeper: str, before: str | None, will_train: bool) -> None:
        """Raises RunFolderError if another callback than at first is to keep the best round's models.

        A finished run may be read again without one. Folders of earlier versions do not say what kept.
        """
        if before not in (None, keeper) and (keeper or will_train):
            raise RunFolderError(
                f"{self.path} is of a run whose models are kept by {before or 'no callback'}, not by "
                f"{keeper or 'no callback'}: what other rounds have not kept is lost. Use the same "
                "callback or another --workdir."
            )

    def _check_same_run(
        self, config: Mapping[str, Any], identity: Identity | None, theirs: dict[str, Any] | None
    ) -> None:
        before = self._read("config.json")
        difference = None
        if identity is not None and theirs is not None:
            if identity.is_longer(theirs):
                if "rounds" in before and "rounds" in config:
                    before = before | {"rounds": config["rounds"]}
                difference = identity.difference(theirs, to_grow=True)
            else:
                difference = identity.difference(theirs)
        # Settings are compared first, since other differences may follow from them.
        if difference := first_difference(before, config) or difference:
            raise RunFolderError(
                f"run folder {self.path} belongs to another config: {difference}. "
                "Use another --workdir, or the same settings."
            )

    def _check_not_without_checkpoints(self) -> None:
        """Raises RunFolderError if the run is finished and its checkpoints were removed.

        It would be trained anew, and its metrics and summary would be lost.
        """
        is_finished = (self.path / "summary.json").exists()
        if is_finished and not any(self.checkpoints.glob("round_*.msgpack")):
            raise RunFolderError(
                f"run folder {self.path} is finished, but has no checkpoints any more. To train it "
                "again, remove its summary.json or use another --workdir."
            )

    def _check_not_longer(self, rounds: int) -> None:
        """Raises RunFolderError if the run was already trained for longer; nothing is written yet."""
        if newest := newest_beyond(self.checkpoints, rounds):
            raise RunFolderError(
                f"run folder {self.path} has a checkpoint of round {newest}, beyond rounds={rounds}. "
                "Use another --workdir."
            )

    def _check_not_cut_short(self, rounds: int, theirs: Mapping[str, Any]) -> None:
        """Raises RunFolderError if the run would end at a checkpoint from the middle of a longer run.

        What is measured after the last round alone was not measured there.
        """
        before = theirs.get("rounds")
        if not isinstance(before, int) or before <= rounds:
            return
        notes = notes_of(self.checkpoints, rounds)
        if notes is not None and notes.get("rounds") != rounds and "stopped" not in notes:
            raise RunFolderError(
                f"run folder {self.path} has a checkpoint of round {rounds}, in the middle of a run of "
                f"{before} rounds: rounds must be above {rounds}, or use another --workdir."
            )

    def _check_same_plan(self, plan: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Raises RunFolderError if the plan, the machine or JAX differs from that of the last start."""
        resumed = before.get("resumed")
        newest = resumed[-1] if isinstance(resumed, list) and resumed else before
        last, last_plan = _machine(newest), before["plan"]
        if isinstance(newest, dict) and isinstance(newest.get("plan"), dict):
            last_plan = newest["plan"]
        later = {name: plan[name] for name in _ADDED_LATER if name in plan}
        recorded = {n: v for n, v in last_plan.items() if n in plan or n not in _OF_PYTHON}
        theirs = {**later, **recorded, **last}
        now = {name: value for name, value in _machine(_environment(plan)).items() if name in last}
        if difference := first_difference(theirs, {**plan, **now}):
            raise RunFolderError(
                f"run folder {self.path} belongs to another execution plan: {difference}. "
                "Results would differ in the last bits; --change_plan resumes all the same."
            )

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
        kept = self._summary().get("kept") or {}
        return kept.get("final") if kept.get("round") == round else None

    def _summary(self) -> dict[str, Any]:
        """The content of summary.json; empty where there is none that can be read."""
        with contextlib.suppress(RunFolderError):
            return self._read("summary.json")
        return {}

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

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunFolderError(f"cannot read {self.path / name}: {error}.") from error
        if not isinstance(content, dict):
            raise RunFolderError(f"cannot read {self.path / name}: it is no JSON object.")
        return content

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=2) + "\n"
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path / name}: {error.strerror}.") from error


def _machine(environment: Any) -> dict[str, Any]:
    """The entries of an environment on which the last bits of results depend."""
    values: dict[str, Any] = {}
    if isinstance(environment, dict):
        versions = environment.get("versions")
        jaxlib = versions.get("jaxlib") if isinstance(versions, dict) else None
        values = {"x64": environment.get("x64"), "jaxlib": jaxlib}
        for name in ("device", "matmul_precision", "prng", "prng_is_partitionable"):
            values[name] = environment.get(name)
    return {name: value for name, value in values.items() if value is not None}


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
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
        "prng": str(jax.config.jax_default_prng_impl),
        # A flag of the transition to other draws of threefry, which a later release may drop.
        "prng_is_partitionable": getattr(jax.config, "jax_threefry_partitionable", True),
        "x64": jax.dtypes.canonicalize_dtype("float64") == "float64",
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def data_note(
    workdir: Path, about: Mapping[str, Any]
) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """A callback that adds a description of a run's data to environment.json, once."""

    def note(records: Sequence[Mapping[str, Any]]) -> None:
        # At the first evaluation, when the folder is claimed. A resumed run's entry stays.
        path = workdir / "environment.json"
        try:
            environment = json.loads(path.read_text(encoding="utf-8"))
            if "data" not in environment:
                text = json.dumps({**environment, "data": about}, indent=2) + "\n"
                write_atomically(path, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}.") from error
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"cannot read {path}: {error}.") from error

    return note
