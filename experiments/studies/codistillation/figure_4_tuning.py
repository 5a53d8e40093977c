"""Figure 4 from tuning runs: means of those that are best on held-out clients, as in the paper."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.archive import Record
from experiments.studies.codistillation.paper_numbers import MODELS
from experiments.studies.pages import Notes, found
from experiments.studies.samples import sample
from experiments.studies.sections.commands import planned
from experiments.studies.sections.markdown import table
from fedcodist.config.registry import BASELINE
from fedcodist.report.spread import mean_and_deviation

FIGURE_4_TUNING = "cifar100_figure4_tuning"
HEADING = "Figure 4 from tuning runs"
TAKEN = 3  # runs of each number of images; the paper takes 25


class TuningRun(NamedTuple):
    """Accuracies in %: the mean of both models on held-out clients, and each model's on test images."""

    held_out: float
    test: tuple[float, ...]


def figure_4_tuning(records: Sequence[Record], notes: Notes, level: str) -> list[str]:
    """A row for FedAvg and one for each number of images; nothing before every run is there."""
    by_images: dict[str, list[TuningRun]] = {}
    for run in planned(FIGURE_4_TUNING):
        shown = _tuning_run(records, run)
        if shown is None:
            return []
        by_images.setdefault(run.split(",")[0], []).append(shown)
    rows = [_row(images, runs) for images, runs in by_images.items()]
    headings = ["Unlabelled images", "Runs taken", "Held-out, mean of both"]
    headings += [f"{model}, test" for model in MODELS]
    return [
        f"{level} {HEADING}",
        notes[HEADING],
        table(headings, rows),
        found(notes, HEADING),
    ]


def _row(images: str, runs: Sequence[TuningRun]) -> list[str]:
    best = sorted(runs, key=lambda run: run.held_out, reverse=True)[:TAKEN]
    name = "0 (FedAvg)" if images == BASELINE else f"{int(images):,}"
    columns = [[run.held_out for run in best], *zip(*(run.test for run in best), strict=True)]
    return [name, f"{len(best)} of {len(runs)}", *map(mean_and_deviation, columns)]


def _tuning_run(records: Sequence[Record], run: str) -> TuningRun | None:
    """None if the run is missing."""
    held_out, test = (
        tuple(
            shown.mean
            for model in MODELS
            if (shown := sample(records, FIGURE_4_TUNING, run, model, split))
        )
        for split in ("held_out", "test")
    )
    if len(held_out) < len(MODELS) or len(test) < len(MODELS):
        return None
    return TuningRun(statistics.fmean(held_out), test)
