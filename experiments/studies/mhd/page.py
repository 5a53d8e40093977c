"""Multi-Headed Distillation: accuracies of every head, and the orderings that the paper states."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.mhd.beside_fed_md import BESIDE_FED_MD, beside_fed_md
from experiments.studies.mhd.differences import difference_of
from experiments.studies.mhd.heads_table import ROWS, heads_table
from experiments.studies.mhd.known import Known, KnownRuns, known_of, newest
from experiments.studies.mhd.orderings import (
    NOT_STATED,
    Ordering,
    orderings,
    orderings_on_digits,
)
from experiments.studies.mhd.short_runs import SECTIONS
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import table
from experiments.studies.verdicts import Verdict, judge
from fedcodist.report.spread import mean_difference

CIFAR, CIFAR_LONG, DIGITS = "cifar100_mhd", "cifar100_mhd_long", "digits_mhd_orderings"
EXPERIMENTS = (DIGITS, CIFAR_LONG, CIFAR, BESIDE_FED_MD)
ON_DIGITS = "Digits: all orderings"
LONGER = "CIFAR-100: ten times as many steps"
HEADINGS = ("Ordering", "Difference, points", "Paper")


def mhd(records: Sequence[Record], notes: Notes) -> Page:
    """The orderings of the paper, each with the tables and plots that show it."""
    plots: Plots = {}
    full = full_length(records)
    known = _known_runs(full, CIFAR)
    measured = orderings()
    parts, verdicts = _on_digits(full, notes)
    # The runs of the other sections are far shorter than the paper's, so that they decide nothing.
    has_digits = bool(verdicts)
    of_longer, verdicts_of_longer = _longer(full, notes)
    parts += of_longer
    verdicts += verdicts_of_longer
    for name, (title, body) in SECTIONS.items():
        of_section = [ordering for ordering in measured if ordering.section == name]
        rows, of_rows = _measured(known, of_section, title)
        verdicts += [] if has_digits else of_rows
        parts += [f"## {title}", notes.get(title, ""), *body(known, notes, plots)]
        parts += [table(HEADINGS, rows), found(notes, title)]
    beside = "Beside FedMD"
    lines, tables = beside_fed_md(full)
    if not has_digits:
        verdicts += [judge(text, values, "above 0", beside) for text, values in lines]
    parts += [f"## {beside}", notes[beside], *tables, found(notes, beside)]
    parts += endings(records, EXPERIMENTS)
    title = "Multi-Headed Distillation"
    parts = [*first_screen(title, notes, verdicts), *parts]
    in_short, missing = found(notes, IN_SHORT), not_run(records, EXPERIMENTS)
    return Page("mhd", title, EXPERIMENTS, parts, plots, in_short, verdicts, missing)


def _on_digits(records: Sequence[Record], notes: Notes) -> tuple[list[str], list[Verdict]]:
    """The first section: orderings, findings, and accuracies of every head in the recorded runs."""
    known = _known_runs(records, DIGITS)
    if not known:
        return [], []
    every = orderings_on_digits()
    measured = [ordering for ordering in every if difference_of(known, ordering)]
    rows, verdicts = _measured(known, measured, ON_DIGITS, has_words=True)
    runs = {label: run for label, run in ROWS["digits"].items() if run in known}
    sent = [
        [label, f"{next(iter(record.bytes.values()))['down']:,}"]
        for label, run in runs.items()
        if (record := newest(records, DIGITS, run)) and record.bytes
    ]
    parts = [
        f"## {ON_DIGITS}",
        notes[ON_DIGITS],
        table((*HEADINGS, "Here"), rows),
        found(notes, ON_DIGITS),
        "**What every head knows**",
        heads_table(known, runs),
        *(["**Bytes**", table(["", "received by a client in a round"], sent)] if sent else []),
    ]
    if missing := len(every) - len(measured):
        waiting = f"{missing} of {len(every)} orderings wait for runs"
        parts.insert(3, f"{waiting}, whose command is at the page's end.")
    return parts, verdicts


def _longer(records: Sequence[Record], notes: Notes) -> tuple[list[str], list[Verdict]]:
    """The orderings that the long runs on CIFAR-100 measure. Their verdicts are counted apart."""
    known, short = _known_runs(records, CIFAR_LONG), _known_runs(records, CIFAR)
    measured = [
        ordering._replace(in_words="", again="30,000 steps on CIFAR-100")
        for ordering in orderings()
        if difference_of(known, ordering)
    ]
    if not measured:
        return [], []
    rows, verdicts = _measured(known, measured, LONGER, has_words=True)
    both = {
        f"{label}, {steps} steps": of_length[run]
        for label, run in ROWS["longer"].items()
        for steps, of_length in (("3,000", short), ("30,000", known))
        if run in known and run in of_length
    }
    parts = [
        f"## {LONGER}",
        notes[LONGER],
        table((*HEADINGS, "Here"), rows),
        found(notes, LONGER),
        heads_table(both, {label: label for label in both}),
    ]
    return parts, verdicts


def _known_runs(records: Sequence[Record], experiment: str) -> dict[str, Known]:
    """The experiment's runs that have accuracies."""
    all_known = {run: known_of(newest(records, experiment, run)) for run in planned(experiment)}
    return {run: known for run, known in all_known.items() if known}


def _measured(
    known: KnownRuns, of_section: Sequence[Ordering], title: str, has_words: bool = False
) -> tuple[list[list[str]], list[Verdict]]:
    """(a table's rows, the verdicts); `has_words`: whether the rows include the verdicts."""
    rows, verdicts = [], []
    for ordering in of_section:
        differences = difference_of(known, ordering)
        shown = mean_difference(differences) if differences else NOT_RUN
        row = [ordering.text, shown, ordering.paper]
        if ordering.paper != NOT_STATED:
            verdict = judge(ordering.in_words, differences, ordering.paper, title)
            is_main = bool(ordering.in_words)
            verdicts.append(verdict._replace(is_main=is_main, again=ordering.again))
            row += [verdict.word] * has_words
        elif has_words:
            row.append("")
        rows.append(row)
    return rows, verdicts
