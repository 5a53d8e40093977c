"""Reads a run folder, whether the run is finished, still running or was killed."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRAINING = "clients"  # the split of training's metrics lines
RUN_CONTENTS = ("metrics.jsonl", "summary.json", "environment.json", "checkpoints")


class Series(NamedTuple):
    """Evaluations of one model on one split with one seed, by round."""

    model: str
    split: str
    seed: int


class Run(NamedTuple):
    """A run folder's contents; `records[series][round]` is a line of `metrics.jsonl`."""

    folder: Path
    config: dict[str, Any]
    records: dict[Series, dict[int, dict[str, Any]]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    finished: bool
    notes: tuple[str, ...]


def load_run(folder: Path | str) -> Run:
    """Reads a run folder, whether the run is finished, still running or was killed.

    Lines of `metrics.jsonl` that are not JSON objects are left out and noted, except the last line,
    which a killed run may leave half-written. If a resumed run evaluated a round twice, the later line
    is used.

    Raises:
      ValueError: `folder` is not a run folder, or its `config.json` cannot be read.
    """
    folder = Path(folder)
    if not _is_run_folder(folder):
        raise ValueError(f"{folder} is not a run folder: it needs config.json and metrics.jsonl")
    notes: list[str] = []
    config = _object_or_nothing(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder / 'config.json'} is not a JSON object: not a run folder")
    summary = _object_or_nothing(folder / "summary.json") or {}
    if "final" in summary:
        summary = {**summary, "final": final_of(summary)}
    environment = _object_or_nothing(folder / "environment.json") or {}
    records = _read_records(folder / "metrics.jsonl", first_seed(config), notes)
    finished = summary.get("finished") is True
    _add_final_from_summary(records, summary, first_seed(config))
    return Run(folder, config, records, summary, environment, finished, tuple(notes))


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return content


def final_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Model -> split -> metrics, without those of training, which earlier versions wrote for parties."""
    return {
        model: {split: values for split, values in splits.items() if split != TRAINING}
        if isinstance(splits, dict)
        else splits
        for model, splits in mapping_of(summary, "final").items()
    }


def read_lines(
    path: Path, damaged: Callable[[int], None] | None = None
) -> list[tuple[int, dict[str, Any]]]:
    """The lines of a `metrics.jsonl` with their numbers from 1, whether or not the run has ended.

    A half-written last line of a killed run is left out.

    Args:
      path: the file.
      damaged: called with the number of every other line that is not a JSON object; these lines are left
        out. Without it such a line is an error.

    Raises:
      ValueError: names the file, and the line that is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else {}
        except ValueError:
            record = None
        if isinstance(record, dict):
            records += [(number, record)] if record else []
        elif number == len(lines):  # after a complete line the last one is empty
            continue
        elif damaged is None:
            raise ValueError(f"{path} line {number} is no evaluation.")
        else:
            damaged(number)
    return records


def find_run_folders(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """Run folders in or below the paths, each once. Paths without any are added to `notes`."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such folder: {path}")
        below = []
        for parent, children, _ in os.walk(path):
            if _is_run_folder(Path(parent)):
                below.append(Path(parent))
                children.clear()
            children[:] = sorted(child for child in children if not child.startswith("."))
        if not below:
            notes.append(
                f"{path} is not a run folder (with config.json and metrics.jsonl) and has none below; "
                "skipped"
            )
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _is_run_folder(folder: Path) -> bool:
    beside = any((folder / name).exists() for name in RUN_CONTENTS)
    return beside and (folder / "config.json").is_file()


def _object_or_nothing(path: Path) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except ValueError:
        return None


def _read_records(
    path: Path, first_seed: int, notes: list[str]
) -> dict[Series, dict[int, dict[str, Any]]]:
    records: dict[Series, dict[int, dict[str, Any]]] = {}
    leave_out = lambda number: notes.append(f"{path} line {number} is no evaluation; left out")
    try:
        lines = read_lines(path, damaged=leave_out)
    except ValueError:
        return records
    for number, record in lines:
        try:
            series = Series(
                str(record["model"]), str(record["split"]), int(record.get("seed", first_seed))
            )
            round = int(record["round"])
        except (ValueError, KeyError, TypeError):
            leave_out(number)
            continue
        records.setdefault(series, {}).setdefault(round, {}).update(record)
    return records


def _add_final_from_summary(
    records: dict[Series, dict[int, dict[str, Any]]], summary: dict[str, Any], first_seed: int
) -> None:
    """Adds the final accuracies of a run without a `metrics.jsonl`."""
    for model, splits in mapping_of(summary, "final").items():
        for split in mapping_of({"splits": splits}, "splits"):
            values = mapping_of(splits, split).get("accuracy")
            if any((model, split) == series[:2] for series in records):
                continue
            for index, value in enumerate(values if isinstance(values, list) else []):
                record = {"round": summary.get("rounds", 0), "accuracy": value}
                records[Series(model, split, first_seed + index)] = {record["round"]: record}


def first_seed(config: Mapping[str, Any]) -> int:
    """A config's first seed; 0 by default."""
    seed = config.get("seed")
    return seed if isinstance(seed, int) else 0


def mapping_of(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a key, or an empty one."""
    mapping = value.get(key)
    return mapping if isinstance(mapping, dict) else {}


def number_of(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric; None where it was not measured, NaN where it is not a finite number (JSON null)."""
    if metric not in record:
        return None
    value = record[metric]
    if value is None:
        return math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def epsilon_of(summary: Mapping[str, Any]) -> float | None:
    """The largest epsilon of a run's clients: infinite without noise, None if no method is private."""
    privacy = mapping_of(summary, "privacy")
    if not privacy:
        return None
    return math.inf if privacy.get("epsilon") is None else float(privacy["epsilon"])


def largest_epsilon(epsilons: Iterable[float | None]) -> float | None:
    """The largest epsilon of several runs; None if none of them is private."""
    return max((epsilon for epsilon in epsilons if epsilon is not None), default=None)
