"""The codistillation paper's Figure 4: accuracy by number of unlabelled images."""

from collections.abc import Sequence

from experiments.studies import figures
from experiments.studies.codistillation.paper_numbers import IN_DOMAIN_IMAGES, MODELS, run_name
from experiments.studies.figures import Point
from experiments.studies.pooling import sample
from experiments.studies.records import FIGURE_4, TABLE_1, Record
from experiments.studies.sections.cells import both_models
from experiments.studies.sections.footnotes import recorded_runs, remarks, unlike_fed_avg
from experiments.studies.sections.markdown import Plots, image, table
from fedcodist.config.registry import CODISTILLATION, METHOD_NAMES


def figure_4(records: Sequence[Record], plots: Plots) -> list[str]:
    """Accuracies by number of unlabelled images."""
    runs = recorded_runs(records, FIGURE_4)
    few = {int(text) for run in runs if (text := run.split(",")[-1]).isdigit()}
    counts = sorted(few | {IN_DOMAIN_IMAGES})
    # Without any there is FedAvg, which is the same for both methods.
    rows = [["0 (FedAvg)", *[both_models(records, TABLE_1, "fed_avg,4700")] * len(CODISTILLATION)]]
    panels: dict[str, dict[str, list[Point]]] = {}
    any_short = False
    for count in counts:
        row = [f"{count:,}"]
        for method in CODISTILLATION:
            term = (FIGURE_4, f"{method},{count}")
            if count == IN_DOMAIN_IMAGES:
                term = (TABLE_1, run_name(method, 4700, "in_domain"))
            row.append(both_models(records, *term))
            for model in MODELS:
                if one := sample(records, *term, model):
                    any_short = any_short or one.is_short
                    lines = panels.setdefault(f"{model} model", {})
                    point = Point(count, one.mean, one.deviation)
                    lines.setdefault(method, []).append(point)
        rows.append(row)
    parts = [
        "## Figure 4: number of unlabelled images",
        f"In-domain images, 4,700 examples in the large model's pool; all {IN_DOMAIN_IMAGES:,} are "
        "Table 1's. The paper's figure has no numbers; it plots the mean test accuracy of its 25 tuning "
        "runs that are best on held-out clients. Ours, in %, small / large.",
        table(["Unlabelled images", *(METHOD_NAMES[method] for method in CODISTILLATION)], rows),
        *unlike_fed_avg(records, FIGURE_4, dict.fromkeys(runs, "fed_avg,4700")),
        *remarks(records, FIGURE_4, runs),
    ]
    # One point is no curve.
    if any(len(points) > 1 for lines in panels.values() for points in lines.values()):
        baselines = {
            f"{model} model": one.mean
            for model in MODELS
            if (one := sample(records, TABLE_1, "fed_avg,4700", model))
        }
        plots["unlabelled_images.png"] = lambda: figures.unlabelled_plot(panels, baselines)
        parts += [
            image("unlabelled_images.png", "Accuracy by number of unlabelled images"),
            "Bars: ± one standard deviation, where there are several seeds. Dashed: FedAvg."
            + (" What is marked † in the table is of fewer rounds here too." if any_short else ""),
        ]
    return parts
