"""The tuner's studies, as it sums them up."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.sections.markdown import table
from fedcodist.config.registry import METHOD_NAMES

Study = Mapping[str, Any]


def tuning(studies: Sequence[Study]) -> list[str]:
    """What each study found, and where it searched."""
    if not studies:
        return ["## Tuning", "No studies yet."]
    headings = ["Study", "Method", "Trials", "Rounds per trial", "Best value", "Compilations"]
    searched = ["Study", "Setting", "From", "To", "Scale", "Best"]
    return [
        "## Tuning",
        table(headings, map(_row, studies), texts=2),
        *(_running(study) for study in studies if study["states"].get("running")),
        "What was searched, and the best trial's values:",
        table(searched, [row for study in studies for row in _space_rows(study)], texts=2),
        "\n".join(f"- `{study['study']}`: `{study['command']}`" for study in studies),
    ]


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
