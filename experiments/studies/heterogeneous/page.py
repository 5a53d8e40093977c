"""The page of methods for different networks, with each client evaluated on its own test examples."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.archive import Record
from experiments.studies.pages import Notes, Page, found
from experiments.studies.samples import Sample, common_seeds, sample
from experiments.studies.sections.cells import NOT_RUN, accuracy
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import estimate, table
from fedcodist.config.registry import METHOD_NAMES
from fedcodist.report.intervals import paired


class Study(NamedTuple):
    """An experiment, its heading, its baseline's run, and the model that its clients use."""

    experiment: str
    heading: str
    baseline: str
    models: Sequence[str]


STUDIES = (
    Study("digits_heterogeneous", "Digits, four networks", "local_only", ("parties",)),
    Study(
        "digits_personal",
        "Digits, one network",
        "fed_avg",
        ("main_personal", "main", "main_fine_tuned"),
    ),
)
EXPERIMENTS = (*(study.experiment for study in STUDIES), "cifar_heterogeneous")
_SPLIT = "client_test"
_METRICS = ("accuracy_weighted", "accuracy", "accuracy_std", "accuracy_worst_tenth")


def heterogeneous(records: Sequence[Record], notes: Notes) -> Page:
    """A table per experiment: every method, and its gain over the baseline within seeds."""
    full = full_length(records)
    title = "Heterogeneous networks, evaluated on each client's own examples"
    parts = [f"# {title}", notes[""]]
    for study in STUDIES:
        rows = [row for run in planned(study.experiment) for row in _rows(full, study, run)]
        headings = [
            "Method",
            *(["Model"] if len(study.models) > 1 else []),
            "All test examples",
            "Mean over clients",
            "Deviation over clients",
            "Worst tenth",
            f"Gain over {METHOD_NAMES[study.baseline]}",
            "kB up",
            "kB down",
        ]
        texts = headings.index("All test examples")
        parts += [f"## {study.heading}", notes.get(study.heading, "")]
        parts += [table(headings, rows, texts=texts), found(notes, study.heading)]
    parts += endings(records, EXPERIMENTS, about_missing=notes.get("Not run", ""))
    missing = not_run(records, EXPERIMENTS)
    return Page("heterogeneous", title, EXPERIMENTS, parts, {}, (), missing)


def _rows(records: Sequence[Record], study: Study, run: str) -> list[list[str]]:
    """A table row for each measured model of a run, or a single row if it was not run."""
    title = METHOD_NAMES.get(run, run)
    has_models = len(study.models) > 1
    rows = []
    for model in study.models:
        of_metrics = [_sample(records, study, run, model, metric) for metric in _METRICS]
        if of_metrics[0] is None:
            continue
        cells = [title, *([model] if has_models else []), *map(accuracy, of_metrics)]
        rows.append([*cells, _gain(records, study, of_metrics[0]), *_kilobytes(of_metrics[0])])
    empty = [""] * (len(_METRICS) + 2 + has_models)
    return rows or [[title, NOT_RUN, *empty]]


def _gain(records: Sequence[Record], study: Study, ours: Sample) -> str:
    """Gain over the baseline within seeds, for all test examples; empty for the baseline itself."""
    of_baseline = [model for model in study.models if model.endswith("main")] or study.models
    other = _sample(records, study, study.baseline, of_baseline[0], _METRICS[0])
    if other is None or (ours.records == other.records and ours.values == other.values):
        return ""
    pairs = common_seeds(ours, other)
    if len(pairs) < 2:
        return ""
    return estimate(paired([a for a, _ in pairs], [b for _, b in pairs], 0))


def _kilobytes(ours: Sample) -> list[str]:
    """Kilobytes of one participation of one client, up and down, as means over clients."""
    sizes = ours.records[0].bytes
    count = max(len(sizes), 1)
    return [
        f"{sum(size[way] for size in sizes.values()) / count / 1e3:,.1f}" for way in ("up", "down")
    ]


def _sample(
    records: Sequence[Record], study: Study, run: str, model: str, metric: str
) -> Sample | None:
    return sample(records, study.experiment, run, model, _SPLIT, metric)
