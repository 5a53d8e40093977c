"""The table of a report: a line per method and model, a metric on every split, bytes and rounds.

The metric is the accuracy wherever runs have one: see `collect`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from fedcodist.core.metric_kinds import is_share
from fedcodist.report.cells import (
    human_bytes,
    metric_name,
    number,
    percent,
    shown_epsilon,
    split_name,
)
from fedcodist.report.collection import (
    Collection,
    Curve,
    Method,
    Statistic,
    curve,
    final,
    last_round,
)
from fedcodist.report.runs import epsilon_of, largest_epsilon, mapping_of, number_of


class Row(NamedTuple):
    """One line of the table, for a method and a model."""

    method: str
    model: str
    accuracy: dict[str, Statistic | None]
    bytes_up: int | None
    bytes_down: int | None
    rounds: str
    epsilon: float | None = None  # infinite without noise; None where no method is private


def table(collection: Collection, title: str = "") -> Table:
    """The table, method x model, for a terminal."""
    rows = result_rows(collection)
    several = any(statistic.seeds > 1 for statistic in statistics_of(rows))
    result = Table(
        title=Text(title) if title else None, caption=Text(caption_of(rows)), box=box.SIMPLE_HEAD
    )
    for heading in ("Method", "Model"):
        result.add_column(heading, overflow="fold")  # names that are cut may be the same
    for heading in number_headings(collection, several):
        result.add_column(Text(heading), justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.method) and len(collection.models) > 1:
            result.add_section()
        shown = "" if row.method == previous else row.method
        cells = [shown, row.model, *number_cells(row, collection, several)]
        result.add_row(*(Text(cell) for cell in cells))
        previous = row.method
    return result


def result_rows(collection: Collection) -> list[Row]:
    """The table's rows: final accuracy on each split, bytes per participation, rounds."""
    return [
        _row(method, model, collection)
        for method in collection.methods
        for model in collection.models
        if any(series.model == model for run in method.runs for series in run.records)
    ]


def _row(method: Method, model: str, collection: Collection) -> Row:
    metric = collection.metric
    curves = {split: curve(method, model, split, metric) for split in collection.splits}
    last = _last_common_round([points for points in curves.values() if points.rounds])
    accuracy = {
        split: points.statistics[points.rounds.index(last)] if last in points.rounds else None
        for split, points in curves.items()
    }
    ends = sorted({end for run in method.runs if (end := last_round(run)) is not None})
    # Callbacks may have stopped the seeds in different rounds.
    ended_apart = method.finished and len(ends) > 1
    if ended_apart:
        accuracy = {split: final(method, model, split, metric) for split in curves}
    total = method.runs[0].config.get("rounds")
    if last is None:  # the model lacks the metric
        evaluated = [records for run in method.runs for records in run.records.values()]
        last = max(round for records in evaluated for round in records)
    reached = str(last)
    if ended_apart:
        reached = f"{ends[0]} to {ends[-1]}"
    rounds = reached if method.finished else f"{reached} of {total or '?'}, unfinished"
    up, down = (_bytes(method, model, way) for way in ("up", "down"))
    epsilons = (epsilon_of(run.summary) for run in method.runs)  # an unfinished run has no summary
    epsilon = largest_epsilon(epsilons)
    return Row(method.label, model, accuracy, up, down, rounds, epsilon)


def _bytes(method: Method, model: str, way: str) -> int | None:
    """Bytes of a participation, the mean over the seeds: links may be measured, and runs then differ."""
    counts = []
    for run, _ in method.members:
        sizes = mapping_of(mapping_of(run.summary, "models"), model)
        if (count := number_of(sizes, f"bytes_{way}_per_participation")) is not None:
            counts.append(count)
    return round(sum(counts) / len(counts)) if counts else None


def _last_common_round(curves: Sequence[Curve]) -> int | None:
    """The last round that was evaluated on every split; a killed run may miss some splits."""
    if not curves:
        return None
    common = set.intersection(*(set(points.rounds) for points in curves))
    return max(common) if common else max(round for points in curves for round in points.rounds)


def statistics_of(rows: Iterable[Row]) -> list[Statistic]:
    """All values of the metric in the rows."""
    return [
        statistic for row in rows for statistic in row.accuracy.values() if statistic is not None
    ]


def number_headings(collection: Collection, several: bool) -> list[str]:
    """Headings of the columns of numbers."""
    heading = metric_name(collection.metric) + (", %" if is_share(collection.metric) else "")
    accuracies = [f"{heading}\n{split_name(split)}" for split in collection.splits]
    seeds = ["Seeds"] if several else []
    epsilons = ["Epsilon"] if _is_private(collection) else []
    return [*accuracies, *epsilons, "Bytes up*", "Bytes down*", "Rounds", *seeds]


def _is_private(collection: Collection) -> bool:
    return any(
        epsilon_of(run.summary) is not None for method in collection.methods for run in method.runs
    )


def number_cells(row: Row, collection: Collection, several: bool) -> list[str]:
    """A row's cells, in the order of `number_headings`."""
    shown = percent if is_share(collection.metric) else number
    accuracies = [shown(row.accuracy[split]) for split in collection.splits]
    counts = sorted(
        {statistic.seeds for statistic in row.accuracy.values() if statistic is not None}
    )
    seeds = ["/".join(map(str, counts)) or "–"] if several else []
    sizes = [human_bytes(row.bytes_up), human_bytes(row.bytes_down)]
    epsilons = [shown_epsilon(row.epsilon)] if _is_private(collection) else []
    return [*accuracies, *epsilons, *sizes, row.rounds, *seeds]


def caption_of(rows: Sequence[Row]) -> str:
    """The text below the table."""
    several = any(statistic.seeds > 1 for statistic in statistics_of(rows))
    spread = "; ± standard deviation over the seeds" if several else ""
    return f"* per participation of one client{spread}"
