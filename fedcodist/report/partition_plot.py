"""A plot of a partition as in papers: clients by labels."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedcodist.core.checks import check_integer
from fedcodist.core.extras import check_installed
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import whole_labels
from fedcodist.report.plots import as_written
from fedcodist.report.styles import BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("bubbles", "bars")
_MOST_BARS = 20  # labels; more colours cannot be told apart
_MOST_NAMES = 30  # clients or labels whose names fit along an axis


def plot_partition(
    data: FederatedData,
    path: str | os.PathLike[str] | None = None,
    column: str = "label",
    kind: str = "bubbles",
    title: str | None = None,
    most_clients: int = 150,
) -> Figure:
    """Draws how many examples of each label each client has.

        figure = fc.plot_partition(train, "partition.png")

    Args:
      data: the clients.
      path: where to write the picture; its ending determines the format, such as .png, .pdf or .svg.
      column: integer labels `[examples]`, or one-hot ones `[examples, labels]`.
      kind: "bubbles", whose area is the number of examples; or "bars", one for each client with a part
        for each label, for at most 20 labels.
      title: by default the numbers of clients and examples.
      most_clients: largest number of clients that are drawn, at even distances of their index.

    Returns:
      The figure. A notebook shows it at the end of a cell, after `%matplotlib inline`.

    Raises:
      ImportError: matplotlib is missing; says what to install.
      ValueError, TypeError: names the argument, or the column that holds no labels.
    """
    check_installed("plot_partition", "matplotlib", "plot")
    from matplotlib.figure import Figure

    check_integer("most_clients", most_clients, low=1)
    if path is not None and not Path(path).suffix:
        raise ValueError(f"path must end in a format, such as .png, got {str(path)!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    labels, counts = label_counts(data, column)
    if kind == "bars" and len(labels) > _MOST_BARS:
        raise ValueError(
            f"kind must be 'bubbles' for more than {_MOST_BARS} labels, there are {len(labels)}"
        )
    shown = np.unique(np.linspace(0, len(counts) - 1, min(most_clients, len(counts))).astype(int))
    drawn = counts[shown]
    width = min(14.0, max(4.5, 1.8 + 0.3 * len(shown)))
    height = min(12.0, max(3.2, 1.6 + 0.26 * len(labels))) if kind == "bubbles" else 4.2
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    axes = figure.subplots()
    if kind == "bubbles":
        _draw_bubbles(axes, labels, drawn, (width, height))
    else:
        _draw_bars(axes, labels, drawn)
    _name_clients(axes, data.client_ids[shown].tolist())
    of_all = "" if len(shown) == len(counts) else f"{len(shown)} of "
    described = f"{of_all}{len(counts):,} clients, {data.num_examples:,} examples"
    axes.set_title(as_written(described if title is None else title), fontsize=11)
    if path is not None:
        figure.savefig(path)
    return figure


def label_counts(data: FederatedData, column: str = "label") -> tuple[np.ndarray, np.ndarray]:
    """The labels that occur, ascending, and their numbers of examples, int `[clients, labels]`.

    Raises:
      TypeError, ValueError: not federated data, or a column that is missing or holds no labels.
    """
    if not isinstance(data, FederatedData):
        raise TypeError(f"data must be FederatedData, got {type(data).__name__}")
    if column not in data.columns:
        raise ValueError(f"column must be one of {sorted(data.columns)}, got {column!r}")
    values = whole_labels(data.columns[column])
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(
            f"column {column!r} must be integer labels [examples], got {values.dtype} "
            f"{list(values.shape)}"
        )
    if not len(values):
        raise ValueError("data must have examples")
    labels, index = np.unique(values, return_inverse=True)
    owner = np.repeat(np.arange(data.num_clients), data.client_sizes)
    cells = np.bincount(owner * len(labels) + index, minlength=data.num_clients * len(labels))
    return labels, cells.reshape(data.num_clients, len(labels))


def _draw_bubbles(
    axes: Axes, labels: np.ndarray, counts: np.ndarray, size: tuple[float, float]
) -> None:
    """A bubble for each client and label; the largest may overlap those of neighbouring clients."""
    clients, label_indices = np.nonzero(counts)
    examples = counts[clients, label_indices]
    wide, high = (size[0] - 1.6) / len(counts), (size[1] - 1.2) / len(labels)  # inches
    diameter = 72 * min(max(min(1.8 * wide, 0.95 * high), 0.03), 0.45)  # points
    scale = diameter**2 / counts.max()
    axes.scatter(clients, label_indices, scale * examples, color=BLUE, alpha=0.7, linewidths=0)
    axes.set_xlim(-0.8, len(counts) - 0.2)
    axes.set_ylim(-0.8, len(labels) - 0.2)
    axes.set_ylabel("Label")
    step = _name_step(len(labels))
    axes.set_yticks(range(0, len(labels), step), [str(label) for label in labels[::step]])
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for number in dict.fromkeys([max(1, counts.max() // 4), counts.max()]):
        axes.scatter(
            [], [], scale * number, color=BLUE, alpha=0.7, linewidths=0, label=f"{number:,}"
        )
    axes.legend(
        title="Examples",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        labelspacing=1.1,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )


def _draw_bars(axes: Axes, labels: np.ndarray, counts: np.ndarray) -> None:
    """A bar for each client, on which its numbers of examples of each label are stacked."""
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    below = np.zeros(len(counts))
    width = 0.85 if len(counts) <= _MOST_NAMES else 1.0
    for index, label in enumerate(labels):
        column = counts[:, index]
        axes.bar(range(len(counts)), column, width, below, color=palette(index), label=str(label))
        below += column
    axes.set_xlim(-0.8, len(counts) - 0.2)
    axes.set_ylabel("Examples")
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],  # in the order in which the parts of a bar are stacked
        names[::-1],
        title="Label",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )


def _name_clients(axes: Axes, client_ids: list[str]) -> None:
    """Names below all clients, or below some where there are many."""
    step = _name_step(len(client_ids))
    names = [
        as_written(name if len(name) <= 12 else f"{name[:11]}…") for name in client_ids[::step]
    ]
    turned = 90 if max(map(len, names)) > 4 else 0
    axes.set_xticks(range(0, len(client_ids), step), names, rotation=turned)
    axes.set_xlabel("Client")


def _name_step(count: int) -> int:
    """1 where all names fit along an axis, else a multiple of 5."""
    step = math.ceil(count / _MOST_NAMES)
    return 1 if step == 1 else math.ceil(step / 5) * 5
