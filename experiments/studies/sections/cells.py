"""Cells of accuracies."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.samples import Sample
from fedcodist.report.spread import plus_minus

NOT_RUN, OTHER_SETTINGS = "not run", "no runs with equal settings"


def accuracy(sample: Sample | None) -> str:
    """'33.86 ± 0.21 †'."""
    if sample is None:
        return NOT_RUN
    return plus_minus(sample.mean, sample.deviation) + (" †" if sample.is_short else "")


def absence(records: Sequence[Record], experiment: str, run: str) -> str:
    """Why there is no sample."""
    of_run = [r for r in records if (r.experiment, r.run) == (experiment, run)]
    return "unfinished" if any(not record.finished for record in of_run) else NOT_RUN
