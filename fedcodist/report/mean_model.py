"""The mean over the models of many parties, for plots: a panel for each of them would be too many."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedcodist.report.collection import Collection, Method
from fedcodist.report.runs import TRAINING, Run, Series

MOST_MODELS = 8  # more than these are averaged
_MEAN = "mean of"


def with_mean_model(collection: Collection) -> Collection:
    """The collection or, if it has more than `MOST_MODELS`, one with the mean of the trained ones.

    The model `mean of N models` stands for those that clients train, one for each party. Models that the
    server alone has, such as an ensemble, stay. A line of the mean has the metrics that all of a run's
    trained models have in this round.
    """
    if len(collection.models) <= MOST_MODELS:
        return collection
    runs = [run for method in collection.methods for run in method.runs]
    trained = {series.model for run in runs for series in run.records if series.split == TRAINING}
    trained &= set(collection.models)
    trained = trained or set(collection.models)
    name = f"{_MEAN} {len(trained)} models"
    averaged = {id(run): _averaged(run, trained, name) for run in runs}

    def of_method(method: Method) -> Method:
        return method._replace(
            runs=tuple(averaged[id(run)] for run in method.runs),
            members=tuple((averaged[id(run)], seed) for run, seed in method.members),
        )

    others = tuple(model for model in collection.models if model not in trained)
    return collection._replace(
        methods=tuple(map(of_method, collection.methods)), models=(name, *others)
    )


def panel_title(model: str) -> str:
    """The title of the panel of a model; names such as `global_model` say already what it is."""
    return model if "model" in model else f"{model} model"


def _averaged(run: Run, trained: set[str], name: str) -> Run:
    """The run whose trained models are replaced by one of this name, their mean."""
    # Lines of training stay: they have the bytes of each party, which may differ.
    records = {
        series: lines
        for series, lines in run.records.items()
        if series.model not in trained or series.split == TRAINING
    }
    grouped: dict[tuple[str, int], list[dict[int, dict[str, Any]]]] = {}
    for series, lines in run.records.items():
        if series.model in trained:
            grouped.setdefault((series.split, series.seed), []).append(lines)
    for (split, seed), of_models in grouped.items():
        common = set.intersection(*(set(lines) for lines in of_models))
        records[Series(name, split, seed)] = {
            round: _mean_line([lines[round] for lines in of_models]) for round in sorted(common)
        }
    return run._replace(records=records)


def _mean_line(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each number and each list of numbers that all lines have."""
    common = [name for name in lines[0] if all(name in line for line in lines)]
    means: dict[str, Any] = {}
    for name in common:
        values = [line[name] for line in lines]
        if all(isinstance(value, list) for value in values):
            if len({len(value) for value in values}) == 1:
                means[name] = [_mean(items) for items in zip(*values, strict=True)]
        elif all(value is None or _is_number(value) for value in values):
            means[name] = _mean(values)
    return means


def _mean(values: Sequence[Any]) -> float | None:
    """The mean of the values that are defined; None, JSON's null, if none is."""
    defined = [value for value in values if _is_number(value) and math.isfinite(value)]
    return statistics.fmean(defined) if defined else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
