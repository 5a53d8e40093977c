"""A ranking as a table for a terminal, Markdown, JSON and a page, with notes on its numbers."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedcodist.core.metric_kinds import is_share, lower_is_better
from fedcodist.report.accuracy_table import shown_epsilon
from fedcodist.report.entries import Entry
from fedcodist.report.ranking import (
    Difference,
    difference,
    is_defined,
    other_data_of_seeds,
    without_shared,
)
from fedcodist.report.spread import mean_and_deviation, plus_minus

UNDEFINED = "-"
TEXT_COLUMNS = 2  # method and model; the others are numbers
# Files beside the report.
MARKDOWN, JSON = "ranking.md", "ranking.json"


class RankingTable(NamedTuple):
    """The ranking as text.

    Attributes:
      title: what is ranked.
      headings, rows: the first columns are text, the others numbers.
      notes: explanations of the numbers, a sentence each.
      values: the numbers themselves, for JSON.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]
    values: dict[str, Any]


def ranking_table(
    shown: Sequence[Entry], baseline: str, entries: Sequence[Entry], metric: str = "accuracy"
) -> RankingTable:
    """The table of what `ranked` returns.

    Args:
      shown: the entries in their order, as `ranked` returns them.
      baseline: the run to compare with.
      entries: all that were read.
      metric: that is ranked.
    """
    # If the baseline has personal models, others are compared with these, unless its shared model is
    # shown.
    compared = [entry for entry in entries if entry in shown or entry in without_shared(entries)]
    stood_for = {(entry.run, entry.model): entry.values for entry in entries}
    has_shared = any(entry.shared for entry in shown)
    splits, counts = ({*map(get, shown)} for get in (lambda e: e.split, lambda e: len(e.seeds)))
    several_counts, several_splits = len(counts) > 1, len(splits) > 1
    measured = " ".join(
        [*(split.replace("_", "-") for split in splits if len(splits) == 1), metric]
    )
    title = f"{measured}{' in %' if is_share(metric) else ''}"
    if not several_counts:
        seeds = next(iter(counts), 0)
        title += f", {seeds} seed{'' if seeds == 1 else 's'}"
    title += ", the least is first" if lower_is_better(metric) else ""
    costs = ["client examples", "MB", "clients' FLOPs", "server's FLOPs", "seconds", "s/round"]
    headings = ["method", "model", metric, *(["shared model"] if has_shared else [])]
    is_private = any(entry.epsilon is not None for entry in shown)
    headings += [*(["split"] if several_splits else []), f"to {baseline}"]
    headings += ["seeds"] if several_counts else []
    headings += [*(["epsilon"] if is_private else []), *costs]
    rows, values = [], []
    fewer: dict[str, str] = {}  # notes by run
    for entry in shown:
        estimate = difference(entry, compared, baseline)
        if estimate and estimate.seeds < len(entry.seeds):
            count = f"{estimate.seeds} of the {len(entry.seeds)} seeds of {entry.run}"
            fewer[entry.run] = f"to {baseline}: only {count} are {baseline}'s too"
        shared = stood_for.get((entry.run, entry.shared)) if entry.shared else None
        rows.append(
            [
                entry.run,
                entry.model if entry.head is None else f"{entry.model}, head {entry.head}",
                _spread(entry.values, metric),
                *([_spread(shared, metric) if shared else ""] if has_shared else []),
                *([entry.split.replace("_", " ")] if several_splits else []),
                _to_baseline(entry, estimate, baseline, metric),
                *([str(len(entry.seeds))] if several_counts else []),
                *([shown_epsilon(entry.epsilon)] if is_private else []),
                UNDEFINED if math.isnan(entry.examples) else f"{entry.examples:,.0f}",
                _megabytes(entry.megabytes),
                _scaled(entry.client_flops),
                _scaled(entry.server_flops),
                f"{entry.seconds:,.0f}",
                _short(entry.seconds_per_round),
            ]
        )
        values.append(_values(entry, estimate, shared))
    notes = [*_about_spreads(shown, baseline, metric), *_without_pairs(shown, baseline, compared)]
    notes += [*fewer.values(), budget(shown), *_ABOUT_COSTS]
    notes += [_ABOUT_EPSILON] if is_private else []
    notes += _too_good(shown)
    about = {"metric": metric, "in_percent": is_share(metric), "baseline": baseline}
    return RankingTable(title, headings, rows, notes, {**about, "rows": values, "notes": notes})


def for_terminal(table: RankingTable) -> Group:
    """The table with its notes below."""
    drawn = Table(title=Text(table.title))
    for heading in table.headings[:TEXT_COLUMNS]:
        drawn.add_column(Text(heading), overflow="fold")  # names that are cut may be the same
    for heading in table.headings[TEXT_COLUMNS:]:
        drawn.add_column(Text(heading), justify="right")
    for row in table.rows:
        # As Text, since rich would read brackets in a run's name as markup.
        drawn.add_row(*map(Text, row))
    return Group(drawn, *(Text(note) for note in table.notes))


def write_ranking(table: RankingTable, folder: Path) -> tuple[Path, Path]:
    """Writes ranking.md and ranking.json, whose undefined numbers are null; returns their paths.

    Raises:
      OSError: `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    markdown, numbers = folder / MARKDOWN, folder / JSON
    markdown.write_text(as_markdown(table), encoding="utf-8")
    content = json.dumps(_finite(table.values), indent=2, allow_nan=False)
    numbers.write_text(content + "\n", encoding="utf-8")
    return markdown, numbers


def as_markdown(table: RankingTable) -> str:
    """The table and its notes as Markdown."""
    rule = ["---"] * TEXT_COLUMNS + ["--:"] * (len(table.headings) - TEXT_COLUMNS)
    cells = lambda row: " | ".join(cell.replace("|", "\\|") for cell in row)
    lines = [f"| {cells(row)} |" for row in (table.headings, rule, *table.rows)]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, "", *notes]) + "\n"


def budget(shown: Sequence[Entry]) -> str:
    """A sentence on whether the clients of all runs did the same work, as far as runs count it."""
    counted = [entry for entry in shown if not math.isnan(entry.examples)]
    if not counted:
        return "no run has counted its client examples"
    # A personal model is ranked against others' shared ones.
    runs_of: dict[str, set[str]] = {}
    for entry in counted:
        runs_of.setdefault(entry.shared or entry.model, set()).add(entry.run)
    runs = {entry.run for entry in counted}
    alone = runs.difference(*(among for among in runs_of.values() if len(among) > 1))
    # Models of other names are no pairs. Then whole runs are compared.
    of_whole_runs = len(runs) > 1 and bool(alone)
    compared: dict[str, list[float]] = {}
    for entry in counted:
        if of_whole_runs:
            compared.setdefault("", []).append(entry.run_examples)
        else:
            counts = compared.setdefault(entry.shared or entry.model, [])
            counts.append(entry.examples / entry.num_models)
    # Metrics have seven digits.
    equal = all(
        math.isclose(min(counts), max(counts), rel_tol=1e-5) for counts in compared.values()
    )
    if equal:
        which = (
            "all runs" if all(map(math.isfinite, [e.examples for e in shown])) else "counted runs"
        )
        return f"{which} have the same budget of client examples"
    return "UNEQUAL BUDGETS: the runs' clients trained on different numbers of examples"


def _without_pairs(shown: Sequence[Entry], baseline: str, entries: Sequence[Entry]) -> list[str]:
    """Notes on runs that have no difference to the baseline, since their seeds are no pairs with its."""
    theirs = [entry for entry in entries if entry.run == baseline]
    notes = []
    if len({entry.split for entry in [*shown, *theirs]}) > 1:
        notes.append(
            "split: between runs that were measured on different ones there is no difference"
        )
    for run, entry in {entry.run: entry for entry in shown}.items() if theirs else ():
        if set(entry.seeds).isdisjoint(theirs[0].seeds):
            notes.append(f"to {baseline}: no seed of {run} is {baseline}'s too")
        elif other := other_data_of_seeds(entry, theirs[0]):
            notes.append(
                f"other data than {baseline}: {run} has {other}, so there is no difference"
            )
    return notes


_ABOUT_COSTS = (
    "client examples, MB and FLOPs: of one seed; FLOPs are of matrix products and convolutions, counted "
    "from the networks",
    "seconds: of all seeds and the whole run; s/round: of all seeds, without compilation and evaluation",
)


_ABOUT_EPSILON = (
    "epsilon: of one seed, and of the client who pays most, over all pools in which it can be drawn; "
    "delta and neighbours are in each run's summary.json"
)


def _about_spreads(shown: Sequence[Entry], baseline: str, metric: str) -> list[str]:
    if all(len(entry.seeds) == 1 for entry in shown):
        return [f"one seed: {metric} and the difference to {baseline} have no ± and no interval"]
    return [
        f"{metric}: mean over the seeds ± their sample standard deviation",
        f"to {baseline}: mean difference to {baseline} with the same seed ± half of its 95 % interval, "
        "Student's t over the seeds' differences",
    ]


def _too_good(shown: Sequence[Entry]) -> list[str]:
    """A warning that names the runs whose phases were stopped on test data."""
    runs = dict.fromkeys(entry.run for entry in shown if entry.stopped_on_test_data)
    if not runs:
        return []
    names = ", ".join(runs)
    return [f"phases before rounds stopped on TEST DATA, accuracies are too good: {names}"]


def _spread(values: Sequence[float], metric: str) -> str:
    return mean_and_deviation(values, is_share(metric)) if is_defined(values) else UNDEFINED


def _to_baseline(entry: Entry, estimate: Difference | None, baseline: str, metric: str) -> str:
    """The difference as text; empty for the baseline itself."""
    if estimate is None:
        return "" if entry.run == baseline else UNDEFINED
    mean, half_width = estimate.mean, estimate.half_width
    return plus_minus(mean, half_width, is_difference=True, is_share=is_share(metric))


def _scaled(flops: float) -> str:
    """'1.23 T'."""
    if not math.isfinite(flops):
        return UNDEFINED
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.2f} {unit}"
    return f"{flops:,.0f}"


def _megabytes(size: float) -> str:
    """One decimal, '1,234.5', or two digits of a small size, '0.013'."""
    return f"{size:,.1f}" if size >= 1 or not size else f"{size:.2g}"


def _short(seconds: float) -> str:
    """Two digits, '0.012', or whole seconds."""
    if not math.isfinite(seconds):
        return UNDEFINED
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _values(
    entry: Entry, estimate: Difference | None, shared: Sequence[float] | None
) -> dict[str, Any]:
    """A row's numbers for JSON."""
    return {
        "run": entry.run,
        "model": entry.model,
        "head": entry.head,
        "split": entry.split,
        "seeds": list(entry.seeds),
        "values": list(entry.values),
        "mean": statistics.fmean(entry.values),
        "standard_deviation": _deviation(entry.values),
        "shared_model_values": shared and list(shared),
        "difference": estimate and estimate.mean,
        "difference_half_width_95": estimate and estimate.half_width,
        "difference_seeds": estimate and estimate.seeds,
        "client_examples": entry.examples,
        "megabytes": entry.megabytes,
        "client_flops": entry.client_flops,
        "server_flops": entry.server_flops,
        "seconds": entry.seconds,
        "seconds_per_round": entry.seconds_per_round,
        **({} if entry.epsilon is None else {"epsilon": entry.epsilon}),
    }


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 and is_defined(values) else None


def _finite(value: Any) -> Any:
    """The value with ten digits, and None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value
