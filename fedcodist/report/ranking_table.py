"""A ranking as a table for a terminal, Markdown, JSON and a page, with notes on its numbers."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedcodist.core.metric_kinds import is_share, lower_is_better
from fedcodist.report.cells import shown_epsilon
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
    values_of = {(entry.run, entry.model): entry.values for entry in entries}
    rows = [
        _Row(
            entry,
            difference(entry, compared, baseline),
            values_of.get((entry.run, entry.shared)) if entry.shared else None,
        )
        for entry in shown
    ]
    columns = _columns(shown, baseline, metric)
    cells = [[cell(row) for _, cell in columns] for row in rows]
    notes = [
        *_about_spreads(shown, baseline, metric),
        *_without_pairs(shown, baseline, compared),
        *_with_fewer_seeds(rows, baseline),
        budget(shown),
        *_ABOUT_COSTS,
        *([_ABOUT_EPSILON] if _is_private(shown) else []),
        *_too_good(shown),
    ]
    values = {
        "metric": metric,
        "in_percent": is_share(metric),
        "baseline": baseline,
        "rows": [_values(row) for row in rows],
        "notes": notes,
    }
    return RankingTable(
        _title(shown, metric), [heading for heading, _ in columns], cells, notes, values
    )


class _Row(NamedTuple):
    """An entry with its difference to the baseline, and the values of the model that clients share."""

    entry: Entry
    estimate: Difference | None
    shared: tuple[float, ...] | None


def _title(shown: Sequence[Entry], metric: str) -> str:
    """The metric, and the split and the number of seeds if they are the same for all."""
    splits, counts = {entry.split for entry in shown}, {len(entry.seeds) for entry in shown}
    title = " ".join([*(split.replace("_", "-") for split in splits if len(splits) == 1), metric])
    title += " in %" if is_share(metric) else ""
    if len(counts) <= 1:
        seeds = next(iter(counts), 0)
        title += f", {seeds} seed{'' if seeds == 1 else 's'}"
    return title + (", the least is first" if lower_is_better(metric) else "")


def _columns(
    shown: Sequence[Entry], baseline: str, metric: str
) -> list[tuple[str, Callable[[_Row], str]]]:
    """Headings, and each column's cell of a row; columns that would say nothing are left out."""
    has_shared = any(entry.shared for entry in shown)
    several_splits = len({entry.split for entry in shown}) > 1
    several_counts = len({len(entry.seeds) for entry in shown}) > 1
    columns: list[tuple[str, Callable[[_Row], str], bool]] = [
        ("method", lambda row: row.entry.run, True),
        ("model", lambda row: _model(row.entry), True),
        (metric, lambda row: _spread(row.entry.values, metric), True),
        ("shared model", lambda row: _spread(row.shared, metric) if row.shared else "", has_shared),
        ("split", lambda row: row.entry.split.replace("_", " "), several_splits),
        (f"to {baseline}", lambda row: _to_baseline(row, baseline, metric), True),
        ("seeds", lambda row: str(len(row.entry.seeds)), several_counts),
        ("epsilon", lambda row: shown_epsilon(row.entry.epsilon), _is_private(shown)),
        ("client examples", lambda row: _count(row.entry.examples), True),
        ("MB", lambda row: _megabytes(row.entry.megabytes), True),
        ("clients' FLOPs", lambda row: _scaled(row.entry.client_flops), True),
        ("server's FLOPs", lambda row: _scaled(row.entry.server_flops), True),
        ("seconds", lambda row: f"{row.entry.seconds:,.0f}", True),
        ("s/round", lambda row: _short(row.entry.seconds_per_round), True),
    ]
    return [(heading, cell) for heading, cell, is_shown in columns if is_shown]


def _is_private(shown: Sequence[Entry]) -> bool:
    return any(entry.epsilon is not None for entry in shown)


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


def _with_fewer_seeds(rows: Sequence[_Row], baseline: str) -> list[str]:
    """Notes on runs with seeds that the baseline lacks, a note for each run."""
    notes: dict[str, str] = {}
    for entry, estimate, _ in rows:
        if estimate and estimate.seeds < len(entry.seeds):
            count = f"{estimate.seeds} of the {len(entry.seeds)} seeds of {entry.run}"
            notes[entry.run] = f"to {baseline}: only {count} are {baseline}'s too"
    return list(notes.values())


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


def _model(entry: Entry) -> str:
    return entry.model if entry.head is None else f"{entry.model}, head {entry.head}"


def _spread(values: Sequence[float], metric: str) -> str:
    return mean_and_deviation(values, is_share(metric)) if is_defined(values) else UNDEFINED


def _to_baseline(row: _Row, baseline: str, metric: str) -> str:
    """The difference as text; empty for the baseline itself."""
    if row.estimate is None:
        return "" if row.entry.run == baseline else UNDEFINED
    mean, half_width = row.estimate.mean, row.estimate.half_width
    return plus_minus(mean, half_width, is_difference=True, is_share=is_share(metric))


def _count(examples: float) -> str:
    return UNDEFINED if math.isnan(examples) else f"{examples:,.0f}"


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


def _values(row: _Row) -> dict[str, Any]:
    """A row's numbers for JSON."""
    entry, estimate, shared = row
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
