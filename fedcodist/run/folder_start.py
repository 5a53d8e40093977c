"""Whether a run may start or continue in a run folder: the same config, identity, keeper and plan."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcodist.run.checkpoint import newest_beyond, notes_of
from fedcodist.run.environment import environment_of, machine_of
from fedcodist.run.folder_check import CHECKPOINTS, RunFolderError, read_file
from fedcodist.run.identity import Identity, first_difference

# Keys that the plans of older run folders lack, where they are not compared.
_ADDED_LATER = ("seeds_loop", "execution", "stream", "processes", "devices", "platform")
# Keys of runs from Python alone. Commands have settings in their place.
_OF_PYTHON = ("seeds_loop", "execution", "stream")


def check_start(
    path: Path,
    config: Mapping[str, Any],
    plan: Mapping[str, Any],
    change_plan: bool,
    identity: Identity | None,
    keeper: str,
) -> dict[str, Any]:
    """Checks that the run may start or continue here; returns its environment.json, empty at first.

    Nothing is written. Raises RunFolderError as `claim` does.
    """
    if not (path / "config.json").exists():
        return {}
    first: dict[str, Any] = {}
    if (path / "environment.json").exists():
        first = read_file(path / "environment.json")
        for part in ("plan", *(["identity"] if "identity" in first else [])):
            if not isinstance(first.get(part), dict):
                raise RunFolderError(f"cannot read {path / 'environment.json'}: no {part}.")
    _check_same_run(path, config, identity, first.get("identity"))
    if identity is not None:
        _check_not_without_checkpoints(path)
        _check_not_longer(path, identity.content["rounds"])
        _check_not_cut_short(path, identity.content["rounds"], first.get("identity", {}))
        will_train = identity.is_longer(first.get("identity", {})) or not is_finished(path)
        _check_same_keeper(path, keeper, first.get("keeper"), will_train)
    if first and not change_plan:
        _check_same_plan(path, plan, first)
    return first


def is_finished(path: Path) -> bool:
    """Whether the run has its summary, and the checkpoint of its last round."""
    last_round = summary_of(path).get("rounds")
    return isinstance(last_round, int) and notes_of(path / CHECKPOINTS, last_round) is not None


def summary_of(path: Path) -> dict[str, Any]:
    """The content of a run folder's summary.json; empty where there is none that can be read."""
    with contextlib.suppress(RunFolderError):
        return read_file(path / "summary.json")
    return {}


def _check_same_run(
    path: Path, config: Mapping[str, Any], identity: Identity | None, theirs: dict[str, Any] | None
) -> None:
    before = read_file(path / "config.json")
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
            f"run folder {path} belongs to another config: {difference}. "
            "Use another --workdir, or the same settings."
        )


def _check_not_without_checkpoints(path: Path) -> None:
    """Raises RunFolderError if the run is finished and its checkpoints were removed.

    It would be trained anew, and its metrics and summary would be lost.
    """
    has_summary = (path / "summary.json").exists()
    if has_summary and not any((path / CHECKPOINTS).glob("round_*.msgpack")):
        raise RunFolderError(
            f"run folder {path} is finished, but has no checkpoints any more. To train it "
            "again, remove its summary.json or use another --workdir."
        )


def _check_not_longer(path: Path, rounds: int) -> None:
    """Raises RunFolderError if the run was already trained for longer; nothing is written yet."""
    if newest := newest_beyond(path / CHECKPOINTS, rounds):
        raise RunFolderError(
            f"run folder {path} has a checkpoint of round {newest}, beyond rounds={rounds}. "
            "Use another --workdir."
        )


def _check_not_cut_short(path: Path, rounds: int, theirs: Mapping[str, Any]) -> None:
    """Raises RunFolderError if the run would end at a checkpoint from the middle of a longer run.

    What is measured after the last round alone was not measured there.
    """
    before = theirs.get("rounds")
    if not isinstance(before, int) or before <= rounds:
        return
    notes = notes_of(path / CHECKPOINTS, rounds)
    if notes is not None and notes.get("rounds") != rounds and "stopped" not in notes:
        raise RunFolderError(
            f"run folder {path} has a checkpoint of round {rounds}, in the middle of a run of "
            f"{before} rounds: rounds must be above {rounds}, or use another --workdir."
        )


def _check_same_keeper(path: Path, keeper: str, before: str | None, will_train: bool) -> None:
    """Raises RunFolderError if another callback than at first is to keep the best round's models.

    A finished run may be read again without one. Folders of earlier versions do not say what kept.
    """
    if before not in (None, keeper) and (keeper or will_train):
        raise RunFolderError(
            f"{path} is of a run whose models are kept by {before or 'no callback'}, not by "
            f"{keeper or 'no callback'}: what other rounds have not kept is lost. Use the same "
            "callback or another --workdir."
        )


def _check_same_plan(path: Path, plan: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raises RunFolderError if the plan, the machine or JAX differs from that of the last start."""
    resumed = before.get("resumed")
    newest = resumed[-1] if isinstance(resumed, list) and resumed else before
    last, last_plan = machine_of(newest), before["plan"]
    if isinstance(newest, dict) and isinstance(newest.get("plan"), dict):
        last_plan = newest["plan"]
    later = {name: plan[name] for name in _ADDED_LATER if name in plan}
    recorded = {n: v for n, v in last_plan.items() if n in plan or n not in _OF_PYTHON}
    theirs = {**later, **recorded, **last}
    now = {name: value for name, value in machine_of(environment_of(plan)).items() if name in last}
    if difference := first_difference(theirs, {**plan, **now}):
        raise RunFolderError(
            f"run folder {path} belongs to another execution plan: {difference}. "
            "Results would differ in the last bits; --change_plan resumes all the same."
        )
