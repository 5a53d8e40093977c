"""What stands beneath a table: short and missing runs, runs with other settings, notes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.studies.codistillation.paper_numbers import MODELS
from experiments.studies.pooling import baseline, groups, pooled, sample
from experiments.studies.records import TABLE_1, Record
from experiments.studies.sections.cells import accuracy
from experiments.studies.sections.commands import full_lengths, planned, sweep
from experiments.studies.sections.markdown import codes, listed, rounds_of, split_name, table
from experiments.studies.settings import differences


def remarks(
    records: Sequence[Record],
    experiment: str,
    runs: Iterable[str],
    models: Sequence[str] = MODELS,
) -> list[str]:
    """All that the reader of a table of these runs and models must know besides."""
    missing: list[str] = []
    others: list[Record] = []
    shown: dict[Path, Record] = {}
    for run in runs:
        samples = [one for model in models if (one := sample(records, experiment, run, model))]
        of_run = {record.path: record for one in samples for record in one.records}
        # FedAvg's small model is another run's for two of three pools.
        if not any(record.run == run for record in of_run.values()):
            missing.append(run)
        finished = [r for r in records if r.finished and (r.experiment, r.run) == (experiment, run)]
        if len(groups(finished)) > 1:
            others += finished
        shown |= of_run
    parts = full_lengths(shown.values())
    if missing:
        parts.append(f"Not run, or not to the end:\n\n{sweep(experiment, missing)}")
    if others:
        parts.append(f"Run with several settings:\n\n{table_of_settings(others)}")
    return [*parts, *own_notes(shown.values())]


def unlike_fed_avg(
    records: Sequence[Record], experiment: str, runs: Mapping[str, str]
) -> list[str]:
    """Which of the runs shown have other settings than the FedAvg run in their table, by run."""
    unlike = []
    for run, fed_avg in runs.items():
        for model in MODELS:
            shown = sample(records, experiment, run, model)
            above = sample(records, TABLE_1, fed_avg, model)
            if shown and above and baseline(records, shown.records[0], model) != above:
                unlike.append(run)
    return [f"With other settings than FedAvg's row: {codes(unlike)}."] if unlike else []


def recorded_runs(records: Sequence[Record], experiment: str) -> list[str]:
    """The runs of the experiment's config, then others that were recorded."""
    recorded = sorted({record.run for record in records if record.experiment == experiment})
    return list(dict.fromkeys([*planned(experiment), *recorded]))


def table_of_settings(records: Sequence[Record]) -> str:
    """A row per run and settings of finished runs."""
    finals = {(m, s) for record in records for m, splits in record.final.items() for s in splits}
    columns = sorted(
        finals, key=lambda each: (each[1] != "test", each[1], each[0] != "small", each)
    )
    rows = []
    for run in sorted({record.run for record in records}, key=_natural):
        of_run = groups(record for record in records if record.run == run and record.finished)
        for group, difference in zip(of_run, differences(of_run), strict=True):
            cells = [pooled(group, *column) for column in columns]
            seeds = sorted({seed for record in group for seed in record.seeds})
            rounds = rounds_of(group[0].rounds, group[0].full_rounds)
            shown = [accuracy(one) if one else "" for one in cells]
            rows.append([f"`{run}`", difference, *shown, listed(seeds), rounds])
    headings = [f"{model}, {split_name(split)}" for model, split in columns]
    if not rows:
        return "No finished runs yet."
    return table(["Run", "Settings", *headings, "Seeds' numbers", "Rounds"], rows, texts=2)


def own_notes(records: Iterable[Record]) -> list[str]:
    """What the records remark on their runs."""
    by_note: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            by_note.setdefault(note, []).append(record.run)
    lines = [f"- {note} ({codes(runs)})" for note, runs in by_note.items()]
    return ["\n".join(lines)] if lines else []


def _natural(run: str) -> list[tuple[int, float, str]]:
    """Sorts the numbers in runs' names as numbers."""
    parts = []
    for part in run.split(","):
        try:
            parts.append((0, float(part), ""))
        except ValueError:
            parts.append((1, 0.0, part))
    return parts
