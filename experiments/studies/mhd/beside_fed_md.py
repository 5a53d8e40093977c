"""Multi-Headed Distillation and FedMD on the same networks and data."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.studies.archive import Record
from experiments.studies.mhd.known import SPLIT, known_of, newest
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.markdown import table
from fedcodist.report.spread import mean_difference
from fedcodist.report.tables_parties import STOPPING

BESIDE_FED_MD = "cifar_mhd_fed_md"


class Against(NamedTuple):
    """Accuracies of models alone, after the rounds, and trained on all examples: %, [seeds, models]."""

    label: str
    seeds: Sequence[int]
    alone: np.ndarray
    after: np.ndarray
    bound: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return self.bound.mean(axis=1) - self.after.mean(axis=1)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation over the models, float [seeds]."""
        return self.after.std(axis=1, ddof=1)


def beside_fed_md(
    records: Sequence[Record],
) -> tuple[list[tuple[str, list[float]]], list[str]]:
    """(the paper's orderings with our differences by seed, the tables)."""
    theirs = newest(records, BESIDE_FED_MD, "fed_md")
    of_fed_md = _of_fed_md(theirs) if theirs and theirs.phases.get("centralised") else None
    of_heads = _of_heads(records)
    last = of_heads[-1] if of_heads else None
    lines = [
        ("MHD's bound less FedMD's", _less(last, of_fed_md, lambda a: a.bound.mean(axis=1))),
        (
            "FedMD's gap to its bound less that of MHD's last head",
            _less(of_fed_md, last, lambda a: a.gap),
        ),
        (
            "FedMD's spread of models less that of MHD's last head",
            _less(of_fed_md, last, lambda a: a.spread),
        ),
    ]
    rows = [
        [
            shown.label,
            *(f"{values.mean():.1f}" for values in (shown.alone, shown.after, shown.bound)),
            f"{shown.bound.mean() - shown.after.mean():.1f}",
            f"{shown.spread.mean():.1f}",
        ]
        for shown in (of_fed_md, *of_heads)
        if shown
    ]
    tables = (
        [table(["", "Before or alone", "After", "Bound", "Gap", "Spread"], rows)] if rows else []
    )
    if theirs:
        stopping = STOPPING[theirs.config.get("phases", {}).get("stopping")]
        tables.append(f"Before FedMD's rounds: {stopping[0].lower()}{stopping[1:]}")
    differences = [
        [text, mean_difference(values) if values else NOT_RUN, "above 0"] for text, values in lines
    ]
    return lines, [*tables, table(["Ordering", "Difference, points", "Paper"], differences)]


def _of_fed_md(record: Record) -> Against:
    before = [splits[SPLIT]["accuracy"][0] for splits in record.curve.values() if SPLIT in splits]
    after, bound = (
        [splits[SPLIT]["accuracy"] for splits in models.values() if SPLIT in splits]
        for models in (record.final, record.phases["centralised"])
    )
    values = (100 * np.transpose(accuracies) for accuracies in (before, after, bound))
    return Against("FedMD", record.seeds, *values)


def _of_heads(records: Sequence[Record]) -> list[Against]:
    """One entry for each of MHD's heads, the last one at the end; empty unless all three runs exist."""
    runs = ("mhd", "local_only_steps", "centralised")
    three = [known for run in runs if (known := known_of(newest(records, BESIDE_FED_MD, run)))]
    if len(three) < len(runs):
        return []
    seeds = sorted(set.intersection(*(set(known.seeds) for known in three)))
    ours, alone, bound = (
        100 * known.heads.shared[[known.seeds.index(seed) for seed in seeds]] for known in three
    )
    return [
        Against(f"MHD, {name}", seeds, alone[:, :, 0], ours[:, :, head], bound[:, :, 0])
        for head, name in enumerate(three[0].heads.names)
    ]


def _less(more: Against | None, less: Against | None, measure) -> list[float]:
    """Differences in the seeds that both have."""
    if more is None or less is None:
        return []
    ours, theirs = (dict(zip(of.seeds, measure(of).tolist(), strict=True)) for of in (more, less))
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
