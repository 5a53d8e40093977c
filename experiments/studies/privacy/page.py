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
    """Accuracies and gains at each budget, and the gains at each epsilon less those without noise."""
    columns = {
        epsilon: "no noise" if epsilon == _NO_NOISE else f"epsilon {epsilon}"
        for epsilon in EPSILONS
    }
    headings, questions = list(firsts), list(firsts)
    for epsilon, column in columns.items():
        headings += [f"{column}: ours", f"{column}: over {compared_with}"]
        questions += [] if epsilon == _NO_NOISE else [f"{column}: ours"]
    lines, answers = [], []
    for row in rows:
        samples = {epsilon: (row.ours(epsilon), row.other(epsilon)) for epsilon in columns}
        gains = {epsilon: _gains(*pair) for epsilon, pair in samples.items()}
        line, answer = list(row.texts), list(row.texts)
        for epsilon, (ours, other) in samples.items():
            line += [
                accuracy(ours),
                OTHER_SETTINGS if _differ(ours, other) else _mean(gains[epsilon]),
            ]
            if epsilon != _NO_NOISE:
                common = sorted(gains[epsilon].keys() & gains[_NO_NOISE].keys())
                more = {seed: gains[epsilon][seed] - gains[_NO_NOISE][seed] for seed in common}
                answer.append(_mean(more) or NOT_RUN)
        lines.append(line)
        if any(gains.values()):  # the baseline itself gains nothing
            answers.append(answer)
    about = f"**Gain over {compared_with} with noise, less that without noise**"
    shown = [about, table(questions, answers, texts=len(firsts))] if answers else []
    return [table(headings, lines, texts=len(firsts)), *shown]


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


def _differ(ours: Sample | None, other: Sample | None) -> bool:
    """Whether the runs have other settings, besides those of the method."""
    if ours is None or other is None:
        return False
    return not equal_but(ours, other, (*OWN, *UNLABELLED))


def _gains(ours: Sample | None, other: Sample | None) -> dict[int, float]:
    """The gain of each common seed; none for the baseline itself, and for models that it lacks."""
    if not ours or not other or ours.records == other.records or _differ(ours, other):
        return {}
    seeds = sorted({*ours.seeds} & {*other.seeds})
    return {seed: a - b for seed, (a, b) in zip(seeds, common_seeds(ours, other), strict=True)}


def _mean(differences: Mapping[int, float]) -> str:
    return mean_difference(list(differences.values())) if differences else ""
