"""How accuracy is spread over the clients, each evaluated on its own examples."""

import sys
from typing import TYPE_CHECKING

import numpy as np

from fedcodist.config.registry import method_of
from fedcodist.report.cells import split_name
from fedcodist.report.collection import Collection, Method
from fedcodist.report.styles import LINES, styles
from fedcodist.run.client_metrics import CLIENTS, load_clients

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY, _MOST_PANELS = "accuracy", 3


def clients_plot(collection: Collection) -> "Figure | None":
    """Each method's clients from the lowest to the highest accuracy, a panel for each split.

    The lowest accuracy is the mean over seeds of each seed's lowest, and so on. A method's first model
    has a solid line; others, such as personal and fine-tuned ones, have broken lines. None where no run
    has measured clients.
    """
    from matplotlib.figure import Figure

    panels: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for index, method in enumerate(collection.methods):
        for (split, model), values in _by_client(method).items():
            panels.setdefault(split, {})[index, model] = 100 * values
    if not panels:
        return None
    splits = list(panels)[:_MOST_PANELS]
    figure = Figure(figsize=(4.6 * len(splits) + 0.6, 4.4), layout="constrained")
    grid = figure.subplots(1, len(splits), squeeze=False, sharey=True)[0]
    colours = [c for c, _ in styles([method_of(m.runs[0].config) for m in collection.methods])]
    models = list(dict.fromkeys(model for curves in panels.values() for _, model in curves))
    for axes, split in zip(grid, splits, strict=True):
        for (index, model), values in panels[split].items():
            label = collection.methods[index].label
            axes.plot(
                100 * (np.arange(len(values)) + 0.5) / len(values),
                values,
                linestyle=LINES[models.index(model) % len(LINES)],
                color=colours[index],
                label=f"{label}, {model}".replace("$", r"\$") if len(models) > 1 else label,
                linewidth=1.4,
            )
        axes.set_xlabel("Clients, lowest accuracy first (%)")
        axes.set_title(split_name(split), fontsize=10)
        axes.set_xlim(0, 100)
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("Accuracy on the client's own examples (%)")
    handles = {
        label: handle
        for axes in grid
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    return figure


def _by_client(method: Method) -> dict[tuple[str, str], np.ndarray]:
    """(split, model) -> ascending accuracies [clients], means over the seeds that the report averages.

    Clients are sorted within a seed, since seeds may divide the examples in different ways.
    """
    of_seeds: dict[tuple[str, str], list[np.ndarray]] = {}
    for run, seed in method.members:
        place = sorted({series.seed for series in run.records}).index(seed)
        try:
            measured_clients = load_clients(run.folder / CLIENTS)
        except ValueError as error:
            print(f"note: {error}: left out of the plot of clients", file=sys.stderr)
            continue
        for split, models in measured_clients.items():
            for model, measured in models.items():
                if _ACCURACY in measured.metrics:
                    accuracies = np.sort(measured.metrics[_ACCURACY][place])
                    of_seeds.setdefault((split, model), []).append(accuracies)
    return {
        where: np.mean(values, axis=0)
        for where, values in of_seeds.items()
        if len({len(value) for value in values}) == 1
    }
