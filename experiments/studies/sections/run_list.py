"""Every record, whichever section it is in or not."""

import statistics
from collections.abc import Sequence

from experiments.studies.records import Record
from experiments.studies.sections.markdown import listed, rounds_of, split_name, table


def run_list(records: Sequence[Record]) -> list[str]:
    """A row per record, and what unfinished runs had reached."""
    headings = [
        "Experiment",
        "Run",
        "Seeds' numbers",
        "Rounds",
        "Test accuracy",
        "Device",
        "Minutes",
    ]
    headings += ["Date", "Commit", "Command"]
    rows = [_row(record) for record in records]
    runs = table(headings, rows, texts=len(headings)) if rows else "None yet."
    parts = ["## All runs", "Accuracies here are means over the record's seeds.", runs]
    if lines := [_last_accuracies(record) for record in records if not record.finished]:
        parts.append("\n".join(lines))
    return parts


def _row(record: Record) -> list[str]:
    rounds = rounds_of(record.rounds, record.full_rounds)
    if not record.finished:
        rounds = f"{record.last_round:,} of {record.rounds:,}, unfinished"
    return [
        record.experiment,
        f"`{record.run}`",
        listed(record.seeds),
        rounds,
        _test_accuracies(record),
        record.device or "",
        "" if record.seconds is None else f"{record.seconds / 60:.1f}",
        (record.date or "")[:10],
        (record.commit or "")[:7],
        f"`{_escaped(record.command)}`" if record.command else "",
    ]


def _test_accuracies(record: Record) -> str:
    means = {
        model: 100 * statistics.fmean(splits["test"]["accuracy"])
        for model, splits in sorted(record.final.items(), reverse=True)
        if "test" in splits
    }
    if record.heads is not None:
        return f"{len(means)} clients {statistics.fmean(means.values()):.2f}"
    return ", ".join(f"{model} {mean:.2f}" for model, mean in means.items())


def _last_accuracies(record: Record) -> str:
    """What an unfinished run had reached; such numbers enter no table."""
    values = ", ".join(
        f"{model} {split_name(split)} "
        + "/".join(f"{100 * accuracy:.2f}" for accuracy in metrics["accuracy"])
        for model, splits in sorted(record.final.items(), reverse=True)
        for split, metrics in splits.items()
    )
    return f"- unfinished `{record.run}` at round {record.last_round:,}: {values}"


def _escaped(text: str) -> str:
    """For a table's cell, on one line."""
    return " ".join(text.split()).replace("|", "\\|")
