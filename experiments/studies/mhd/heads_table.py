"""The accuracies of every head, a row for each run."""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.studies.mhd.known import KnownRuns
from experiments.studies.mhd.orderings import shared
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.markdown import listed, table
from fedcodist.report.tables_heads import Heads

# Table -> its rows' labels -> run.
ROWS: dict[str, dict[str, str]] = {}
with Path(__file__).with_name("rows.csv").open(encoding="utf-8", newline="") as file:
    for line in csv.DictReader(file):
        ROWS.setdefault(line["table"], {})[line["row"]] = line["run"]


def heads_table(known: KnownRuns, runs: Mapping[str, str]) -> str:
    """A table row for each label and its run: private / shared accuracy of every head."""
    most = max((len(known[run].heads.names) for run in runs.values() if run in known), default=1)
    rows = []
    for label, run in runs.items():
        if run not in known:
            rows.append([label, NOT_RUN, *[""] * (most + 1)])
            continue
        seeds, heads = known[run]
        cells = [
            f"{of_own:.1f} / {of_all:.1f}" if np.isfinite(of_own) else f"{of_all:.1f}"
            for of_own, of_all in zip(private_by_head(heads), shared_by_head(heads), strict=True)
        ]
        spread = shared(-1)(heads)
        deviation = f"{spread.std(ddof=1):.2f}" if len(seeds) > 1 else ""
        rows.append([label, *cells, *[""] * (most - len(cells)), deviation, listed(seeds)])
    headings = ["private / shared", "main", *(f"head {k}" for k in range(1, most))]
    return table([*headings, "± of the last, shared", "Seeds"], rows)


def private_by_head(heads: Heads) -> np.ndarray:
    """Each head's private accuracy in %, the mean over seeds and clients."""
    return 100 * heads.private.mean(axis=(0, 1))


def shared_by_head(heads: Heads) -> np.ndarray:
    """Each head's shared accuracy in %, the mean over seeds and clients."""
    return 100 * heads.shared.mean(axis=(0, 1))
