"""FedMD: each party before and after collaboration, beside the upper bound; the paper's remarks."""

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.configs.cifar_fed_md import VARIANTS
from experiments.studies.archive import Record
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import codes, image, table
from experiments.studies.seeds import most_seeds
from experiments.studies.verdicts import Verdict, judge
from fedcodist.report.plot_parties import PartyCurve, parties_plot
from fedcodist.report.spread import mean_difference
from fedcodist.report.tables_parties import STOPPING

SMALL = "cifar_fed_md_small"
TITLES = {
    SMALL: "CIFAR at a size for a CPU",
    "cifar_fed_md": "CIFAR",
    "emnist_fed_md": "MNIST and letters of EMNIST",
}
EXPERIMENTS = tuple(TITLES)
# Experiment -> private classes -> mean accuracy of the paper's parties with all examples (table 4).
PAPER_BOUNDS = {
    "cifar_fed_md": {"non_iid": 56.53, "iid": 82.61},
    "emnist_fed_md": {"non_iid": 87.68, "iid": 89.37},
}
# The paper's 20 points on average over its experiments, which we take as at least 10 in each; and its
# "few percent", which we take as at most 6.
PAPER_GAIN, FEW = "at least 10", "at most 6"
CONTROL = "Gains from other parties"
# What remarks begin with on runs that were meant to explain others.
LONG_TRAINING = "500 private epochs"
SPLIT = "test"

# A run's accuracies of a party, in %: round -> one per seed.
Course = dict[int, list[float]]
Measure = Callable[[Iterable[Course]], list[float]]  # parties -> one number per seed


class Remark(NamedTuple):
    """The paper's remark on a run compared with another: a line of remarks.csv."""

    remark: str
    run: str
    compared_with: str
    measure: str
    paper: str


def fed_md(records: Sequence[Record], notes: Notes) -> Page:
    """A table and a plot of each run, and the paper's remarks."""
    plots: Plots = {}
    full = full_length(records)
    parts, verdicts = [], []
    for experiment, title in TITLES.items():
        recorded = [r for run in planned(experiment) if (r := _record(full, experiment, run))]
        if not recorded:
            continue
        parts += [f"## {title}", notes.get(title, "")]
        for record in recorded:
            if record.phases.get("centralised"):
                alone = _record(full, experiment, f"{record.run},alone")
                parts += _run(record, alone, plots)
                verdicts += _of_run(record, title)
        parts += _variants(full, experiment, notes)
        if experiment == SMALL:
            found_of = {remark: _difference(remark, full) for remark in REMARKS}
            cells = [
                [remark.remark, mean_difference(values) if values else NOT_RUN, remark.paper]
                for remark, values in found_of.items()
            ]
            parts += [notes["Remarks"], table(["Remark", "Difference, points", "Paper"], cells)]
            verdicts += [
                judge(remark.remark, values, remark.paper, title)._replace(
                    is_main=not remark.remark.startswith(LONG_TRAINING)
                )
                for remark, values in found_of.items()
                if remark.paper
            ]
        parts += [*_stopping(recorded), *_data(recorded), found(notes, title)]
    parts += endings(records, EXPERIMENTS, about_missing=notes["Not run"])
    missing = not_run(records, EXPERIMENTS)
    parts = [*first_screen("FedMD", notes, verdicts), *_controls(full, notes), *parts]
    in_short = found(notes, IN_SHORT)
    return Page("fed_md", "FedMD", EXPERIMENTS, parts, plots, in_short, verdicts, missing)


def _controls(records: Sequence[Record], notes: Notes) -> list[str]:
    """How much of the gain comes from other parties, for runs with several seeds."""
    rows = []
    for experiment in EXPERIMENTS:
        for run in planned(experiment):
            both = [_record(records, experiment, name) for name in (run, f"{run},alone")]
            found_both = [record for record in both if record is not None]
            if len(found_both) < 2 or found_both[0].seeds != found_both[1].seeds:
                continue
            ours, alone = (
                _over_parties(course[max(course)] for course in _parties(record).values())
                for record in found_both
            )
            if len(ours) > 1:
                difference = [a - b for a, b in zip(ours, alone, strict=True)]
                rows.append([f"`{run}`", mean_difference(difference)])
    if not rows:
        return []
    return [f"## {CONTROL}", notes[CONTROL], table(["Run", "Gain over training alone"], rows)]


def _run(record: Record, without: Record | None, plots: Plots) -> list[str]:
    """A run's table and picture; `without` are the same rounds without collaboration."""
    parties = _parties(record)
    bounds = {
        party: [100 * share for share in splits[SPLIT]["accuracy"]]
        for party, splits in record.phases["centralised"].items()
    }
    before = {party: course[0] for party, course in parties.items()}
    after = {party: course[max(course)] for party, course in parties.items()}
    columns = {"Before": before, "After": after, "Bound": bounds}
    if without and without.seeds == record.seeds:
        alone = {party: course[max(course)] for party, course in _parties(without).items()}
        columns = {"Before": before, "Alone": alone, "After": after, "Bound": bounds}
    rows = [
        [f"`{party}`", *_row({name: _mean(of[party]) for name, of in columns.items()})]
        for party in parties
    ]
    means = {name: _over_parties(of.values()) for name, of in columns.items()}
    rows.append(["mean", *_row({name: _mean(values) for name, values in means.items()})])
    less = lambda more, fewer: mean_difference(
        [a - b for a, b in zip(means[more], means[fewer], strict=True)]
    )
    to_alone = f", to parties alone {less('After', 'Alone')}" if "Alone" in means else ""
    theirs = PAPER_BOUNDS.get(record.experiment, {}).get(record.run.split(",")[0])
    name = f"{record.experiment}_{record.run.replace(',', '_')}.png"
    curves = {
        party: PartyCurve(
            tuple(sorted(course)), tuple(_mean(course[round]) for round in sorted(course))
        )
        for party, course in parties.items()
    }
    ends = _mean(means["Before"]), _mean(means["Bound"])
    plots[name] = lambda: parties_plot(curves, *ends)
    count = len(record.seeds)
    return [
        f"**`{record.run}`**, {record.rounds} rounds, {count} seed{'' if count == 1 else 's'}"
        + _networks(record),
        table(
            ["Party", *columns, "Gain", *(["to alone"] if to_alone else []), "below bound"], rows
        ),
        f"Gain {less('After', 'Before')}{to_alone}, below the bound {less('Bound', 'After')} points."
        + (f" The paper's bound, of its table 2's networks, is {theirs:.1f} %." if theirs else ""),
        _by_round(parties) + _public(record),
        image(name, f"Accuracy of each party by round, {record.run}"),
    ]


def _variants(records: Sequence[Record], experiment: str, notes: Notes) -> list[str]:
    """Runs that differ from another in one choice: the parties' gain by it, each party counted once."""
    rows = []
    for run in planned(experiment):
        base = run.rpartition(",")[0]
        shown, beside = (_record(records, experiment, name) for name in (run, base))
        if run.rpartition(",")[2] not in VARIANTS or beside is None:
            continue
        if shown is None:
            rows.append([f"`{run}`", "", NOT_RUN, "", "", ""])
            continue
        after, without = (
            {party: _mean(course[max(course)]) for party, course in _parties(each).items()}
            for each in (shown, beside)
        )
        gains = [after[party] - without[party] for party in after if party in without]
        means = [f"{_mean(list(each.values())):.1f}" for each in (without, after)]
        ends = [f"{value:+.1f}" for value in (min(gains), max(gains))]
        rows.append([f"`{run}`", *means, mean_difference(gains), *ends])
    if not rows:
        return []
    headings = ["Run", "mean of the run without it", "mean", "difference", "lowest", "highest"]
    return [notes["Variants"], table(headings, rows)]


def _networks(record: Record) -> str:
    """A text on the networks, if they are not table 1's at the paper's size."""
    settings = record.config.get("parties", {})
    of_table = "table 2's" if settings.get("networks") == "table_2" else "table 1's"
    if (factor := settings.get("narrower", 1)) != 1:
        return f", networks narrower than {of_table} by a factor of {factor}"
    return "" if of_table == "table 1's" else f", {of_table} networks"


def _by_round(parties: Mapping[str, Course]) -> str:
    rounds = next(iter(parties.values()))
    means = (_mean(_over_parties(course[round] for course in parties.values())) for round in rounds)
    return f"Means of the parties by round, from {min(rounds)}: {', '.join(f'{m:.1f}' for m in means)}."


def _public(record: Record) -> str:
    """The parties' accuracy on public classes before their private training."""
    shares = [
        share
        for splits in record.phases.get("public", {}).values()
        for share in splits.get("public_test", {}).get("accuracy", ())
    ]
    return f" Of public test images they knew {100 * _mean(shares):.1f} %." if shares else ""


def _difference(remark: Remark, records: Sequence[Record]) -> list[float]:
    """Our difference in each seed that both runs have; empty if one was not run."""
    runs = (remark.run, remark.compared_with, BASE)
    three = [record for run in runs if (record := _record(records, SMALL, run))]
    if len(three) < 3:
        return []
    parties = [_parties(record) for record in three]
    # The parties that are strong in all three runs.
    kept = set.intersection(*map(set, parties))
    by_seed = [
        dict(zip(record.seeds, values, strict=True))
        for record, courses in zip(three[:2], parties[:2], strict=True)
        for values in [MEASURES[remark.measure]([courses[party] for party in kept])]
    ]
    ours, theirs = by_seed
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def _of_run(record: Record, title: str) -> list[Verdict]:
    """What the paper says of every experiment."""
    parties = _parties(record)
    before, after = (
        _over_parties(course[at(course)] for course in parties.values()) for at in (min, max)
    )
    bound = _over_parties(
        [100 * share for share in splits[SPLIT]["accuracy"]]
        for splits in record.phases["centralised"].values()
    )
    less = lambda more, fewer: [a - b for a, b in zip(more, fewer, strict=True)]
    run = f"`{record.run}`"
    several = len(record.seeds) > 1
    judged = [
        judge(
            f"{run}: parties gain (20 points on average)", less(after, before), PAPER_GAIN, title
        ),
        judge(f"{run}: parties end a few points below their bound", less(bound, after), FEW, title),
    ]
    return [verdict._replace(is_main=several) for verdict in judged]


def _stopping(records: Iterable[Record]) -> list[str]:
    """How the phases of each run were stopped."""
    by_mode: dict[str | None, list[str]] = {}
    for record in records:
        mode = record.config.get("phases", {}).get("stopping")
        by_mode.setdefault(mode, []).append(record.run)
    return ["\n".join(f"- {STOPPING[mode]} ({codes(runs)})" for mode, runs in by_mode.items())]


def _data(records: Iterable[Record]) -> list[str]:
    """A text on the images of the runs."""
    lines: dict[str, None] = {}
    for record in records:
        for setting, kind in (("public_folder", "Public"), ("folder", "Private")):
            folder = record.config["data"].get(setting)
            if about := record.data.get(folder):
                doubt = ", not verified as its official files" if about["unverified"] else ""
                count = about["num_examples"]["train"]
                text = f"- {kind} images are of the {count:,} of `train` in {folder}"
                lines[f"{text} ({about['source']}{doubt})."] = None
    return ["\n".join(lines)] if lines else []


def _late(parties: Iterable[Course]) -> list[float]:
    """Mean accuracy of the parties in the last three rounds, since single rounds dip."""
    return _over_parties(
        [_mean(last) for last in zip(*(course[r] for r in sorted(course)[-3:]), strict=True)]
        for course in parties
    )


def _dips(parties: Iterable[Course]) -> list[float]:
    """Depth of dips below both an earlier and a later round, summed over rounds; mean over parties."""
    lost = []
    for course in parties:
        of_seeds = zip(*(course[round] for round in sorted(course)), strict=True)
        lost.append([_transient(values) for values in of_seeds])
    return _over_parties(lost)


def _transient(values: Sequence[float]) -> float:
    inner = range(1, len(values) - 1)
    return sum(
        max(0.0, min(max(values[:place]), max(values[place + 1 :])) - values[place])
        for place in inner
    )


BASE = "non_iid"
MEASURES: Mapping[str, Measure] = {"accuracy": _late, "dips": _dips}
with Path(__file__).with_name("remarks.csv").open(encoding="utf-8", newline="") as file:
    REMARKS = tuple(Remark(**line) for line in csv.DictReader(file))


def _record(records: Sequence[Record], experiment: str, run: str) -> Record | None:
    """The run's finished records with most seeds, joined into one; None if there is none."""
    return most_seeds(
        r for r in records if (r.experiment, r.run) == (experiment, run) and r.finished
    )


def _parties(record: Record) -> dict[str, Course]:
    return {
        party: {
            round: [100 * share for share in shares]
            for round, shares in zip(points["round"], points["accuracy"], strict=True)
        }
        for party, splits in record.curve.items()
        if (points := splits.get(SPLIT))
    }


def _over_parties(values: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(of_seed) for of_seed in zip(*values, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _row(values: Mapping[str, float]) -> list[str]:
    gains = [f"{values['After'] - values['Before']:+.1f}"]
    if "Alone" in values:
        gains.append(f"{values['After'] - values['Alone']:+.1f}")
    below = f"{values['Bound'] - values['After']:.1f}"
    return [*(f"{value:.1f}" for value in values.values()), *gains, below]
