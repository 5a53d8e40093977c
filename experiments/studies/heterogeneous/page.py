"""The page of methods for different networks, with each client evaluated on its own test examples."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.archive import Record
from experiments.studies.pages import IN_SHORT, Notes, Page, first_screen, found
from experiments.studies.samples import Sample, common_seeds, equal_but, sample
from experiments.studies.sections.cells import NOT_RUN, OTHER_SETTINGS, accuracy
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import table
from fedcodist.config.registry import METHOD_NAMES
from fedcodist.configs.digits_heterogeneous import get_runs as digits_methods
from fedcodist.report.spread import mean_difference


class Comparison(NamedTuple):
    """A comparison of methods.

    Attributes:
      experiment: a config.
      heading: of its table.
      baseline: the method that others are compared with.
      models: that clients use.
      pattern: of the experiment's runs, "{}" being a method.
    """

    experiment: str
    heading: str
    baseline: str
    models: Sequence[str]
    pattern: str = "{}"


_CIFAR = {
    f"{data},{split},{{}},scaled": f"{title}, {how}, four networks"
    for data, title in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))
    for split, how in (("dirichlet", "Dirichlet(0.1)"), ("pathological", "few labels"))
}
COMPARISONS = (
    *(
        Comparison("cifar_heterogeneous", heading, "local_only", ("parties",), pattern)
        for pattern, heading in _CIFAR.items()
    ),
    Comparison("digits_heterogeneous", "Digits, four networks", "local_only", ("parties",)),
    Comparison(
        "digits_personal",
        "Digits, one network",
        "fed_avg",
        ("main_personal", "main", "main_fine_tuned"),
    ),
)
EXPERIMENTS = tuple(dict.fromkeys(comparison.experiment for comparison in COMPARISONS))
_SPLIT = "client_test"
# Settings in which methods may differ: data, rounds and networks are equal.
_OF_METHODS = ("algorithm.*", "training.*", "pools.*")
_METRICS = ("accuracy_weighted", "accuracy", "accuracy_std", "accuracy_worst_tenth")


def heterogeneous(records: Sequence[Record], notes: Notes) -> Page:
    """A table per experiment: every method, and its gain over the baseline within seeds."""
    full = full_length(records)
    title = "Heterogeneous networks, evaluated on each client's own examples"
    parts = [*first_screen(title, notes), *_together(full, notes)]
    for comparison in COMPARISONS:
        methods = [
            own for run in planned(comparison.experiment) if (own := _method(comparison, run))
        ]
        rows = [row for method in methods for row in _rows(full, comparison, method)]
        if not any(
            _sample(full, comparison, m, comparison.models[0], _METRICS[0]) for m in methods
        ):
            continue  # below, under what was not run
        headings = [
            "Method",
            *(["Model"] if len(comparison.models) > 1 else []),
            "All test examples",
            "Mean over clients",
            "Deviation over clients",
            "Worst tenth",
            f"Gain over {METHOD_NAMES[comparison.baseline]}",
            "kB up",
            "kB down",
        ]
        texts = headings.index("All test examples")
        parts += [f"## {comparison.heading}", notes.get(comparison.heading, "")]
        parts += [table(headings, rows, texts=texts), found(notes, comparison.heading)]
    parts += endings(records, EXPERIMENTS, about_missing=notes.get("Not run", ""))
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("heterogeneous", title, EXPERIMENTS, parts, {}, in_short, not_run=missing)


def _together(records: Sequence[Record], notes: Notes) -> list[str]:
    """The gains of the methods as means over all comparisons on CIFAR that are complete."""
    comparisons = [
        comparison for comparison in COMPARISONS if comparison.experiment == "cifar_heterogeneous"
    ]
    methods = {
        comparison: [
            own for run in planned(comparison.experiment) if (own := _method(comparison, run))
        ]
        for comparison in comparisons
    }
    values = {
        comparison: {
            method: measured
            for method in methods[comparison]
            if (measured := _sample(records, comparison, method, comparison.models[0], _METRICS[0]))
        }
        for comparison in comparisons
    }
    complete = [
        comparison for comparison in comparisons if set(values[comparison]) == set(digits_methods())
    ]
    if not complete:
        return []
    rows = []
    for method in values[complete[0]]:
        if method == complete[0].baseline:
            continue
        samples = [
            (values[comparison][method], values[comparison][comparison.baseline])
            for comparison in complete
        ]
        seeds = set.intersection(*(set(each.seeds) for pair in samples for each in pair))
        if not seeds:
            continue
        gains = []  # by comparison, those of every seed
        for pair in samples:
            ours, other = (dict(zip(s.seeds, s.values, strict=True)) for s in pair)
            gains.append([ours[seed] - other[seed] for seed in sorted(seeds)])
        mean = mean_difference(
            [sum(of_seed) / len(complete) for of_seed in zip(*gains, strict=True)]
        )
        each = [f"{sum(of_cell) / len(of_cell):+.1f}" for of_cell in gains]
        rows.append([METHOD_NAMES.get(method, method), mean, *each])
    headings = [
        "Method",
        "Mean gain",
        *(comparison.heading.split(", four")[0] for comparison in complete),
    ]
    heading = "CIFAR, all comparisons together"
    parts = [f"## {heading}", notes.get(heading, ""), table(headings, rows, texts=1)]
    return [*parts, found(notes, heading)]


def _method(comparison: Comparison, run: str) -> str:
    """The method of a run of the comparison, or "" for other runs of its experiment."""
    before, after = comparison.pattern.split("{}")
    method = run.removeprefix(before).removesuffix(after)
    return method if comparison.pattern.format(method) == run and "," not in method else ""


def _rows(records: Sequence[Record], comparison: Comparison, method: str) -> list[list[str]]:
    """A table row for each measured model of a method, or a single row if it was not run."""
    title = METHOD_NAMES.get(method, method)
    has_models = len(comparison.models) > 1
    rows = []
    for model in comparison.models:
        of_metrics = [_sample(records, comparison, method, model, metric) for metric in _METRICS]
        if of_metrics[0] is None:
            continue
        cells = [title, *([model] if has_models else []), *map(accuracy, of_metrics)]
        rows.append([*cells, _gain(records, comparison, of_metrics[0]), *_kilobytes(of_metrics[0])])
    empty = [""] * (len(_METRICS) + 2 + has_models)
    return rows or [[title, NOT_RUN, *empty]]


def _gain(records: Sequence[Record], comparison: Comparison, ours: Sample) -> str:
    """Gain over the baseline within seeds, for all test examples; empty for the baseline itself."""
    of_baseline = [
        model for model in comparison.models if model.endswith("main")
    ] or comparison.models
    other = _sample(records, comparison, comparison.baseline, of_baseline[0], _METRICS[0])
    if other is None or (ours.records == other.records and ours.values == other.values):
        return ""
    if not equal_but(ours, other, _OF_METHODS):
        return OTHER_SETTINGS
    differences = [a - b for a, b in common_seeds(ours, other)]
    return mean_difference(differences) if len(differences) > 1 else ""


def _kilobytes(ours: Sample) -> list[str]:
    """Kilobytes of one participation of one client, up and down, as means over clients."""
    sizes = ours.records[0].bytes
    count = max(len(sizes), 1)
    return [
        f"{sum(size[way] for size in sizes.values()) / count / 1e3:,.1f}" for way in ("up", "down")
    ]


def _sample(
    records: Sequence[Record], comparison: Comparison, method: str, model: str, metric: str
) -> Sample | None:
    run = comparison.pattern.format(method)
    return sample(records, comparison.experiment, run, model, _SPLIT, metric)
