"""The plots of the pages: functions of the shown values, each of which returns a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.studies.samples import Curve
from fedcodist.config.registry import METHOD_NAMES
from fedcodist.report.plots import as_written, legend
from fedcodist.report.styles import COLOURS, LINES, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """A value in % or points, and the half width of its interval (None: unknown).

    `is_binomial`: whether `half_width` does not include the spread over seeds.
    """

    x: float
    y: float
    half_width: float | None
    is_binomial: bool = False


class Cost(NamedTuple):
    """A method's quality in %, its standard deviation over seeds (None: one seed), and its cost.

    `is_hollow`: whether this is the second of two points of one method.
    """

    method: str
    megabytes: float
    mean: float
    deviation: float | None
    is_hollow: bool = False


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
            colour, marker = style(method)
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
    """Gains over FedAvg by pool size: ours filled with 95 % intervals, dashed where binomial; the
    paper's hollow."""
    figure, axes = _panels(ours, "Examples in the large model's pool", "Gain over FedAvg (points)")
    for axis, title in zip(axes, ours, strict=True):
        sizes = sorted({p.x for points in paper[title].values() for p in points})
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_xticks(range(len(sizes)), [f"{size:,.0f}" for size in sizes])
        for number, method in enumerate(paper[title]):
            middle = 0.36 * (number - 0.5) - 0.06
            colour, marker = style(method)
            drawn: dict[str, Any] = dict(
                color=colour, marker=marker, markersize=5.5, linestyle="none"
            )
            axis.plot([], [], label=f"{METHOD_NAMES[method]}, ours", **drawn)
            for point in ours[title].get(method, ()):
                place = sizes.index(point.x) + middle
                (_, _, bars) = _draw(axis, method, [point._replace(x=place)], linestyle="none")
                for bar in bars:
                    bar.set_linestyle("--" if point.is_binomial else "-")
            theirs = paper[title][method]
            axis.plot(
                [sizes.index(point.x) + middle + 0.12 for point in theirs],
                [point.y for point in theirs],
                markerfacecolor="white",
                label=f"{METHOD_NAMES[method]}, paper",
                **drawn,
            )
    legend(figure, axes)
    return figure


def unlabelled_plot(panels: Mapping[str, Mapping[tuple[str, int], Sequence[Point]]]) -> "Figure":
    """Accuracy by number of unlabelled images, a line for each method and number of rounds.

    A method with a single point at zero, such as FedAvg, is a horizontal line.
    """
    from matplotlib.ticker import NullFormatter, NullLocator

    figure, axes = _panels(panels, "Unlabelled images", "Test accuracy (%)")
    for axis, lines in zip(axes, panels.values(), strict=True):
        axis.set_xscale("log")
        counts = sorted({p.x for points in lines.values() for p in points if p.x > 0})
        axis.set_xticks(counts, [f"{count:,.0f}" for count in counts], rotation=30)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        for (method, rounds), points in lines.items():
            label = f"{METHOD_NAMES[method]}, {rounds:,} rounds"
            if points[0].x > 0:
                _draw(axis, method, points, linewidth=1.6, label=label)
            else:
                _level(axis, points[0].y, label, style(method)[0])
    legend(figure, axes)
    return figure


def costs_plot(
    panels: Mapping[str, Mapping[str, Cost]], levels: Mapping[str, float], level: str
) -> "Figure":
    """Quality by bytes, a point for each method; a method that sends nothing is a horizontal line.

    Args:
      panels: title -> name in the legend -> its point.
      levels: title -> quality of the method that sends nothing, if it was run.
      level: the name of this method.
    """
    figure, axes = _panels(panels, "Sent and received by a client, MB", "Quality on tests (%)")
    for axis, (title, costs) in zip(axes, panels.items(), strict=True):
        axis.set_xscale("log")
        if title in levels:
            _level(axis, levels[title], level, "0.3")
        for name, (method, megabytes, mean, deviation, is_hollow) in costs.items():
            face = {"markerfacecolor": "white"} if is_hollow else {}
            point = Point(megabytes, mean, deviation)
            _draw(axis, method, [point], linestyle="none", label=name, **face)
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
    for number, (layer, spectrum) in enumerate(layers.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = LINES[number // len(COLOURS) % len(LINES)]
        axes[0].plot(spectrum.rounds, spectrum.ranks, color=colour, linestyle=line, label=layer)
        for axis, values in zip(axes[1:], (spectrum.first, spectrum.last), strict=True):
            # Smaller ones are the rounding of float32.
            shares = [value / values[0] for value in values if value > 1e-6 * values[0]]
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
    """A figure with two panels in a row, drawn without a display."""
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


def _draw(axis: "Axes", method: str, points: Sequence[Point], **more: Any) -> Any:
    """Points of a method with their bars."""
    colour, marker = style(method)
    x, y, half_widths = zip(*(point[:3] for point in points), strict=True)
    bars = [half_width or 0.0 for half_width in half_widths]
    look: dict[str, Any] = dict(color=colour, marker=marker, markersize=5.5, elinewidth=1.2)
    return axis.errorbar(x, y, yerr=bars, capsize=2.5, **look, **more)


def _level(axis: "Axes", y: float, label: str, colour: str) -> None:
    axis.axhline(y, color=colour, linestyle="--", linewidth=1.2, label=label)
