"""Plots of methods: curves by round and by bytes, losses, accuracies per label."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcodist.config.registry import method_of
from fedcodist.core.extras import install_command
from fedcodist.core.metric_kinds import is_share
from fedcodist.report.cells import metric_label, split_name
from fedcodist.report.clients_plot import clients_plot
from fedcodist.report.collection import Collection, Curve, Method, curve, last_evaluations
from fedcodist.report.costs import bytes_after, pools_of
from fedcodist.report.mean_model import panel_title, with_mean_model
from fedcodist.report.privacy_plot import privacy_plot
from fedcodist.report.runs import TRAINING, mapping_of
from fedcodist.report.styles import styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


INSTALL_PLOTS = f"no plots: matplotlib is missing, install it with: {install_command('plot')}"


def write_plots(collection: Collection, output: Path) -> list[Path]:
    """Draws all plots that have data; returns their files, none without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    metric, few_models = collection.metric, with_mean_model(collection)
    plots = {
        f"{metric}.png": _metric_plot(few_models),
        f"{metric}_by_bytes.png": _bytes_plot(few_models),
        "loss.png": _loss_plot(few_models),
        "per_label_accuracy.png": _per_label_plot(few_models),
        "clients.png": clients_plot(collection),
        f"{metric}_by_epsilon.png": privacy_plot(few_models),
    }
    written = []
    for name, figure in plots.items():
        if figure is not None:
            figure.savefig(output / name, dpi=144)
            written.append(output / name)
    return written


def as_written(name: str) -> str:
    """A name for a plot; otherwise text between two dollar signs would become a formula."""
    return name.replace("$", r"\$")


def legend(figure: "Figure", axes: Sequence["Axes"], columns: int = 4) -> None:
    """One legend below all axes; a label that several have is shown once."""
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(
        list(shown.values()),
        [as_written(label) for label in shown],
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def _metric_plot(collection: Collection) -> "Figure | None":
    return _curves_plot(collection, [_metric(collection)]) if collection.splits else None


def _bytes_plot(collection: Collection) -> "Figure | None":
    """The metric against the bytes that clients have sent and received."""
    if not collection.splits:
        return None
    split, metric, *_ = _metric(collection)
    if all(
        _megabytes(method, model, curve(method, model, split, metric).rounds) is None
        for method in collection.methods
        for model in collection.models
    ):
        return None
    return _curves_plot(collection, [_metric(collection)], by_bytes=True)


def _metric(collection: Collection) -> tuple[str, str, str, float]:
    """(split, metric, label, factor) of the metric that the report shows."""
    metric = collection.metric
    split, factor = _followed_split(collection, metric), 100.0 if is_share(metric) else 1.0
    return split, metric, metric_label(split, metric), factor


def _followed_split(collection: Collection, metric: str) -> str:
    """The split on which a metric was evaluated most often: some are evaluated only at the end."""

    def evaluations(split: str) -> int:
        curves = [
            curve(method, model, split, metric)
            for method in collection.methods
            for model in collection.models
        ]
        return max(len(points.rounds) for points in curves)

    evaluated = {
        series.split
        for method in collection.methods
        for run in method.runs
        for series in run.records
        if series.split != TRAINING
    }
    return max(collection.splits or sorted(evaluated) or ["test"], key=evaluations)


def _megabytes(method: Method, model: str, rounds: Sequence[int]) -> np.ndarray | None:
    """Megabytes that all clients of the model's pool have sent and received after each of the rounds.

    They are the mean over the seeds, float [rounds]; None if they are unknown, or nothing was sent.
    """
    if not rounds:
        return None
    of_seeds = []
    for run, seed in method.members:
        if mapping_of(run.summary, "models"):
            try:
                by_pool = bytes_after(run, seed, rounds)
            except ValueError:  # of a config that is not the library's
                return None
            pools = pools_of(run.config, model, by_pool)
            of_seeds.append(np.sum([by_pool[pool] for pool in pools], axis=0))
    return np.mean(of_seeds, axis=0) / 1e6 if np.any(of_seeds) else None


def _loss_plot(collection: Collection) -> "Figure | None":
    panels = []
    evaluated = _followed_split(collection, "loss")
    of_clients = "Clients' loss in training"
    for split, metric, label in (
        (evaluated, "loss", f"{split_name(evaluated).capitalize()} loss"),
        (TRAINING, "loss", of_clients),  # of parties
        (TRAINING, "client_loss", of_clients),  # of pools
    ):
        if any(
            curve(method, model, split, metric).rounds
            for method in collection.methods
            for model in collection.models
        ):
            panels.append((split, metric, label, 1.0))
    return _curves_plot(collection, panels) if panels else None


def _curves_plot(
    collection: Collection,
    quantities: Sequence[tuple[str, str, str, float]],
    by_bytes: bool = False,
) -> "Figure":
    """A row of panels for each quantity (split, metric, label, factor), a column for each model.

    With `by_bytes` the horizontal axis has megabytes exchanged instead of rounds.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    columns = len(collection.models)
    width = max(6.0, 4.6 * columns)
    labels = [_legend_label(method, collection) for method in collection.methods]
    method_styles = styles([method_of(method.runs[0].config) for method in collection.methods])
    legend_columns = max(1, min(len(labels) + 1, int(width / (0.07 * max(map(len, labels)) + 0.6))))
    legend_rows = math.ceil((len(labels) + 1) / legend_columns)
    size = (width, 3.4 * len(quantities) + 0.45 + 0.22 * legend_rows)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.subplots(len(quantities), columns, squeeze=False, sharex="col", sharey="row")
    handles = {}
    for row, (split, metric, label, factor) in zip(axes, quantities, strict=True):
        row[0].set_ylabel(as_written(label))
        late = []
        for axis, model in zip(row, collection.models, strict=True):
            axis.grid(color="0.9", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not by_bytes))
            for method, (colour, marker) in zip(collection.methods, method_styles, strict=True):
                points = curve(method, model, split, metric)
                places = _megabytes(method, model, points.rounds) if by_bytes else points.rounds
                if not points.rounds or places is None:
                    continue
                if not by_bytes:
                    _draw_codistillation_rounds(axis, method, points, colour)
                style = {"color": colour, "marker": marker}
                handles[method.label] = _draw_curve(axis, points, style, factor, places)
                late += _after_the_start(points, factor)
        _show_from(row[0], late)
    for axis, model in zip(axes[0], collection.models, strict=True):
        axis.set_title(as_written(panel_title(model)), fontsize=11, fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel(
            "Sent and received by all clients, MB" if by_bytes else "Communication round"
        )
    lines = {
        as_written(text): handles[method.label]
        for method, text in zip(collection.methods, labels, strict=True)
        if method.label in handles
    }
    if not by_bytes and any(_codistillation_rounds(method) for method in collection.methods):
        lines["codistillation"] = Line2D([], [], color="0.4", linestyle=":", linewidth=1)
    _draw_legend(figure, lines, legend_columns, _spread_title(labels))
    return figure


def _after_the_start(points: Curve, factor: float) -> list[float]:
    """A curve's values after the first tenth of its rounds."""
    return [
        factor * statistic.mean
        for round, statistic in zip(points.rounds, points.statistics, strict=True)
        if round >= points.rounds[-1] / 10 and math.isfinite(statistic.mean)
    ]


def _show_from(axis: "Axes", values: Sequence[float]) -> None:
    """Limits the axis to these values and so hides the steep start, where methods do not differ."""
    if len(values) > 1 and max(values) > min(values):
        margin = 0.06 * (max(values) - min(values))
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, min(values) - margin), min(high, max(values) + margin))


def _draw_legend(
    figure: "Figure", lines: Mapping[str, "Line2D"], columns: int, title: str | None
) -> None:
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=columns,
        title=title,
        fontsize=9,
        title_fontsize=8.5,
        borderaxespad=0,
        frameon=False,
    )


def _draw_curve(
    axis: "Axes",
    points: Curve,
    style: Mapping[str, Any],
    factor: float,
    places: Sequence[float] | np.ndarray,
) -> "Line2D":
    means = [factor * statistic.mean for statistic in points.statistics]
    spreads = [factor * (statistic.spread or 0.0) for statistic in points.statistics]
    if any(spreads):
        below = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        above = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axis.fill_between(places, below, above, color=style["color"], alpha=0.15, linewidth=0)
    (line,) = axis.plot(
        places,
        means,
        linewidth=1.6,
        markersize=3.5,
        markevery=max(1, len(means) // 12),
        **style,
    )
    return line


def _draw_codistillation_rounds(axis: "Axes", method: Method, points: Curve, colour: str) -> None:
    for round in _codistillation_rounds(method):
        if round <= points.rounds[-1]:
            axis.axvline(round, color=colour, linestyle=":", linewidth=1, alpha=0.6, zorder=1)


def _codistillation_rounds(method: Method) -> list[int]:
    """Rounds in which a periodic method distills; empty where there are too many to show."""
    config = method.runs[0].config
    algorithm = mapping_of(config, "algorithm")
    # FedAvg and MergedCodist have a period in their configs too, and do not read it.
    is_periodic = str(algorithm.get("name")).endswith("periodic_codistillation")
    period = algorithm.get("period") if is_periodic else None
    rounds = config.get("rounds")
    if not isinstance(period, int) or not isinstance(rounds, int) or period < 1:
        return []
    distilled = list(range(period, rounds + 1, period))
    return distilled if len(distilled) <= 40 else []


def _legend_label(method: Method, collection: Collection) -> str:
    counts = {
        statistic.seeds
        for model in collection.models
        for split in collection.splits
        for statistic in curve(method, model, split, collection.metric).statistics
    }
    seeds = f", {max(counts)} seeds" if counts and max(counts) > 1 else ""
    return f"{method.label}{seeds}{'' if method.finished else ', unfinished'}"


def _spread_title(labels: Sequence[str]) -> str | None:
    several = any(label.endswith(("seeds", "seeds, unfinished")) for label in labels)
    return "line: mean, shade: ± standard deviation over the seeds" if several else None


def _per_label_plot(collection: Collection) -> "Figure | None":
    """Heat map of the final accuracy on each label, with a row for each method and model."""
    if not collection.splits:
        return None
    split = collection.splits[0]
    names, rows = [], []
    for model in collection.models:
        for method in collection.methods:
            values = _per_label(method, model, split)
            if values:
                names.append(f"{model} · {method.label}")
                rows.append(values)
    if not rows:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    labels = max(map(len, rows))
    rows = [[*values, *[math.nan] * (labels - len(values))] for values in rows]
    width = 2.6 + 0.085 * max(map(len, names)) + min(0.52 * labels, 9)
    figure = Figure(figsize=(width, 1.3 + 0.36 * len(rows)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(rows, aspect="auto", cmap="cividis")
    if labels <= 20:
        _write_numbers(axis, rows)
    axis.set_xlabel("Label")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axis.set_yticks(range(len(names)), map(as_written, names))
    for y in range(1, len(names)):
        if names[y].split(" · ")[0] != names[y - 1].split(" · ")[0]:
            axis.axhline(y - 0.5, color="white", linewidth=4)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    title = as_written(f"Final {split_name(split)} accuracy per label (%)")
    axis.set_title(title, fontsize=11, fontweight="bold")
    figure.colorbar(image, ax=axis, pad=0.02)
    return figure


def _per_label(method: Method, model: str, split: str) -> list[float]:
    """Final accuracies in %, mean over the seeds; NaN for a label without examples."""
    shares = []
    for record in last_evaluations(method, model, split):
        values = record.get("per_label_accuracy")
        if isinstance(values, list):
            shares.append([math.nan if value is None else 100 * value for value in values])
    if not shares or len({len(values) for values in shares}) > 1:
        return []
    return [sum(values) / len(values) for values in zip(*shares, strict=True)]


def _write_numbers(axis: "Axes", rows: Sequence[Sequence[float]]) -> None:
    finite = [value for row in rows for value in row if math.isfinite(value)]
    middle = (min(finite) + max(finite)) / 2 if finite else 0.0
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            text = f"{value:.0f}" if math.isfinite(value) else "–"
            colour = "black" if value > middle or not math.isfinite(value) else "white"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
