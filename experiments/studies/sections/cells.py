"""Cells of accuracies."""

import statistics
from collections.abc import Sequence

from experiments.studies.codistillation.paper_numbers import MODELS
from experiments.studies.pooling import Sample, sample
from experiments.studies.records import Record
from experiments.studies.sections.markdown import rounds_of
from fedcodist.report.intervals import student_half_width

SPLITS = ("test", "held_out")


def both_models(records: Sequence[Record], experiment: str, run: str) -> str:
    """'33.86 ± 0.21 / 33.15 ± 0.30 (3 seeds)', or why there is nothing."""
    samples = [sample(records, experiment, run, model) for model in MODELS]
    texts = [accuracy(one) if one else _absence(records, experiment, run) for one in samples]
    if not any(samples):
        return texts[0]
    counts = [str(len(one.seeds)) for one in samples if one]
    distinct = "/".join(counts if len(set(counts)) > 1 else counts[:1])
    return f"{' / '.join(texts)} ({distinct} seed{'' if distinct == '1' else 's'})"


def per_split(records: Sequence[Record], experiment: str, run: str) -> list[str]:
    """Each model's accuracy on each of SPLITS, seeds and rounds."""
    found = [sample(records, experiment, run, model, split) for model in MODELS for split in SPLITS]
    there = [one for one in found if one]
    if not there:
        return [_absence(records, experiment, run), *[""] * (len(found) + 1)]
    texts = [accuracy(one) if one else "" for one in found]
    last = there[-1]
    return [*texts, str(len(last.seeds)), rounds_of(last.rounds, last.full_rounds)]


def accuracy(one: Sample) -> str:
    """'33.86 ± 0.21 †'."""
    spread = "" if one.deviation is None else f" ± {one.deviation:.2f}"
    return f"{one.mean:.2f}{spread}{' †' if one.is_short else ''}"


def mean_difference(values: Sequence[float]) -> str:
    """'+0.52 ± 0.31' of differences within seeds, by Student's t; without an interval for one seed."""
    half_width = student_half_width(values)
    spread = "" if half_width is None else f" ± {half_width:.2f}"
    return f"{statistics.fmean(values):+.2f}{spread}"


def _absence(records: Sequence[Record], experiment: str, run: str) -> str:
    of_run = [r for r in records if (r.experiment, r.run) == (experiment, run)]
    return "unfinished" if any(not record.finished for record in of_run) else "not run"
