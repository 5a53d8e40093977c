"""Accuracies of the heads of recorded runs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.studies.archive import Record
from fedcodist.report.tables_heads import Heads

SPLIT = "test"


class Known(NamedTuple):
    """Accuracies of a run's heads after the last round, by seed."""

    seeds: tuple[int, ...]
    heads: Heads


KnownRuns = Mapping[str, Known]  # by run


def known_of(record: Record | None) -> Known | None:
    """The accuracies in a record; None without a record, or if it has no accuracies."""
    heads = _heads(record) if record else None
    return Known(tuple(record.seeds), heads) if record and heads else None


def newest(records: Sequence[Record], experiment: str, run: str) -> Record | None:
    """The run's finished record with most rounds, then most seeds, then the newest; None if missing."""
    of_run = [r for r in records if (r.experiment, r.run) == (experiment, run) and r.finished]
    return max(of_run, key=lambda r: (r.rounds, len(r.seeds), r.date or ""), default=None)


def _heads(record: Record) -> Heads | None:
    """A record's heads; without heads, as in centralised training, the models' shared accuracies."""
    if record.heads is not None:
        return Heads(**{name: np.asarray(values) for name, values in record.heads.items()})
    accuracies = [s[SPLIT]["accuracy"] for s in record.final.values() if SPLIT in s]
    if not accuracies:
        return None
    shared = np.transpose(accuracies)[:, :, None]
    count = shared.shape[1]
    return Heads(shared, np.full((*shared.shape, count), np.nan), np.zeros((count, count), int))
