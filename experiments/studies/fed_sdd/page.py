"""FedSDD's tables: ours beside the paper's, and differences within seeds."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.fed_sdd.tables import (
    ORDERINGS,
    REPORTED,
    SCALED,
    SCALED_ROWS,
    STANDS_FOR,
    Ordering,
    Table,
    scaled,
    tables,
)
from experiments.studies.pages import IN_SHORT, Notes, Page, first_screen, found
from experiments.studies.samples import Term, common_seeds, equal_but, sample
from experiments.studies.sections.cells import OTHER_SETTINGS, accuracy
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import estimate, table
from experiments.studies.settings import UNLABELLED
from experiments.studies.verdicts import OPEN, Verdict, decided
from fedcodist.report.intervals import ONE_SEED, Estimate, paired
from fedcodist.report.spread import plus_minus

EXPERIMENTS = (SCALED, *dict.fromkeys(shown.experiment for shown in tables()))
TEST_IMAGES = 10_000
HEADING = "Scaled down: CIFAR-10"
# Settings in which the methods of one table may differ.
VARYING = (
    "algorithm.*",
    "training.method",
    "training.proximal_weight",
    "training.scaffold_option",
    *UNLABELLED,
)


def fed_sdd(records: Sequence[Record], notes: Notes) -> Page:
    """The scaled runs, then those of the paper's tables that have runs."""
    full = full_length(records)
    verdicts = [_verdict(full, ordering) for ordering in ORDERINGS]
    parts = first_screen("FedSDD", notes, verdicts)
    parts += [f"## {HEADING}", notes["Scaled down"], _scaled(full)]
    parts.append(found(notes, "Scaled down"))
    for shown in tables():
        terms = [term for row in shown.rows for term in row.cells]
        if any(sample(full, *term) for term in terms if term.experiment == shown.experiment):
            parts += _table(full, shown)
    missing = not_run(records, EXPERIMENTS)
    parts += endings(records, EXPERIMENTS, about_missing=notes["Not run"])
    in_short = found(notes, IN_SHORT)
    return Page("fed_sdd", "FedSDD", EXPERIMENTS, parts, {}, in_short, verdicts, missing)


def _scaled(records: Sequence[Record]) -> str:
    rows = []
    for row in SCALED_ROWS:
        cells = [row.label, *_beside(records, scaled(row.run), row.main)]
        has_ensemble = row.run.startswith(("fed_sdd", "no_", "basic"))
        of_ensemble = _beside(records, scaled(row.run, "ensemble"), row.ensemble)
        rows.append([*cells, *(of_ensemble if has_ensemble else ("", ""))])
    return table(_headings(["Main model", "Ensemble"]), rows)


def _verdict(records: Sequence[Record], ordering: Ordering) -> Verdict:
    """Whether the first run is above the second, as in the paper.

    Differences of one seed, marked ‡, decide nothing: their interval is that of the test images.
    """
    text, plus, minus = ordering
    theirs = REPORTED[STANDS_FOR[plus]].mean - REPORTED[STANDS_FOR[minus]].mean
    ours = difference(records, plus, minus)
    if ours is None:
        were_run = sample(records, *plus) and sample(records, *minus)
        why = OTHER_SETTINGS if were_run else ""
        return Verdict(text, OPEN, HEADING, f"{theirs:+.2f}", why)
    has_one_seed = ours.kind == ONE_SEED
    word = decided(ours.value, None if has_one_seed else ours.half_width, "above 0")
    mark = " ‡" if has_one_seed else ""
    return Verdict(text, word, HEADING, f"{theirs:+.2f}", estimate(ours) + mark)


def _table(records: Sequence[Record], shown: Table) -> list[str]:
    rows, differences = [], []
    for row in shown.rows:
        rows.append([row.label])
        for column, term, other in zip(shown.columns, row.cells, row.baseline, strict=True):
            rows[-1] += _beside(records, term, term)
            if other and (ours := difference(records, term, other, shown.varying)):
                theirs = REPORTED[term].mean - REPORTED[other].mean
                line = [row.label, column, estimate(ours), ours.kind, f"{theirs:+.2f}"]
                differences.append(line)
    parts = [f"## {shown.heading}", table(_headings(shown.columns), rows)]
    if differences:
        parts += [
            f"**Differences to: {shown.compared_with}**",
            table(["Method", "Column", "Ours", "Interval", "Paper's"], differences, texts=2),
        ]
    return parts


def _headings(columns: Sequence[str]) -> list[str]:
    return ["Method", *(f"{column}: {whose}" for column in columns for whose in ("ours", "paper"))]


def difference(
    records: Sequence[Record], plus: Term, minus: Term, varying: Sequence[str] = ()
) -> Estimate | None:
    """`plus` minus `minus` over the seeds that both have; None if one is missing, or if settings differ
    that are neither the method's nor in `varying`."""
    ours, other = sample(records, *plus), sample(records, *minus)
    if ours is None or other is None or not equal_but(ours, other, (*VARYING, *varying)):
        return None
    pairs = common_seeds(ours, other)
    if not pairs:
        return None
    return paired([a for a, _ in pairs], [b for _, b in pairs], TEST_IMAGES)


def _beside(records: Sequence[Record], ours: Term, theirs: Term | None) -> tuple[str, str]:
    """(our cell, the paper's cell)."""
    reported = REPORTED.get(theirs) if theirs else None
    paper = plus_minus(*reported) if reported else "–"
    return accuracy(sample(records, *ours)), paper
