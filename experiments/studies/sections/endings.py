"""The last sections of a page: runs too short to decide, runs with other settings, missing runs."""

from collections.abc import Iterable, Sequence

from experiments.studies.archive import Record
from experiments.studies.samples import groups, joined
from experiments.studies.sections.cells import accuracy
from experiments.studies.sections.commands import full_lengths, planned, sweep
from experiments.studies.sections.markdown import codes, listed, rounds_of, split_name, table
from experiments.studies.settings import differences

TOO_SHORT = "Runs too short to decide"
NOT_RUN = "Not run"
MOST_COLUMNS = 12  # of a table of settings


def is_short(record: Record) -> bool:
    """Whether a record has fewer rounds than its numbers need."""
    return record.rounds < record.full_rounds


def full_length(records: Iterable[Record]) -> list[Record]:
    """The records for main tables."""
    return [record for record in records if not is_short(record)]


def endings(
    records: Sequence[Record],
    experiments: Sequence[str],
    short: Sequence[str] = (),
    about_missing: str = "",
) -> list[str]:
    """The last sections of a page of these experiments, those that are not empty.

    A short run whose full length there is too is only in the list of all runs.

    Args:
      records: all records.
      experiments: of the page.
      short: the page's text on short runs; a plain table if there is none.
      about_missing: a text on missing runs.
    """
    of_page = [record for record in records if record.experiment in experiments]
    finished = [record for record in of_page if record.finished]
    in_full = {(record.experiment, record.run) for record in finished if not is_short(record)}
    too_short = [record for record in finished if is_short(record)]
    lacking = [r for r in too_short if (r.experiment, r.run) not in in_full]
    parts = []
    if lacking or (too_short and short):
        shown = short or [table_of_settings(lacking)]
        parts += [f"## {TOO_SHORT}", *shown, *full_lengths(lacking)]
    several = [
        record
        for alike in _by_run(full_length(finished))
        if len(groups(alike)) > 1
        for record in alike
    ]
    if several:
        parts += ["## Runs with several settings", table_of_settings(several)]
    if missing := missing_runs(records, experiments):
        commands = [sweep(experiment, runs) for experiment, runs in missing.items()]
        parts += [f"## {NOT_RUN}", about_missing, *commands]
    if remarks := own_notes(finished):
        parts += ["## What the runs note", remarks]
    return parts


def missing_runs(records: Iterable[Record], experiments: Iterable[str]) -> dict[str, list[str]]:
    """Experiment -> its config's runs that have no finished record; without those that lack none."""
    finished = {(record.experiment, record.run) for record in records if record.finished}
    missing = {e: [run for run in planned(e) if (e, run) not in finished] for e in experiments}
    return {experiment: runs for experiment, runs in missing.items() if runs}


def not_run(records: Sequence[Record], experiments: Sequence[str]) -> list[str]:
    """'`cifar100_alpha` (2 of 8)', the runs without a finished record of full length, for the index."""
    missing = missing_runs(full_length(records), experiments)
    return [
        f"`{experiment}` ({len(runs)} of {len(planned(experiment))})"
        for experiment, runs in missing.items()
    ]


def table_of_settings(records: Sequence[Record]) -> str:
    """A row per run and settings of finished runs. Of many columns it has those that all runs have."""
    finals = {(m, s) for record in records for m, splits in record.final.items() for s in splits}
    columns = sorted(
        finals, key=lambda each: (each[1] != "test", each[1], each[0] != "small", each)
    )
    if len(columns) > MOST_COLUMNS:  # of parties, for example; these cannot be read side by side
        finished = [record for record in records if record.finished]
        of_all = [c for c in columns if all(c[1] in r.final.get(c[0], {}) for r in finished)]
        columns = of_all or columns
    rows = []
    for of_run in sorted(_by_run(records), key=lambda of_run: _natural(of_run[0].run)):
        alike = groups(record for record in of_run if record.finished)
        for group, difference in zip(alike, differences(alike), strict=True):
            samples = [joined(group, *column) for column in columns]
            seeds = sorted({seed for record in group for seed in record.seeds})
            rounds = rounds_of(group[0].rounds, group[0].full_rounds)
            cells = [accuracy(sample) if sample else "" for sample in samples]
            rows.append([f"`{of_run[0].run}`", difference, *cells, listed(seeds), rounds])
    headings = [f"{model}, {split_name(split)}" for model, split in columns]
    if not rows:
        return "No finished runs yet."
    return table(["Run", "Settings", *headings, "Seeds' numbers", "Rounds"], rows, texts=2)


def own_notes(records: Iterable[Record]) -> str:
    """The records' notes on their runs."""
    by_note: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            by_note.setdefault(note, []).append(record.run)
    return "\n".join(f"- {note} ({codes(runs)})" for note, runs in by_note.items())


def _by_run(records: Iterable[Record]) -> list[list[Record]]:
    by_run: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_run.setdefault((record.experiment, record.run), []).append(record)
    return list(by_run.values())


def _natural(run: str) -> list[tuple[int, float, str]]:
    """A key that sorts numbers in runs' names as numbers."""
    parts = []
    for part in run.split(","):
        try:
            parts.append((0, float(part), ""))
        except ValueError:
            parts.append((1, 0.0, part))
    return parts
