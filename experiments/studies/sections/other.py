"""Experiments that have no page of their own."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.pages import Page
from experiments.studies.sections.endings import endings, full_length, table_of_settings


def other(records: Sequence[Record], experiments: Sequence[str]) -> Page:
    """A row per run and settings of each."""
    parts = ["# Other experiments"]
    for name in experiments:
        of_it = [record for record in full_length(records) if record.experiment == name]
        parts += [f"## {name}", table_of_settings(of_it)]
    parts += endings(records, experiments)
    return Page("other", "Other experiments", experiments, parts, {})
