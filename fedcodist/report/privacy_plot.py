"""What privacy costs: accuracy against the epsilon that clients have paid for it."""

from typing import TYPE_CHECKING

from fedcodist.config.registry import method_of
from fedcodist.report.accuracy_table import split_name
from fedcodist.report.collection import Collection, Method, curve
from fedcodist.report.styles import styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def privacy_plot(collection: Collection) -> "Figure | None":
    """Accuracy by the epsilon spent so far, a panel for each model; None where no run counts one.

    A method without noise, whose epsilon is infinite, is a dashed line at its last accuracy.
    """
    from matplotlib.figure import Figure

    split = next((s for s in collection.splits if _points(collection, s)), None)
    if split is None:
        return None
    points = _points(collection, split)
    models = [m for m in collection.models if any(model == m for _, model in points)]
    figure = Figure(figsize=(4.6 * len(models) + 0.6, 4.2), layout="constrained")
    grid = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    colours = styles([method_of(m.runs[0].config) for m in collection.methods])
    for axes, model in zip(grid, models, strict=True):
        for index, (method, style) in enumerate(zip(collection.methods, colours, strict=True)):
            label, (colour, marker) = method.label.replace("$", r"\$"), style
            if line := points.get((index, model)):
                axes.plot(*line, color=colour, marker=marker, label=label, linewidth=1.4)
            elif values := curve(method, model, split, "accuracy").statistics:
                axes.axhline(100 * values[-1].mean, color=colour, linestyle="--", label=label)
        axes.set_xlabel("Epsilon of the client who pays most")
        axes.set_title(f"{model} model", fontsize=10)
        axes.grid(alpha=0.25)
    grid[0].set_ylabel(f"{split_name(split).capitalize()} accuracy (%)")
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    return figure


def _points(
    collection: Collection, split: str
) -> dict[tuple[int, str], tuple[list[float], list[float]]]:
    """(method's place, model) -> epsilons after the first round, and accuracies in per cent."""
    found = {}
    for index, method in enumerate(collection.methods):
        for model in collection.models:
            if line := _line(method, model, split):
                found[index, model] = line
    return found


def _line(method: Method, model: str, split: str) -> tuple[list[float], list[float]] | None:
    spent, measured = (curve(method, model, split, metric) for metric in ("epsilon", "accuracy"))
    accuracy = dict(zip(measured.rounds, measured.statistics, strict=True))
    pairs = [
        (epsilon.mean, 100 * accuracy[round].mean)
        for round, epsilon in zip(spent.rounds, spent.statistics, strict=True)
        if round in accuracy and epsilon.mean > 0
    ]
    return ([x for x, _ in pairs], [y for _, y in pairs]) if pairs else None
