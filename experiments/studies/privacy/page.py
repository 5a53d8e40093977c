"""The page of methods under user-level differential privacy: accuracy at each budget."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.studies.archive import Record
from experiments.studies.pages import IN_SHORT, Notes, Page, first_screen, found
from experiments.studies.samples import Sample, common_seeds, sample
from experiments.studies.sections.cells import NOT_RUN, accuracy
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import table
from fedcodist.config.registry import BASELINE, METHOD_NAMES
from fedcodist.configs.digits_private import EPSILONS, METHODS
from fedcodist.report.spread import mean_difference

ALONE, FED_MD = "local_only", "fed_md"
# Heading -> the experiment of methods with one or two models.
_OF_MODELS = {"Digits": "digits_private", "CIFAR-100": "cifar100_private"}
# Data -> the experiment of FedMD.
_OF_PARTIES = {"digits": "digits_private_parties", "CIFAR": "cifar100_private_parties"}
_PARTIES = "FedMD"
EXPERIMENTS = (*_OF_MODELS.values(), *_OF_PARTIES.values())
# FedSDD has one model; its accuracy is that of the distilled main model.
_MODELS = {"fed_sdd": ("main",)}
_TWO_MODELS = ("small", "large")


class _Row(NamedTuple):
    """A row's first cells, and its samples: of a budget, and of what that is compared with."""

    texts: tuple[str, ...]
    ours: Callable[[str], Sample | None]
    other: Callable[[str], Sample | None]


def privacy(records: Sequence[Record], notes: Notes) -> Page:
    """For each data set a table: a row per method and model, columns of each budget and its gain."""
    full = full_length(records)
    parts = first_screen("Private methods", notes)
    for heading, experiment in _OF_MODELS.items():
        rows = [
            _of_model(full, experiment, method, model)
            for method in METHODS
            for model in _MODELS.get(method, _TWO_MODELS)
        ]
        parts += [f"## {heading}", notes.get(heading, "")]
        parts += [_table(("Method", "Model"), rows, METHOD_NAMES[BASELINE]), found(notes, heading)]
    rows = [_of_parties(full, data, experiment) for data, experiment in _OF_PARTIES.items()]
    parts += [f"## {_PARTIES}", notes.get(_PARTIES, "")]
    parts += [_table(("Data",), rows, "training alone"), found(notes, _PARTIES)]
    parts += endings(records, EXPERIMENTS, about_missing=notes.get("Not run", ""))
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("privacy", "Private methods", EXPERIMENTS, parts, {}, in_short, not_run=missing)


def _table(firsts: tuple[str, ...], rows: Sequence[_Row], compared_with: str) -> str:
    headings = list(firsts)
    for epsilon in EPSILONS:
        column = "no noise" if epsilon == "inf" else f"epsilon {epsilon}"
        headings += [column, f"over {compared_with}"]
    lines = []
    for row in rows:
        line = list(row.texts)
        for epsilon in EPSILONS:
            ours = row.ours(epsilon)
            line += [accuracy(ours) if ours else NOT_RUN, _gain(ours, row.other(epsilon))]
        lines.append(line)
    return table(headings, lines, texts=len(firsts))


def _of_model(records: Sequence[Record], experiment: str, method: str, model: str) -> _Row:
    def of(name: str) -> Callable[[str], Sample | None]:
        return lambda epsilon: sample(records, experiment, f"{name},{epsilon}", model)

    return _Row((METHOD_NAMES[method], model), of(method), of(BASELINE))


def _of_parties(records: Sequence[Record], data: str, experiment: str) -> _Row:
    """FedMD, compared with parties who train alone, for whom no budget is spent."""
    return _Row(
        (data,),
        lambda epsilon: _mean_over_parties(records, experiment, f"{FED_MD},{epsilon}"),
        lambda epsilon: _mean_over_parties(records, experiment, ALONE),
    )


def _mean_over_parties(records: Sequence[Record], experiment: str, run: str) -> Sample | None:
    """The mean accuracy of all parties, one value per seed."""
    of_run = [r for r in records if (r.experiment, r.run) == (experiment, run)]
    models = list(of_run[0].final) if of_run else []
    samples = [s for model in models if (s := sample(records, experiment, run, model))]
    if not samples:
        return None
    values = zip(*(party.values for party in samples), strict=True)
    return samples[0]._replace(values=tuple(map(statistics.fmean, values)))


def _gain(ours: Sample | None, other: Sample | None) -> str:
    """The gain within seeds; empty for the baseline itself and for models that it does not have."""
    if ours is None or other is None or ours.records == other.records:
        return ""
    differences = [a - b for a, b in common_seeds(ours, other)]
    return mean_difference(differences) if differences else ""
