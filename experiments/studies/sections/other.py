"""Experiments that have no section of their own."""

from collections.abc import Sequence

from experiments.studies.records import Record
from experiments.studies.sections.commands import full_lengths
from experiments.studies.sections.footnotes import own_notes, table_of_settings


def other(records: Sequence[Record], experiment: str) -> list[str]:
    """A row per run and settings."""
    of_it = [record for record in records if record.experiment == experiment]
    if not of_it:
        return [f"## {experiment}"]
    finished = [record for record in of_it if record.finished]
    tables = [table_of_settings(of_it), *full_lengths(finished), *own_notes(of_it)]
    return [f"## {experiment}", *tables]
