"""The page of methods under user-level differential privacy: accuracy at each budget."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.pages import Notes, Page, found
from experiments.studies.samples import Sample, common_seeds, sample
from experiments.studies.sections.cells import NOT_RUN, accuracy
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import estimate, table
from fedcodist.config.registry import BASELINE, METHOD_NAMES
from fedcodist.configs.digits_private import EPSILONS, METHODS
from fedcodist.report.intervals import paired

EXPERIMENTS = ("digits_private",)
# FedSDD has one model; its accuracy is that of the distilled main model.
_MODELS = {"fed_sdd": ("main",)}
_TWO_MODELS = ("small", "large")


def privacy(records: Sequence[Record], notes: Notes) -> Page:
    """A table: a row per method and model, columns of each budget and of its gain over FedAvg."""
    full = full_length(records)
    rows = [
        _row(full, method, model)
        for method in METHODS
        for model in _MODELS.get(method, _TWO_MODELS)
    ]
    headings = ["Method", "Model"]
    for epsilon in EPSILONS:
        column = "no noise" if epsilon == "inf" else f"epsilon {epsilon}"
        headings += [column, f"over {METHOD_NAMES[BASELINE]}"]
    parts = ["# Private methods", notes[""], "## Digits", notes.get("Digits", "")]
    parts += [table(headings, rows, texts=2), found(notes, "Digits")]
    parts += endings(records, EXPERIMENTS, about_missing=notes.get("Not run", ""))
    missing = not_run(records, EXPERIMENTS)
    return Page("privacy", "Private methods", EXPERIMENTS, parts, {}, (), missing)


def _row(records: Sequence[Record], method: str, model: str) -> list[str]:
    row = [METHOD_NAMES[method], model]
    for epsilon in EPSILONS:
        ours = _sample(records, method, epsilon, model)
        row += [accuracy(ours) if ours else NOT_RUN, _gain(records, ours, epsilon, model)]
    return row


def _gain(records: Sequence[Record], ours: Sample | None, epsilon: str, model: str) -> str:
    """Gain over FedAvg within seeds; empty for FedAvg itself and for models that it does not have."""
    other = _sample(records, BASELINE, epsilon, model)
    if ours is None or other is None or ours.records == other.records:
        return ""
    pairs = common_seeds(ours, other)
    return estimate(paired([a for a, _ in pairs], [b for _, b in pairs], 0))


def _sample(records: Sequence[Record], method: str, epsilon: str, model: str) -> Sample | None:
    return sample(records, EXPERIMENTS[0], f"{method},{epsilon}", model, "test", "accuracy")
