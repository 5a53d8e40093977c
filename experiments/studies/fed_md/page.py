"""FedMD: each party before and after collaboration, beside the pooled bound; the paper's remarks."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.studies.records import Record
from experiments.studies.sections.cells import mean_difference
from experiments.studies.sections.commands import full_lengths, planned, sweep
from experiments.studies.sections.footnotes import own_notes
from experiments.studies.sections.markdown import Plots, codes, image, table
from experiments.studies.seeds import most_seeds
from fedcodist.report.plot_parties import PartyCurve, parties_plot
from fedcodist.report.tables_parties import STOPPING

SMALL = "cifar_fed_md_small"
TITLES = {
    SMALL: "CIFAR at a size for a CPU †",
    "cifar_fed_md": "CIFAR",
    "emnist_fed_md": "MNIST and letters of EMNIST",
}
# Experiment -> private classes -> mean accuracy of the paper's parties on pooled examples (table 4).
PAPER_BOUNDS = {
    "cifar_fed_md": {"non_iid": 56.53, "iid": 82.61},
    "emnist_fed_md": {"non_iid": 87.68, "iid": 89.37},
}
SPLIT = "test"

# A run's accuracies of a party, in %: round -> one per seed.
Course = dict[int, list[float]]
Measure = Callable[[Iterable[Course]], list[float]]  # parties -> one number per seed


def fed_md(records: Sequence[Record], notes: dict[str, str], plots: Plots) -> list[str]:
    """A table and a plot of each run, and what the paper remarks."""
    parts = [
        "## FedMD",
        "Parties with networks of their own (Li and Wang, 2019): accuracy in % on the common test set "
        "after transfer learning, after the rounds of collaboration, and of each party's network "
        "trained on all parties' examples, the *bound*. *Alone* are the same rounds without the digest: "
        "a party trains on its own examples in every round, so this much of the gain needs nobody else. "
        "Means over the seeds; intervals are Student's t over the seeds' means of parties (95 %). Seeds "
        "differ in first weights and batches, not in who has which images. The paper finds about 20 "
        "points of gain and a few below the bound, and has no such control.",
    ]
    for experiment, title in TITLES.items():
        own = [r for run in planned(experiment) if (r := _record(records, experiment, run))]
        if not own:
            parts += [f"### {title}", f"Not run.\n\n{sweep(experiment, planned(experiment))}"]
            parts.append(notes.get(experiment, ""))
            continue
        parts.append(f"### {title}")
        if experiment == SMALL:
            parts.append(
                "† Networks are an eighth as wide as the paper's and have no dropout; 2,000 images are "
                "public in place of 50,000, and with superclasses each party has half as many private "
                "ones and 8 rounds in place of 13. Public training has 8 epochs in place of 20, the "
                "bound 15 in place of 50, which may leave it too low, and a digest batches of 50 "
                f"(`experiments/configs/{SMALL}.py`). Differences may be compared, levels may not."
            )
        for record in own:
            if record.phases.get("centralised"):
                parts += _run(record, _record(records, experiment, f"{record.run},alone"), plots)
        if experiment == SMALL:
            parts += _remarks(records)
        parts += [*_stopping(own), *_data(own), *full_lengths(own), *own_notes(own)]
        parts.append(notes.get(experiment, ""))
    return parts


def _run(record: Record, without: Record | None, plots: Plots) -> list[str]:
    """A run's table and picture; `without` collaboration are the same rounds of parties alone."""
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
        [f"`{party}`", *_row({name: _mean(own[party]) for name, own in columns.items()})]
        for party in parties
    ]
    means = {name: _over_parties(own.values()) for name, own in columns.items()}
    rows.append(["mean", *_row({name: _mean(own) for name, own in means.items()})])
    less = lambda one, other: mean_difference(
        [a - b for a, b in zip(means[one], means[other], strict=True)]
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
        "Dashed: the parties' mean before. Dashed and dotted: of their bounds.",
    ]


def _networks(record: Record) -> str:
    """Which networks they are, where they are not table 1's at their size."""
    settings = record.config.get("parties", {})
    of_table = "table 2's" if settings.get("networks") == "table_2" else "table 1's"
    if (factor := settings.get("narrower", 1)) != 1:
        return f", networks narrower than {of_table} by a factor of {factor}"
    return "" if of_table == "table 1's" else f", {of_table} networks"


def _by_round(parties: Mapping[str, Course]) -> str:
    rounds = next(iter(parties.values()))
    means = (_mean(_over_parties(own[round] for own in parties.values())) for round in rounds)
    return f"Means of the parties by round, from {min(rounds)}: {', '.join(f'{m:.1f}' for m in means)}."


def _public(record: Record) -> str:
    """What the parties knew of the public classes before their private training."""
    found = [
        share
        for splits in record.phases.get("public", {}).values()
        for share in splits.get("public_test", {}).get("accuracy", ())
    ]
    return f" Of public test images they knew {100 * _mean(found):.1f} %." if found else ""


def _remarks(records: Sequence[Record]) -> list[str]:
    """Differences to the base within seeds."""
    rows = []
    for text, run, other, measure, expected in REMARKS:
        found = [r for each in (run, other, BASE) if (r := _record(records, SMALL, each))]
        if len(found) < 3:
            rows.append([text, "not run", expected])
            continue
        of_run, of_other, _ = ({s: i for i, s in enumerate(one.seeds)} for one in found)
        seeds = sorted(of_run.keys() & of_other.keys())
        each = [_parties(one) for one in found]
        # Those that are strong everywhere.
        kept = set.intersection(*map(set, each))
        ours, theirs = (measure([own[party] for party in kept]) for own in each[:2])
        differences = [ours[of_run[seed]] - theirs[of_other[seed]] for seed in seeds]
        rows.append([text, mean_difference(differences), expected])
    return [
        "What the paper remarks; accuracy is the mean of the last three rounds:",
        table(["Remark", "Difference, points", "Paper"], rows),
    ]


def _stopping(records: Iterable[Record]) -> list[str]:
    """How the phases of each run were stopped."""
    by_mode: dict[str | None, list[str]] = {}
    for record in records:
        mode = record.config.get("phases", {}).get("stopping")
        by_mode.setdefault(mode, []).append(record.run)
    return ["\n".join(f"- {STOPPING[mode]} ({codes(runs)})" for mode, runs in by_mode.items())]


def _data(records: Iterable[Record]) -> list[str]:
    """Which images there were."""
    found: dict[str, None] = {}
    for record in records:
        for setting, kind in (("public_folder", "Public"), ("folder", "Private")):
            folder = record.config["data"].get(setting)
            if about := record.data.get(folder):
                doubt = ", not verified as its official files" if about["unverified"] else ""
                count = about["num_examples"]["train"]
                text = f"- {kind} images are of the {count:,} of `train` in {folder}"
                found[f"{text} ({about['source']}{doubt})."] = None
    return ["\n".join(found)] if found else []


def _late(parties: Iterable[Course]) -> list[float]:
    """Mean accuracy of the parties in the last three rounds, since single rounds dip."""
    return _over_parties(
        [_mean(last) for last in zip(*(own[r] for r in sorted(own)[-3:]), strict=True)]
        for own in parties
    )


def _dips(parties: Iterable[Course]) -> list[float]:
    """How far a round is below both an earlier and a later one, summed over rounds; parties' mean."""
    lost = []
    for course in parties:
        of_seeds = zip(*(course[round] for round in sorted(course)), strict=True)
        lost.append([_transient(own) for own in of_seeds])
    return _over_parties(lost)


def _transient(values: Sequence[float]) -> float:
    inner = range(1, len(values) - 1)
    return sum(
        max(0.0, min(max(values[:place]), max(values[place + 1 :])) - values[place])
        for place in inner
    )


BASE = "non_iid"
EQUAL, LOW = "weak,equal_weights", "weak,low_weights"
KNOWING = "private_epochs,500"  # all parties their private classes, before the first round
EQUAL_KNOWING, LOW_KNOWING = f"{EQUAL},{KNOWING}", f"{LOW},{KNOWING}"
SHORT, LARGE_BATCH, LONG = "revisit_epochs,2", "digest_batch_size,200", "digest_epochs,10"
ALL, FEW = "public_images,all", "public_images,50"
PROBABILITIES = "exchanged,probabilities"
# What it says, a run, the run that it is compared with, what is compared, what the paper finds.
REMARKS: tuple[tuple[str, str, str, Measure, str], ...] = (
    ("Others beside four weak parties, equal weights", EQUAL, BASE, _late, "below 0"),
    ("Others beside four weak parties, low weights", LOW, BASE, _late, "about 0"),
    ("The same, low less equal weights", LOW, EQUAL, _late, "above 0"),
    (
        "500 private epochs: others beside four weak, equal weights",
        EQUAL_KNOWING,
        KNOWING,
        _late,
        "below 0",
    ),
    ("500 private epochs: the same, low weights", LOW_KNOWING, KNOWING, _late, "about 0"),
    ("500 private epochs: low less equal weights", LOW_KNOWING, EQUAL_KNOWING, _late, "above 0"),
    ("Dips: 2 epochs of revisit in place of 10", SHORT, BASE, _dips, "below 0"),
    ("Dips: digest in one batch in place of four", LARGE_BATCH, BASE, _dips, "below 0"),
    ("Accuracy: 2 epochs of revisit in place of 10", SHORT, BASE, _late, ""),
    ("Accuracy: digest in one batch in place of four", LARGE_BATCH, BASE, _late, ""),
    ("Probabilities exchanged in place of logits", PROBABILITIES, BASE, _late, "about 0"),
    ("All public images in place of a tenth, 40 steps of the digest", ALL, LONG, _late, "about 0"),
    ("The same, 40 steps in place of 4", ALL, BASE, _late, ""),
    ("40 steps in place of 4 on a tenth of the images", LONG, BASE, _late, ""),
    ("A quarter of the tenth, one step of the digest", FEW, LARGE_BATCH, _late, ""),
)


def _record(records: Sequence[Record], experiment: str, run: str) -> Record | None:
    """The run's finished record with most seeds, joined; None where there is none."""
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
