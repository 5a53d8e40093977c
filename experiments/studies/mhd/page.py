"""Multi-Headed Distillation: accuracies of every head, and the orderings that the paper states."""

import csv
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.configs.cifar100_mhd import (
    EMBEDDING_WEIGHTS,
    HEAD_WEIGHTS,
    SKEWS,
)
from experiments.studies.archive import Record
from experiments.studies.mhd.beside_fed_md import BESIDE_FED_MD, beside_fed_md
from experiments.studies.mhd.known import Known, KnownRuns, known_of, newest
from experiments.studies.mhd.orderings import (
    FIRST,
    NOT_STATED,
    OTHERS,
    Measure,
    Ordering,
    orderings,
    orderings_on_digits,
    private,
    shared,
    weights_run,
)
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import image, listed, table
from experiments.studies.verdicts import Verdict, judge
from fedcodist.report import tables_heads as heads_lib
from fedcodist.report.spread import mean_difference
from fedcodist.report.tables_heads import Heads

CIFAR, CIFAR_LONG, DIGITS = "cifar100_mhd", "cifar100_mhd_long", "digits_mhd_orderings"
EXPERIMENTS = (DIGITS, CIFAR_LONG, CIFAR, BESIDE_FED_MD)
ON_DIGITS = "Digits: all orderings"
LONGER = "CIFAR-100: ten times as many steps"
# Table -> its rows' labels -> run.
ROWS: dict[str, dict[str, str]] = {}
with Path(__file__).with_name("rows.csv").open(encoding="utf-8", newline="") as file:
    for line in csv.DictReader(file):
        ROWS.setdefault(line["table"], {})[line["row"]] = line["run"]
GRAPHS = ("islands", "directed_cycle", "complete")
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
    measured = [ordering for ordering in every if _difference(known, ordering)]
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
        _heads_table(known, runs),
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
        if _difference(known, ordering)
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
        _heads_table(both, {label: label for label in both}),
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
        differences = _difference(known, ordering)
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


def _compared(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    return [_heads_table(known, ROWS["compared"])]


def _weights(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    parts = []
    for skew in SKEWS:
        for name, measure in (("private", private), ("shared", shared)):
            rows = [
                [
                    f"ν_emb = {embedding}",
                    *(
                        _pair(known, weights_run(skew, embedding, head), measure, head > 0)
                        for head in HEAD_WEIGHTS
                    ),
                ]
                for embedding in EMBEDDING_WEIGHTS
            ]
            headings = [f"s = {skew}, {name}", *(f"ν_aux = {weight}" for weight in HEAD_WEIGHTS)]
            parts.append(table(headings, rows))
    rows = [
        [f"s = {skew}, {name}", *_gains(known, skew, measure)]
        for skew in SKEWS
        for name, measure in (("private", private(0)), ("shared", shared(0)))
    ]
    parts.append(notes["Best weights"])
    parts.append(table(["", "embeddings alone", "predictions alone", "both"], rows))
    return parts


def _gains(known: KnownRuns, skew: int, measure: Measure) -> list[str]:
    """The best cells of the sweep."""
    none = known.get(weights_run(skew, 0, 0))
    cells = []
    for embeddings, predictions in ((True, False), (False, True), (True, True)):
        gains = {}
        for embedding in EMBEDDING_WEIGHTS:
            for head in HEAD_WEIGHTS:
                cell = known.get(weights_run(skew, embedding, head))
                if cell and none and (embedding > 0, head > 0) == (embeddings, predictions):
                    differences = _differences([(cell, measure)], [(none, measure)])
                    if differences:
                        gains[embedding, head] = differences
        if not gains:
            cells.append(NOT_RUN)
            continue
        best = max(gains, key=lambda weights: np.mean(gains[weights]))
        cells.append(f"{mean_difference(gains[best])} ({best[0]}, {best[1]})")
    return cells


def _profiles(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    runs = ROWS["profiles"]
    panels = {
        f"s = {skew}, {name}": {
            label.split(": ")[1]: by_head(known[run].heads)
            for label, run in runs.items()
            if label.startswith(f"s = {skew}:") and run in known
        }
        for skew in SKEWS
        for name, by_head in (("private", _private_by_head), ("shared", _shared_by_head))
    }
    parts = [_heads_table(known, runs)]
    if all(panels.values()):
        plots["mhd_profiles.png"] = lambda: heads_lib.profiles(panels)
        parts.append(image("mhd_profiles.png", "Accuracy by head, for one to four heads"))
    return parts


def _graphs(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    """For four clients, a table and a picture (clients x heads x hops) of each graph."""
    parts = [_heads_table(known, ROWS["graphs"])]
    shown = [known[f"graph,{name}"].heads for name in GRAPHS if f"graph,{name}" in known]
    most = max((100 * heads.on_others.mean(axis=0).max() for heads in shown), default=100.0)
    for name in GRAPHS:
        if not (shown_run := known.get(f"graph,{name}")):
            continue
        travelled = heads_lib.by_hops(shown_run.heads)
        distances = sorted(travelled, key=lambda hops: (hops < 0, hops))
        titles = ["none" if n < 0 else f"{n} hop{'s' * (n != 1)}" for n in distances]
        rows = [
            [title, *(f"{100 * travelled[hops][head]:.1f}" for hops in distances)]
            for head, title in enumerate(shown_run.heads.names)
        ]
        file = f"mhd_graph_{name}.png"
        plots[file] = functools.partial(
            heads_lib.picture, shown_run.heads, name.replace("_", " "), most
        )
        parts += [
            table([name.replace("_", " "), *titles], rows),
            image(file, f"Accuracy of each client's heads on each client's labels, {name}"),
        ]
    return parts


def _targets(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    return [
        _heads_table(known, ROWS["choice"]),
        "**Teachers per step**, three heads, s = 100",
        _heads_table(known, ROWS["teachers"]),
        "**Candidates**, four heads, s = 100",
        _heads_table(known, ROWS["candidates"]),
        "**Public images**, four heads, s = 100, 70 % of the training images private",
        _heads_table(known, ROWS["public"]),
    ]


def _larger(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    measures = [
        (head, measure(head, clients))
        for clients in (FIRST, OTHERS)
        for measure in (private, shared)
        for head in (0, -1)
    ]
    rows = []
    for label, run in ROWS["larger"].items():
        shown = known.get(run)
        # Without auxiliary heads the last one is the main one.
        has_heads = shown and len(shown.heads.names) > 1
        values = [
            f"{measure(shown.heads).mean():.1f}" if shown and (head == 0 or has_heads) else ""
            for head, measure in measures
        ]
        rows.append([label if shown else f"{label}: not run", *values])
    headings = [
        f"{who}, {what}, {head}"
        for who in ("client 0", "clients 1 to 3")
        for what in ("private", "shared")
        for head in ("main", "last")
    ]
    return [table(["", *headings], rows)]


def _heads_table(known: KnownRuns, runs: Mapping[str, str]) -> str:
    """A table row for each label and its run: private / shared accuracy of every head."""
    most = max((len(known[run].heads.names) for run in runs.values() if run in known), default=1)
    rows = []
    for label, run in runs.items():
        if run not in known:
            rows.append([label, NOT_RUN, *[""] * (most + 1)])
            continue
        seeds, heads = known[run]
        cells = [
            f"{of_own:.1f} / {of_all:.1f}" if np.isfinite(of_own) else f"{of_all:.1f}"
            for of_own, of_all in zip(_private_by_head(heads), _shared_by_head(heads), strict=True)
        ]
        spread = shared(-1)(heads)
        deviation = f"{spread.std(ddof=1):.2f}" if len(seeds) > 1 else ""
        rows.append([label, *cells, *[""] * (most - len(cells)), deviation, listed(seeds)])
    headings = ["private / shared", "main", *(f"head {k}" for k in range(1, most))]
    return table([*headings, "± of the last, shared", "Seeds"], rows)


def _private_by_head(heads: Heads) -> np.ndarray:
    return 100 * heads.private.mean(axis=(0, 1))


def _shared_by_head(heads: Heads) -> np.ndarray:
    return 100 * heads.shared.mean(axis=(0, 1))


def _pair(known: KnownRuns, run: str, measure: Callable[[int], Measure], is_trained: bool) -> str:
    if run not in known:
        return NOT_RUN
    heads = (0, 1) if is_trained else (0,)
    return ", ".join(f"{measure(head)(known[run].heads).mean():.1f}" for head in heads)


def _difference(known: KnownRuns, ordering: Ordering) -> list[float]:
    """The difference in each seed that all runs have; empty if one was not run."""
    if not all(run in known for run, _ in (*ordering.plus, *ordering.less)):
        return []
    both = (ordering.plus, ordering.less)
    return _differences(*([(known[run], measure) for run, measure in terms] for terms in both))


def _differences(
    plus: Sequence[tuple[Known, Measure]], less: Sequence[tuple[Known, Measure]]
) -> list[float]:
    """The sum of `plus` minus that of `less`, in the seeds that all have."""
    totals: dict[int, float] = {}
    terms = [*((1, *term) for term in plus), *((-1, *term) for term in less)]
    common = set.intersection(*(set(known.seeds) for _, known, _ in terms))
    for sign, known, measure in terms:
        for seed, value in zip(known.seeds, measure(known.heads), strict=True):
            if seed in common:
                totals[seed] = totals.get(seed, 0.0) + sign * float(value)
    return [totals[seed] for seed in sorted(totals)]


SECTIONS = {
    "compared": ("Alone, MHD, more public images, pooled examples", _compared),
    "weights": ("Weights of the two losses", _weights),
    "profiles": ("Profiles of heads", _profiles),
    "graphs": ("Graphs: how far knowledge travels", _graphs),
    "targets": ("Choice of targets, teachers, candidates, public images", _targets),
    "larger": ("One larger model among small ones", _larger),
}
