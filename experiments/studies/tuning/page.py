"""The page of the tuner's studies, from their summaries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.studies.pages import FOUND, IN_SHORT, Notes, Page, first_screen, found
from experiments.studies.sections.markdown import table
from fedcodist.config.registry import METHOD_NAMES
from fedcodist.report.runs import read_object

Study = Mapping[str, Any]
# Entries that a study's file must have, and their types.
KINDS: dict[str, Any] = {
    "study": str,
    "algorithm": object,
    "rounds": int,
    "trials": list,
    "states": dict,
    "space": dict,
    "best_value": int | float | None,
    "best_parameters": dict | None,
    "command": object,
    "commit": object,
    "date": object,
    "workers": list,
}


def tuning(studies: Sequence[Study], notes: Notes) -> Page:
    """The best values of each study, and its search space."""
    parts = first_screen("Tuning", notes)
    if studies:
        headings = ["Study", "Method", "Trials", "Rounds per trial", "Best value", "Compilations"]
        searched = ["Study", "Setting", "From", "To", "Scale", "Best"]
        parts += [
            table(headings, map(_row, studies), texts=2),
            *(_running(study) for study in studies if study["states"].get("running")),
            "## What was searched",
            table(searched, [row for study in studies for row in _space_rows(study)], texts=2),
            "## Commands",
            "\n".join(f"- `{study['study']}`: `{study['command']}`" for study in studies),
        ]
    for heading, text in notes.items():
        if heading.startswith(FOUND) and heading != FOUND + IN_SHORT:
            parts += [f"## {heading.removeprefix(FOUND)}", text]
    return Page("tuning", "Tuning", (), parts, {}, found(notes, IN_SHORT))


def load_tuning(folder: Path) -> list[dict[str, Any]]:
    """The studies of a folder by their file.

    Raises:
      ValueError: one line that names a malformed file.
    """
    return [_load_study(path) for path in sorted(folder.glob("*.json"))]


def _load_study(path: Path) -> dict[str, Any]:
    study = read_object(path)
    for key, kind in KINDS.items():
        if key not in study:
            raise ValueError(f"{path} is not a study: {key!r} is missing.")
        if not isinstance(study[key], kind):
            raise ValueError(f"{path} is not a study: {key} is {study[key]!r}.")
    for worker in study["workers"]:
        if not isinstance(worker, dict) or not isinstance(worker.get("compilations"), int):
            raise ValueError(f"{path} is not a study: workers has {worker!r}.")
    for name, bounds in study["space"].items():
        if not isinstance(bounds, dict) or not {"low", "high", "scale"} <= set(bounds):
            raise ValueError(f"{path} is not a study: space.{name} is {bounds!r}.")
    return study


def _row(study: Study) -> list[str]:
    counts = sorted(study["states"].items())
    states = ", ".join(f"{count} {state}" for state, count in counts if count)
    best = study["best_value"]
    return [
        f"`{study['study']}`",
        METHOD_NAMES.get(study["algorithm"], study["algorithm"]),
        f"{len(study['trials'])}: {states}",
        f"{study['rounds']:,}",
        "" if best is None else f"{best:.4f}",
        str(sum(worker["compilations"] for worker in study["workers"])),
    ]


def _running(study: Study) -> str:
    count = study["states"]["running"]
    were = "trial was" if count == 1 else "trials were"
    return f"`{study['study']}`: {count} {were} still running when it was recorded."


def _space_rows(study: Study) -> list[list[str]]:
    best = study["best_parameters"] or {}
    return [
        [
            f"`{study['study']}`",
            f"`{name}`",
            _short(bounds["low"]),
            _short(bounds["high"]),
            bounds["scale"],
            _short(best[name]) if name in best else "",
        ]
        for name, bounds in sorted(study["space"].items())
    ]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
