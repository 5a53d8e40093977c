"""Values and names as a report writes them: per cent, bytes, epsilon, splits and metrics."""

import math

from fedcodist.core.metric_kinds import is_share
from fedcodist.report.collection import Statistic
from fedcodist.report.spread import plus_minus


def percent(statistic: Statistic | None) -> str:
    """A share as per cent, with its spread over seeds."""
    if statistic is None or not math.isfinite(statistic.mean):
        return "–"
    return plus_minus(
        100 * statistic.mean, None if statistic.spread is None else 100 * statistic.spread
    )


def number(statistic: Statistic | None) -> str:
    """A metric that is no share, with its spread over seeds."""
    if statistic is None or not math.isfinite(statistic.mean):
        return "–"
    return plus_minus(statistic.mean, statistic.spread, is_share=False)


def human_bytes(count: int | None) -> str:
    """A number of bytes in decimal units, `437.4 kB`."""
    if count is None:
        return "–"
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def shown_epsilon(epsilon: float | None) -> str:
    """'7.99', '∞' without noise, or a dash for a run without privacy."""
    if epsilon is None:
        return "–"
    return f"{epsilon:.3g}" if math.isfinite(epsilon) else "∞"


def split_name(split: str) -> str:
    """A split's name in words."""
    return split.replace("_", " ")


def metric_name(metric: str) -> str:
    """A metric's name in words, as a heading begins."""
    name = metric.replace("_", " ")
    return name[:1].upper() + name[1:]


def metric_label(split: str, metric: str) -> str:
    """'Test accuracy (%)'."""
    label = f"{split_name(split).capitalize()} {metric.replace('_', ' ')}"
    return f"{label} (%)" if is_share(metric) else label
