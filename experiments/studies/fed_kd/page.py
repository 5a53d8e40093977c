"""FedKD: quality against bytes, each loss left out, energy thresholds, ranks; the paper's costs."""

from collections.abc import Sequence

from experiments.studies import figures
from experiments.studies.archive import Record
from experiments.studies.fed_kd.comparisons import have_equal_settings, megabytes, sample_of
from experiments.studies.fed_kd.panels import ADE, CENTRAL, CIFAR, FED_KD, LOCAL, METHODS, PANELS
from experiments.studies.fed_kd.paper_costs import paper_costs
from experiments.studies.fed_kd.ranks import ranks_tables
from experiments.studies.fed_kd.tables import (
    methods_table,
    metrics_table,
    parts_table,
    students_table,
    thresholds_table,
)
from experiments.studies.fed_kd.verdicts import verdicts_of
from experiments.studies.figures import Cost
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import image

EXPERIMENTS = (CIFAR, ADE, "mind_fed_kd")


def fed_kd(records: Sequence[Record], notes: Notes) -> Page:
    """All of FedKD's, and the costs that follow from shapes."""
    plots: Plots = {}
    full = full_length(records)
    verdicts = verdicts_of(full)
    parts = [*first_screen("FedKD", notes, verdicts), *_picture(full, notes, plots)]
    for panel in PANELS:
        if not any(sample_of(full, panel, method) for method in METHODS):
            continue
        parts += [
            f"## {panel.title}",
            methods_table(full, panel),
            *metrics_table(full, panel, notes),
        ]
        if panel.around == "{}":
            parts += students_table(full, panel)
            for metric in panel.others[:1]:
                measured = panel._replace(metric=metric)
                # Older runs lack it.
                if any(sample_of(full, measured, method) for method in METHODS):
                    parts += students_table(full, measured)
        parts += parts_table(full, panel)
        if panel.around == "{}":
            parts += thresholds_table(full, panel, notes)
            parts += ranks_tables(full, panel, notes, plots)
        parts.append(found(notes, panel.title))
    parts += ["## The paper's column of costs", notes["Costs"], paper_costs()]
    parts += endings(records, EXPERIMENTS, about_missing=notes["Not run"])
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("fed_kd", "FedKD", EXPERIMENTS, parts, plots, in_short, verdicts, missing)


def _picture(records: Sequence[Record], notes: Notes, plots: Plots) -> list[str]:
    """Quality against bytes, a panel for each group of clients that has runs."""
    panels: dict[str, dict[str, Cost]] = {}
    levels = {}
    for panel in PANELS:
        main = sample_of(records, panel, FED_KD)
        costs = {}
        for method in METHODS:
            shown = sample_of(records, panel, method)
            if not shown or (main and not have_equal_settings((FED_KD, main), (method, shown))):
                continue
            if method == LOCAL:
                levels[panel.title] = shown.mean
            elif method != CENTRAL and (sent := megabytes(shown)):
                # FedAvg has two points, one for each network.
                is_second = "student" in method.run
                cost = Cost(method.style, sent, shown.mean, shown.deviation, is_second)
                costs[method.name] = cost
        if len(costs) > 1:  # one method alone is compared with nothing
            panels[panel.title] = costs
    if not panels:
        return []
    drawn = {title: levels[title] for title in panels if title in levels}
    plots["fed_kd.png"] = lambda: figures.costs_plot(panels, drawn, LOCAL.name)
    return [
        image("fed_kd.png", "Quality against bytes of FedKD and the methods beside it"),
        notes["The plot of costs"],
    ]
