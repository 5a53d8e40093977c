"""The page of methods under user-level differential privacy: accuracy at each budget.

Below each table is another one of the page's question: is the gain larger with noise than without?
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.studies.archive import Record
from experiments.studies.pages import IN_SHORT, Notes, Page, first_screen, found
from experiments.studies.samples import Sample, common_seeds, equal_but, sample
from experiments.studies.sections.cells import NOT_RUN, OTHER_SETTINGS, accuracy
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import table
from experiments.studies.settings import OWN, UNLABELLED
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
_NO_NOISE = "inf"
# Budget -> the beginning of its columns' headings.
_COLUMNS = {e: "no noise" if e == _NO_NOISE else f"epsilon {e}" for e in EPSILONS}
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
        parts += _tables(("Method", "Model"), rows, METHOD_NAMES[BASELINE])
        parts.append(found(notes, heading))
    rows = [_of_parties(full, data, experiment) for data, experiment in _OF_PARTIES.items()]
    parts += [f"## {_PARTIES}", notes.get(_PARTIES, "")]
    parts += [*_tables(("Data",), rows, "training alone"), found(notes, _PARTIES)]
    parts += endings(records, EXPERIMENTS, about_missing=notes.get("Not run", ""))
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("privacy", "Private methods", EXPERIMENTS, parts, {}, in_short, not_run=missing)


def _tables(firsts: tuple[str, ...], rows: Sequence[_Row], compared_with: str) -> list[str]:
    """The accuracies and gains at each budget, and the answers to the page's question."""
    headings = list(firsts)
    for column in _COLUMNS.values():
        headings += [f"{column}: ours", f"{column}: over {compared_with}"]
    lines = []
    for row in rows:
        line = list(row.texts)
        for epsilon in _COLUMNS:
            ours, other = row.ours(epsilon), row.other(epsilon)
            gain = _mean(_gains(ours, other)) if _are_alike(ours, other) else OTHER_SETTINGS
            line += [accuracy(ours), gain]
        lines.append(line)
    return [table(headings, lines, texts=len(firsts)), *_answers(firsts, rows, compared_with)]


def _answers(firsts: tuple[str, ...], rows: Sequence[_Row], compared_with: str) -> list[str]:
    """The gains at each epsilon less those without noise; nothing if no row has a gain."""
    noisy = {epsilon: column for epsilon, column in _COLUMNS.items() if epsilon != _NO_NOISE}
    lines = []
    for row in rows:
        gains = {epsilon: _gains(row.ours(epsilon), row.other(epsilon)) for epsilon in _COLUMNS}
        if not any(gains.values()):  # as those of the baseline itself
            continue
        plain = gains[_NO_NOISE]
        more = [
            {seed: gain - plain[seed] for seed, gain in gains[epsilon].items() if seed in plain}
            for epsilon in noisy
        ]
        lines.append([*row.texts, *(_mean(of_epsilon) or NOT_RUN for of_epsilon in more)])
    if not lines:
        return []
    headings = [*firsts, *(f"{column}: ours" for column in noisy.values())]
    about = f"**Gain over {compared_with} with noise, less that without noise**"
    return [about, table(headings, lines, texts=len(firsts))]


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


def _are_alike(ours: Sample | None, other: Sample | None) -> bool:
    """Whether no settings differ but those of the method; also if a run is missing."""
    return ours is None or other is None or equal_but(ours, other, (*OWN, *UNLABELLED))


def _gains(ours: Sample | None, other: Sample | None) -> dict[int, float]:
    """The gain of each common seed; none for the baseline itself, and for models that it lacks."""
    if ours is None or other is None or ours.records == other.records:
        return {}
    if not _are_alike(ours, other):
        return {}
    seeds = sorted({*ours.seeds} & {*other.seeds})
    return {seed: a - b for seed, (a, b) in zip(seeds, common_seeds(ours, other), strict=True)}


def _mean(differences: Mapping[int, float]) -> str:
    return mean_difference(list(differences.values())) if differences else ""
