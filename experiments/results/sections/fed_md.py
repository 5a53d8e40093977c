"""FedMD: each party before and after collaboration, beside the pooled bound; the paper's remarks."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

from experiments.results import figures
from experiments.results.figures import PartyCurve
from experiments.results.records import Record
from experiments.results.sections.beneath import own_notes
from experiments.results.sections.cells import mean_difference
from experiments.results.sections.commands import full_lengths, planned, sweep
from experiments.results.sections.markdown import Plots, codes, image, table

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
# phases.stopping -> how training before the rounds, and the bound's, came to its end.
STOPPING = {
    "fixed": "Every phase has all its epochs: nothing looks at test data.",
    "held_out": "Public training stops on held-out public examples, the other phases have all their "
    "epochs: nothing looks at test data.",
    "test_data": "Phases stop on **test data**, as in the released code: accuracies are too good.",
    None: "How phases were stopped is not recorded.",
}

# A run's accuracies of a party, in %: round -> one per seed.
Course = dict[int, list[float]]
Measure = Callable[[Iterable[Course]], list[float]]  # parties -> one number per seed


def fed_md(records: Sequence[Record], notes: dict[str, str], plots: Plots) -> list[str]:
    """A table and a plot of each run, and what the paper remarks."""
    parts = [
        "## FedMD",
        "Parties with networks of their own (Li and Wang, 2019): accuracy in % on the common test set "
        "after transfer learning alone, after the rounds of collaboration, and of each party's network "
        "trained on all parties' examples, the *bound*. Means over the seeds; intervals are Student's t "
        "over the seeds' means of parties (95 %). The paper finds about 20 points of gain and a few "
        "below the bound.",
    ]
    for experiment, title in TITLES.items():
        own = [r for run in planned(experiment) if (r := _record(records, experiment, run))]
        if not own:
            parts += [f"### {title}", f"Not run.\n\n{sweep(experiment, planned(experiment))}"]
            continue
        parts.append(f"### {title}")
        if experiment == SMALL:
            parts.append(
                "† Networks are an eighth as wide as the paper's, there are fewer public images, and "
                f"training before the rounds is shorter (`experiments/configs/{SMALL}.py`). Differences "
                "may be compared, levels may not."
            )
        for record in own:
            if record.phases.get("pooled"):
                parts += _run(record, plots)
        if experiment == SMALL:
            parts += _remarks(records)
        parts += [*_stopping(own), *full_lengths(own), *own_notes(own), notes.get(experiment, "")]
    return parts


def _run(record: Record, plots: Plots) -> list[str]:
    parties = _parties(record)
    bounds = {
        party: [100 * share for share in splits[SPLIT]["accuracy"]]
        for party, splits in record.phases["pooled"].items()
    }
    before = {party: course[0] for party, course in parties.items()}
    after = {party: course[max(course)] for party, course in parties.items()}
    rows = [
        [f"`{party}`", *_row([_mean(own[party]) for own in (before, after, bounds)])]
        for party in parties
    ]
    means = [_over_parties(own.values()) for own in (before, after, bounds)]
    rows.append(["mean", *_row([_mean(own) for own in means])])
    gains = [b - a for a, b in zip(means[0], means[1], strict=True)]
    gaps = [c - b for b, c in zip(means[1], means[2], strict=True)]
    theirs = PAPER_BOUNDS.get(record.experiment, {}).get(record.run)
    name = f"{record.experiment}_{record.run.replace(',', '_')}.png"
    curves = {
        party: PartyCurve(
            tuple(sorted(course)), tuple(_mean(course[round]) for round in sorted(course))
        )
        for party, course in parties.items()
    }
    plots[name] = lambda: figures.parties_plot(curves, _mean(means[0]), _mean(means[2]))
    count = len(record.seeds)
    return [
        f"**`{record.run}`**, {record.rounds} rounds, {count} seed{'' if count == 1 else 's'}",
        table(["Party", "Before", "After", "Gain", "Bound", "Below it"], rows),
        f"Gain {mean_difference(gains)}, below the bound {mean_difference(gaps)} points."
        + (f" The paper's bound has a mean of {theirs:.1f} %." if theirs else ""),
        image(name, f"Accuracy of each party by round, {record.run}"),
        "Dashed: the parties' mean before. Dashed and dotted: of their bounds.",
    ]


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
    return ["What the paper remarks:", table(["Remark", "Difference, points", "Paper"], rows)]


def _stopping(records: Iterable[Record]) -> list[str]:
    """How the phases of each run were stopped."""
    by_mode: dict[str | None, list[str]] = {}
    for record in records:
        mode = record.config.get("phases", {}).get("stopping")
        by_mode.setdefault(mode, []).append(record.run)
    return ["\n".join(f"- {STOPPING[mode]} ({codes(runs)})" for mode, runs in by_mode.items())]


def _final(parties: Iterable[Course]) -> list[float]:
    """Mean final accuracy of the parties."""
    return _over_parties(own[max(own)] for own in parties)


def _dips(parties: Iterable[Course]) -> list[float]:
    """What a party loses in rounds in which it loses, summed over the rounds; the mean of parties."""
    lost = []
    for course in parties:
        rounds = [course[round] for round in sorted(course)]
        lost.append(
            [
                sum(max(0.0, a - b) for a, b in itertools.pairwise(own))
                for own in zip(*rounds, strict=True)
            ]
        )
    return _over_parties(lost)


BASE = "non_iid"
EQUAL, LOW = "weak,equal_weights", "weak,low_weights"
# What it says, a run, the run that it is compared with, what is compared, what the paper finds.
REMARKS: tuple[tuple[str, str, str, Measure, str], ...] = (
    ("Others beside four weak parties, equal weights", EQUAL, BASE, _final, "below 0"),
    ("Others beside four weak parties, low weights", LOW, BASE, _final, "about 0"),
    ("The same, low less equal weights", LOW, EQUAL, _final, "above 0"),
    ("Dips: 2 epochs of revisit in place of 10", "revisit_epochs,2", BASE, _dips, "below 0"),
    ("Dips: digest in one batch", "digest_batch_size,200", BASE, _dips, "below 0"),
    ("All public images in place of a tenth", "public_images,all", BASE, _final, "about 0"),
    ("A quarter of the tenth", "public_images,50", BASE, _final, ""),
)


def _record(records: Sequence[Record], experiment: str, run: str) -> Record | None:
    """The run's finished record with most seeds, of these the newest; None where there is none."""
    found = [r for r in records if (r.experiment, r.run) == (experiment, run) and r.finished]
    return max(found, key=lambda r: (len(r.seeds), r.date or ""), default=None)


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


def _row(values: Sequence[float]) -> list[str]:
    before, after, bound = values
    gain = f"{after - before:+.1f}"
    return [f"{before:.1f}", f"{after:.1f}", gain, f"{bound:.1f}", f"{bound - after:.1f}"]
