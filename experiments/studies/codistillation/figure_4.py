"""The codistillation paper's Figure 4: accuracy by number of unlabelled images."""

from collections.abc import Sequence

from experiments.studies import figures
from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation.ablations import recorded_runs
from experiments.studies.codistillation.cells import both_models
from experiments.studies.codistillation.paper_numbers import (
    FIGURE_4,
    IN_DOMAIN_IMAGES,
    MODELS,
    run_name,
)
from experiments.studies.codistillation.table_1 import unlike_fed_avg
from experiments.studies.figures import Point
from experiments.studies.pages import Notes, Plots, found
from experiments.studies.samples import sample
from experiments.studies.sections.markdown import image, table
from fedcodist.config.registry import CODISTILLATION, METHOD_NAMES

# The pictures of runs of full length, and of short ones.
PLOTS = {"##": "unlabelled_images.png", "###": "unlabelled_images_short.png"}
HEADING = "Figure 4: number of unlabelled images"


def figure_4(records: Sequence[Record], notes: Notes, plots: Plots, level: str) -> list[str]:
    """Accuracies by number of unlabelled images; nothing without finished runs of the figure."""
    if not any(record.experiment == FIGURE_4 and record.finished for record in records):
        return []
    runs = recorded_runs(records, FIGURE_4)
    few = {int(text) for run in runs if (text := run.split(",")[-1]).isdigit()}
    # Without unlabelled images the method is FedAvg, for both methods.
    rows = [["0 (FedAvg)", *[both_models(records, TABLE_1, "fed_avg,4700")] * len(CODISTILLATION)]]
    for count in sorted(few | {IN_DOMAIN_IMAGES}):
        cells = [both_models(records, *_run(method, count)) for method in CODISTILLATION]
        rows.append([f"{count:,}", *cells])
    return [
        f"{level} {HEADING}",
        notes["Figure 4"],
        table(["Unlabelled images", *(METHOD_NAMES[method] for method in CODISTILLATION)], rows),
        unlike_fed_avg(records, FIGURE_4, dict.fromkeys(runs, "fed_avg,4700")),
        *_picture(records, notes, plots, sorted(few | {IN_DOMAIN_IMAGES}), PLOTS[level]),
        found(notes, "Figure 4"),
    ]


def _picture(
    records: Sequence[Record], notes: Notes, plots: Plots, counts: Sequence[int], name: str
) -> list[str]:
    """A line for each method and number of rounds."""
    panels: dict[str, dict[tuple[str, int], list[Point]]] = {}
    for model in MODELS:
        lines: dict[tuple[str, int], list[Point]] = {}
        for method in CODISTILLATION:
            for count in counts:
                if shown := sample(records, *_run(method, count), model):
                    point = Point(count, shown.mean, shown.deviation)
                    lines.setdefault((method, shown.rounds), []).append(point)
        # A single point is not drawn as a curve.
        lines = {line: points for line, points in lines.items() if len(points) > 1}
        fed_avg = sample(records, TABLE_1, "fed_avg,4700", model)
        if fed_avg and any(rounds == fed_avg.rounds for _, rounds in lines):
            lines["fed_avg", fed_avg.rounds] = [Point(0, fed_avg.mean, fed_avg.deviation)]
        if lines:
            panels[f"{model} model"] = lines
    if not panels:
        return []
    plots[name] = lambda: figures.unlabelled_plot(panels)
    return [image(name, "Accuracy by number of unlabelled images"), notes["The plot of Figure 4"]]


def _run(method: str, count: int) -> tuple[str, str]:
    """(experiment, run) of a point; the runs with all images are Table 1's."""
    if count == IN_DOMAIN_IMAGES:
        return TABLE_1, run_name(method, 4700, "in_domain")
    return FIGURE_4, f"{method},{count}"
