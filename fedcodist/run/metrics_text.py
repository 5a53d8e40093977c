"""Metrics of all models as one line of text, for the progress line and the end of a run.

The metric is the accuracy, or the loss where nothing has an accuracy. Values are means over seeds.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# For more models than these, a line shows the mean and the extremes.
_MOST_MODELS = 6
_METRICS = ("accuracy", "loss")


def current_text(records: Iterable[Mapping[str, Any]]) -> str:
    """'held-out accuracy: small 83.1 % · large 79.9 %', of the first split of one round's evaluation.

    Args:
      records: metrics lines of the evaluation, without those of training.
    """
    by_split: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for record in records:
        models = by_split.setdefault(record["split"], {})
        metrics = models.setdefault(record["model"], {})
        for metric in _METRICS:
            if metric in record:
                metrics.setdefault(metric, []).append(record[metric])
    texts = (_split_text(split, models) for split, models in by_split.items())
    return next((text for text in texts if text), "")


def final_text(final: Mapping[str, Any], splits: Sequence[str]) -> str:
    """'test accuracy, mean of 3 seeds: small 83.1 %', or several such texts with semicolons.

    Args:
      final: `final` of a run's summary: model -> split -> metric -> values, one per seed.
      splits: those to show.
    """
    texts = []
    for split in splits:
        models = {model: of_splits.get(split, {}) for model, of_splits in final.items()}
        texts.append(_split_text(split, models, tells_seeds=True))
    return "; ".join(text for text in texts if text)


def _split_text(
    split: str,
    models: Mapping[str, Mapping[str, Sequence[float | None]]],
    tells_seeds: bool = False,
) -> str:
    """The text of one split; empty where no model has any of the metrics."""
    for metric in _METRICS:
        values = {model: metrics[metric] for model, metrics in models.items() if metric in metrics}
        if not values:
            continue
        seeds = max(map(len, values.values()))
        mean_of = f", mean of {seeds} seeds" if tells_seeds and seeds > 1 else ""
        means = {model: _mean(of_seeds) for model, of_seeds in values.items()}
        return f"{split.replace('_', '-')} {metric}{mean_of}: {_models_text(metric, means)}"
    return ""


def _models_text(metric: str, means: Mapping[str, float]) -> str:
    defined = [value for value in means.values() if math.isfinite(value)]
    if len(means) <= _MOST_MODELS or not defined:
        return " · ".join(f"{model} {_number(metric, mean)}" for model, mean in means.items())
    mean, least, most = statistics.fmean(defined), min(defined), max(defined)
    extremes = f"{_number(metric, least)} to {_number(metric, most)}"
    return f"mean of {len(defined)} models {_number(metric, mean)} ({extremes})"


def _mean(values: Sequence[float | None]) -> float:
    """The mean over the seeds; NaN where it is undefined in one, as precision without a prediction."""
    return statistics.fmean(math.nan if value is None else value for value in values)


def _number(metric: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"
