"""results/runs.csv: a list of all records of all pages."""

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.studies.archive import Record
from experiments.studies.samples import groups
from experiments.studies.settings import differences

COLUMNS = (
    *("experiment", "run", "settings that differ", "rounds", "full rounds", "finished", "seeds"),
    *("test accuracy in %, mean over seeds", "held-out accuracy in %, mean over seeds"),
    *("device", "minutes", "date", "commit", "command"),
)


def run_list(records: Sequence[Record]) -> str:
    """A line per record; `settings that differ` distinguishes runs of one name."""
    differing: dict[Path, str] = {}
    for name in dict.fromkeys((record.experiment, record.run) for record in records):
        alike = groups(record for record in records if (record.experiment, record.run) == name)
        for group, difference in zip(alike, differences(alike), strict=True):
            differing |= {record.path: difference for record in group}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        writer.writerow(
            [
                record.experiment,
                record.run,
                differing[record.path],
                record.last_round,
                record.full_rounds,
                "yes" if record.finished else "no",
                " ".join(map(str, record.seeds)),
                _accuracies(record, "test"),
                _accuracies(record, "held_out"),
                record.device or "",
                "" if record.seconds is None else f"{record.seconds / 60:.1f}",
                (record.date or "")[:10],
                _short(record.commit or ""),
                " ".join((record.command or "").split()),
            ]
        )
    return text.getvalue()


def _short(commit: str) -> str:
    """Its first letters, and what says that the files were not those of the commit."""
    name, dash, changed = commit.partition("-")
    return f"{name[:7]}{dash}{changed}"


def _accuracies(record: Record, split: str) -> str:
    """The accuracy of each model; for clients with heads, of which there are many, the mean."""
    means = {
        model: 100 * statistics.fmean(splits[split]["accuracy"])
        for model, splits in sorted(record.final.items(), reverse=True)
        if split in splits
    }
    if record.heads is not None and means:
        return f"{len(means)} clients {statistics.fmean(means.values()):.2f}"
    return ", ".join(f"{model} {mean:.2f}" for model, mean in means.items())
