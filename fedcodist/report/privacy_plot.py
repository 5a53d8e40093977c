"""What privacy costs: accuracy, or another metric, against the epsilon that clients have paid for it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcodist.config.registry import METHOD_NAMES, method_of
from fedcodist.core.metric_kinds import is_share
from fedcodist.report.cells import metric_label
from fedcodist.report.collection import Collection, Method, curve
from fedcodist.report.mean_model import panel_title
from fedcodist.report.settings import (
    NOT_OF_A_METHOD,
    differing_settings,
    flatten,
    with_identity,
)
from fedcodist.report.styles import styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS_IN_A_ROW = 3


class _Line(NamedTuple):
    """A method's accuracies by epsilon, and its accuracy without noise where it was run."""

    epsilons: list[float]
    accuracies: list[float]
    without_noise: float | None


def privacy_plot(collection: Collection) -> "Figure | None":
    """Final accuracies by epsilon, a panel for each model; None if no run has an epsilon.

    Runs that differ only in their privacy are one line. A run without noise is a dashed line.
    """
    from matplotlib.figure import Figure

    split = next((s for s in collection.splits if _lines(collection, s)), None)
    if split is None:
        return None
    lines = _lines(collection, split)
    groups = list(dict.fromkeys(group for group, _ in lines))
    models = [m for m in collection.models if any(model == m for _, model in lines)]
    columns = min(len(models), _PANELS_IN_A_ROW)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.6, 3.4 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for left_over in panels[len(models) :]:
        left_over.set_axis_off()
    names = [method_of(json.loads(group)) for group in groups]
    labels = _labels(groups, names)
    shown: dict[str, Any] = {}
    for axes, model in zip(panels, models, strict=False):
        for group, label, (colour, marker) in zip(groups, labels, styles(names), strict=True):
            if (group, model) not in lines:
                continue
            line = lines[group, model]
            (drawn,) = axes.plot(line.epsilons, line.accuracies, color=colour, marker=marker)
            shown.setdefault(label, drawn)
            if line.without_noise is not None:
                axes.axhline(line.without_noise, color=colour, linestyle="--", linewidth=1)
        budgets = sorted(
            {
                round(epsilon, 2)
                for (_, model_of_line), line in lines.items()
                if model_of_line == model
                for epsilon in line.epsilons
            }
        )
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("Epsilon of the client who pays most")
        axes.set_title(panel_title(model), fontsize=10)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(f"{metric_label(split, collection.metric)}; dashed: without noise")
    # About eleven letters are as wide as an inch, and a line's picture as eight letters.
    fitting = int(11 * figure.get_figwidth()) // (8 + max(map(len, shown)))
    columns_of_legend = min(3, max(1, fitting))
    figure.legend(
        shown.values(),
        shown,
        loc="outside lower center",
        ncols=columns_of_legend,
        fontsize=9,
        frameon=False,
    )
    return figure


def _labels(groups: Sequence[str], names: Sequence[str]) -> list[str]:
    """The methods' names; where one has several groups of settings, with those that differ."""
    settings_of_groups = [flatten(json.loads(group)) for group in groups]
    alike: dict[str, list[dict[str, Any]]] = {}
    for name, settings in zip(names, settings_of_groups, strict=True):
        alike.setdefault(name, []).append(settings)
    labels = []
    for name, settings in zip(names, settings_of_groups, strict=True):
        differences = differing_settings(settings, alike[name])
        labels.append(", ".join([METHOD_NAMES.get(name, name), *differences]))
    return labels


def _lines(collection: Collection, split: str) -> dict[tuple[str, str], _Line]:
    """(settings without privacy, model) -> line, for groups with a run of finite epsilon."""
    lines: dict[tuple[str, str], _Line] = {}
    for method in collection.methods:
        group = _settings_but_for_privacy(method)
        epsilon_of_model = {
            model: spent.statistics[-1].mean
            for model in collection.models
            if (spent := curve(method, model, split, "epsilon")).rounds
        }
        has_noise = any(map(math.isfinite, epsilon_of_model.values()))
        for model in collection.models:
            measured = curve(method, model, split, collection.metric)
            # Beside noised models, personal ones have no epsilon: they stay with their clients.
            if not measured.rounds or (has_noise and model not in epsilon_of_model):
                continue
            last = (100 if is_share(collection.metric) else 1) * measured.statistics[-1].mean
            epsilons, values, without_noise = lines.get((group, model), _Line([], [], None))
            epsilon = epsilon_of_model.get(model, math.inf)
            if math.isfinite(epsilon):  # it is infinite without noise
                pairs = sorted([*zip(epsilons, values, strict=True), (epsilon, last)])
                epsilons, values = map(list, zip(*pairs, strict=True))
            else:
                without_noise = last
            lines[group, model] = _Line(epsilons, values, without_noise)
    private = {group for (group, _), line in lines.items() if line.epsilons}
    return {key: line for key, line in lines.items() if key[0] in private}


def _settings_but_for_privacy(method: Method) -> str:
    config = {k: v for k, v in with_identity(method.runs[0]).items() if k not in NOT_OF_A_METHOD}
    for group in ("training", "algorithm"):  # of methods of pools, and of parties
        settings = config.get(group, {})
        # In the folder of a run without a config the algorithm is its name alone.
        if isinstance(settings, Mapping):
            config[group] = {k: v for k, v in settings.items() if k != "privacy"}
    return json.dumps(config, sort_keys=True, default=str)
