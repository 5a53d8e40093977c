"""The plots of RESULTS.md: pure functions of what they show, a matplotlib figure each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.studies.pooling import Curve
from fedcodist.config.registry import METHOD_NAMES, METHODS
from fedcodist.report.plots import COLOURS, LINES, MARKERS, as_written, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """A value in % or points, and how far up and down it may be off (None: not known).

    `is_short`: of fewer rounds than it needs. `is_binomial`: `half_width` is without the spread over
    seeds.
    """

    x: float
    y: float
    half_width: float | None
    is_short: bool = False
    is_binomial: bool = False


class Cost(NamedTuple):
    """What a method reaches in %, its standard deviation over seeds (None: one seed), and for what."""

    megabytes: float
    mean: float
    deviation: float | None


class Spectrum(NamedTuple):
    """What SVD met in a layer's updates: ranks by round, singular values in the first and last round."""

    rounds: tuple[int, ...]
    ranks: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]


# Panel title -> method -> what is drawn
Curves = Mapping[str, Mapping[str, Curve]]
Points = Mapping[str, Mapping[str, Sequence[Point]]]


def curves_plot(panels: Curves) -> "Figure":
    """Accuracy by round, one panel per model; shades are a standard deviation over the seeds."""
    figure, axes = _panels(panels, "Communication round", "Held-out accuracy (%)")
    for axis, curves in zip(axes, panels.values(), strict=True):
        for method, curve in curves.items():
            colour, marker = _style(method)
            pairs = list(zip(curve.means, curve.deviations, strict=True))
            below, above = [m - d for m, d in pairs], [m + d for m, d in pairs]
            axis.fill_between(curve.rounds, below, above, color=colour, alpha=0.15, linewidth=0)
            axis.plot(
                curve.rounds,
                curve.means,
                color=colour,
                marker=marker,
                markevery=max(1, len(pairs) // 12),
                markersize=3.5,
                linewidth=1.6,
                label=METHOD_NAMES[method],
            )
    legend(figure, axes)
    return figure


def gains_plot(ours: Points, paper: Points) -> "Figure":
    """Gains over FedAvg by pool size: ours filled with 95 % intervals, the paper's hollow.

    Ours are pale where of fewer rounds, their bars dashed where binomial.
    """
    figure, axes = _panels(ours, "Examples in the large model's pool", "Gain over FedAvg (points)")
    for axis, title in zip(axes, ours, strict=True):
        sizes = sorted({p.x for points in paper[title].values() for p in points})
        places = {size: place for place, size in enumerate(sizes)}
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_xticks(range(len(sizes)), [f"{size:,.0f}" for size in sizes])
        for number, method in enumerate(paper[title]):
            colour, marker = _style(method)
            middle = 0.36 * (number - 0.5) - 0.06
            style: dict[str, Any] = dict(
                color=colour, marker=marker, markersize=5.5, linestyle="none"
            )
            axis.plot([], [], label=f"{METHOD_NAMES[method]}, ours", **style)
            for point in ours[title].get(method, ()):
                (_, _, bars) = axis.errorbar(
                    places[point.x] + middle,
                    point.y,
                    yerr=point.half_width,
                    markerfacecolor=_pale(colour) if point.is_short else colour,
                    elinewidth=1.2,
                    capsize=2.5,
                    **style,
                )
                for bar in bars:
                    bar.set_linestyle("--" if point.is_binomial else "-")
            theirs = paper[title][method]
            axis.plot(
                [places[point.x] + middle + 0.12 for point in theirs],
                [point.y for point in theirs],
                markerfacecolor="white",
                label=f"{METHOD_NAMES[method]}, paper",
                **style,
            )
    legend(figure, axes)
    return figure


def unlabelled_plot(panels: Points, baselines: Mapping[str, float]) -> "Figure":
    """Accuracy by number of unlabelled images; FedAvg, which uses none, as a level."""
    from matplotlib.ticker import NullFormatter, NullLocator

    figure, axes = _panels(panels, "Unlabelled images", "Test accuracy (%)")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        if title in baselines:
            axis.axhline(
                baselines[title], color=COLOURS[0], linestyle="--", linewidth=1.2, label="FedAvg"
            )
        axis.set_xscale("log")
        counts = sorted({point.x for points in lines.values() for point in points})
        axis.set_xticks(counts, [f"{count:,.0f}" for count in counts], rotation=30)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        for method, points in lines.items():
            colour, marker = _style(method)
            axis.errorbar(
                [p.x for p in points],
                [p.y for p in points],
                yerr=[p.half_width or 0.0 for p in points],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.6,
                elinewidth=1.2,
                capsize=2.5,
                label=METHOD_NAMES[method],
            )
    legend(figure, axes)
    return figure


def costs_plot(
    panels: Mapping[str, Mapping[str, Cost]], levels: Mapping[str, float], level: str
) -> "Figure":
    """Quality by bytes, a point for each method; what sends nothing is a level.

    Args:
      panels: title -> method -> its point. A method looks the same in all panels.
      levels: title -> quality of what sends nothing, where it was run.
      level: what that is called.
    """
    names = list(dict.fromkeys(name for costs in panels.values() for name in costs))
    figure, axes = _panels(panels, "Sent and received by a client, MB", "Quality on tests (%)")
    for axis, (title, costs) in zip(axes, panels.items(), strict=True):
        axis.set_xscale("log")
        if title in levels:
            axis.axhline(levels[title], color="0.3", linestyle="--", linewidth=1.2, label=level)
        for name, cost in costs.items():
            number = names.index(name)
            axis.errorbar(
                cost.megabytes,
                cost.mean,
                yerr=cost.deviation,
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=6,
                linestyle="none",
                elinewidth=1.2,
                capsize=2.5,
                label=name,
            )
    legend(figure, axes)
    return figure


def ranks_plot(layers: Mapping[str, Spectrum]) -> "Figure":
    """The rank that the energy threshold asks for by round, then singular values as shares of the
    largest, in the first round and in the last."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.4, 3.4 + 0.1 * len(layers)), layout="constrained")
    axes = list(figure.subplots(1, 3))
    axes[2].sharey(axes[1])
    for number, (layer, own) in enumerate(layers.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = LINES[number // len(COLOURS) % len(LINES)]
        axes[0].plot(own.rounds, own.ranks, color=colour, linestyle=line, label=layer)
        for axis, values in zip(axes[1:], (own.first, own.last), strict=True):
            shares = [value / values[0] for value in values if value > 0]
            axis.plot(range(1, len(shares) + 1), shares, color=colour, linestyle=line)
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_yscale("log")
    rounds = next(iter(layers.values())).rounds
    labels = (
        ("Communication round", "Singular values kept"),
        (f"Singular value, round {rounds[0]}", "Share of the largest"),
        (f"Singular value, round {rounds[-1]}", ""),
    )
    for axis, (x_label, y_label) in zip(axes, labels, strict=True):
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure, axes, columns=3)
    return figure


def _panels(
    titles: Mapping[str, object], x_label: str, y_label: str
) -> tuple["Figure", list["Axes"]]:
    """Panels two to a row, drawn without a display."""
    from matplotlib.figure import Figure

    rows = (len(titles) + 1) // 2
    figure = Figure(figsize=(8.4, 0.5 + 3.1 * rows), layout="constrained")
    every = list(figure.subplots(rows, 2, squeeze=False, sharex=True).flat)
    axes = every[: len(titles)]
    for surplus in every[len(titles) :]:
        surplus.remove()
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(as_written(title), fontsize=11, fontweight="bold")
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-2:]:
        axis.set_xlabel(x_label)
    for axis in axes[::2]:
        axis.set_ylabel(y_label)
    return figure, axes


# A method has the same colour and marker in every plot.
def _style(method: str) -> tuple[str, str]:
    number = METHODS.index(method)
    return COLOURS[number], MARKERS[number]


def _pale(colour: str) -> tuple[float, ...]:
    """A third of the colour on white."""
    from matplotlib.colors import to_rgb

    return tuple(1 - (1 - part) / 3 for part in to_rgb(colour))
