"""The codistillation paper's Table 1: accuracies, gains over FedAvg, and curves by round."""

from collections.abc import Sequence

from experiments.studies import figures
from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.claims import UNLABELLED_NAMES, gain
from experiments.studies.codistillation.findings import find
from experiments.studies.codistillation.paper_numbers import MODELS, POOL_SIZES, run_name
from experiments.studies.figures import Point
from experiments.studies.pooling import curve
from experiments.studies.records import TABLE_1, Record
from experiments.studies.sections.cells import both_models
from experiments.studies.sections.footnotes import remarks, unlike_fed_avg
from experiments.studies.sections.markdown import Plots, estimate, image, rounds_of, table
from fedcodist.config.registry import BASELINE, CODISTILLATION, METHOD_NAMES, METHODS
from fedcodist.report.intervals import BINOMIAL


def table_1(records: Sequence[Record], plots: Plots) -> list[str]:
    """Accuracies and gains beside the paper's, and the curves by round."""
    parts = ["## Table 1: CIFAR-100", "Test accuracy in %, small model / large model."]
    for unlabelled, name in UNLABELLED_NAMES.items():
        parts += [f"### Unlabelled images: {name}", _accuracy_table(records, unlabelled)]
        fed_avg = {size: run_name(BASELINE, size, "") for size in POOL_SIZES}
        codistilled = {
            run_name(method, size, unlabelled): fed_avg[size]
            for method in CODISTILLATION
            for size in POOL_SIZES
        }
        parts += unlike_fed_avg(records, TABLE_1, codistilled)
        parts += remarks(records, TABLE_1, [*fed_avg.values(), *codistilled])
        parts += [f"**Gains over FedAvg, {name}**", _gain_table(records, unlabelled)]
    parts += _gains_plot(records, plots)
    parts += ["### Held-out accuracy by round, 4,700 examples, in-domain"]
    return [*parts, *_curves_plot(records, plots)]


def _accuracy_table(records: Sequence[Record], unlabelled: str) -> str:
    headings = ["Method"]
    for size in POOL_SIZES:
        headings += [f"{size:,}: ours", f"{size:,}: paper"]
    rows = []
    for method in METHODS:
        row = [METHOD_NAMES[method]]
        for size in POOL_SIZES:
            run = run_name(method, size, unlabelled)
            small, large = paper_numbers.TABLE_1[run]
            row += [both_models(records, TABLE_1, run), f"{small:.2f} / {large:.2f}"]
        rows.append(row)
    return table(headings, rows)


def _gain_table(records: Sequence[Record], unlabelled: str) -> str:
    headings = ["Method", "Examples", "Model", "Our gain", "Interval", "Rounds", "Paper's gain"]
    rows = []
    for method in CODISTILLATION:
        for size in POOL_SIZES:
            for model in MODELS:
                found = find(gain(method, size, unlabelled, model), records)
                assert found.paper is not None
                row = [METHOD_NAMES[method], f"{size:,}", model, found.decided, "", ""]
                outside = ""
                if found.ours:
                    row[3:5] = [estimate(found.ours), found.ours.kind]
                    row[5] = rounds_of(found.rounds, found.full_rounds)
                    is_outside = abs(found.ours.value - found.paper) > found.ours.half_width
                    outside = "outside" if is_outside else "inside"
                rows.append([*row, f"{found.paper:+.2f}", outside])
    return table([*headings, "Paper's gain lies … our interval"], rows, texts=3)


def _gains_plot(records: Sequence[Record], plots: Plots) -> list[str]:
    ours: dict[str, dict[str, list[Point]]] = {}
    paper: dict[str, dict[str, list[Point]]] = {}
    for unlabelled, name in UNLABELLED_NAMES.items():
        for model in MODELS:
            title = f"{model} model, {name}"
            for method in CODISTILLATION:
                mine = ours.setdefault(title, {}).setdefault(method, [])
                theirs = paper.setdefault(title, {}).setdefault(method, [])
                for size in POOL_SIZES:
                    found = find(gain(method, size, unlabelled, model), records)
                    theirs.append(Point(size, found.paper or 0.0, None))
                    if found.ours:
                        value, half_width, kind = found.ours
                        is_binomial = kind == BINOMIAL
                        mine.append(Point(size, value, half_width, found.is_short, is_binomial))
    points = [point for panel in ours.values() for each in panel.values() for point in each]
    if not points:
        return []
    plots["gains.png"] = lambda: figures.gains_plot(ours, paper)
    text = "Gains over FedAvg. Filled: ours, with 95 % intervals."
    if any(point.is_short for point in points):
        text += " Pale: ours of fewer rounds (†)."
    if any(point.is_binomial for point in points):
        text += " Dashed: binomial intervals, as a side has a single seed."
    return [image("gains.png", "Gains over FedAvg by pool size"), f"{text} Hollow: the paper's."]


def _curves_plot(records: Sequence[Record], plots: Plots) -> list[str]:
    panels = {}
    for model in MODELS:
        runs = {method: run_name(method, 4700, "in_domain") for method in METHODS}
        found = {
            method: one
            for method, run in runs.items()
            if (one := curve(records, TABLE_1, run, model, "held_out"))
        }
        if found:
            panels[f"{model} model"] = found
    if not panels:
        return ["No runs yet."]
    plots["curves.png"] = lambda: figures.curves_plot(panels)
    text = "Lines: mean over the seeds. Shades: ± one standard deviation, where there are several."
    return [image("curves.png", "Held-out accuracy by round"), text]
