"""Metrics of each client: metrics lines of their distribution over clients, and the file clients.npz."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcodist.core.files import write_atomically
from fedcodist.core.metric_kinds import lower_is_better

CLIENTS = "clients.npz"
# Endings of a metric's names in lines of client splits.
OVER_CLIENTS = ("_weighted", "_std", "_min", "_p10", "_worst_tenth")
NOT_METRICS = _INDEX, _EXAMPLES = "client", "examples"  # the other arrays of clients.npz


class ClientMetrics(NamedTuple):
    """The metrics of one model on a split, client by client.

    Attributes:
      clients: int32 [clients], indices of the measured clients, ascending.
      examples: int64 [clients], number of each client's test examples.
      metrics: name -> [seeds, clients]; the loss is one of them.
    """

    clients: np.ndarray
    examples: np.ndarray
    metrics: dict[str, np.ndarray]


ClientEvaluation = Mapping[str, Mapping[str, ClientMetrics]]  # split -> model -> ClientMetrics


def client_records(
    round: int, evaluation: ClientEvaluation, seeds: np.ndarray
) -> list[dict[str, Any]]:
    """Metrics lines of an evaluation of clients.

    A metric is its mean over clients. For every metric but the loss there are also `<metric>_weighted`,
    the mean weighted by clients' numbers of test examples, `<metric>_std`, `_min`, `_p10`, the 10th
    percentile, and `_worst_tenth`, the mean over the tenth of clients with the lowest values, or with
    the highest ones where lower values of the metric are better.
    """
    return [
        {
            "round": round,
            "model": model,
            "split": split,
            "seed": int(seed),
            "clients": len(measured.clients),
            **{
                name: value
                for metric, values in measured.metrics.items()
                if values.ndim == 2
                for name, value in _over_clients(metric, values[index], measured.examples).items()
            },
        }
        for split, models in evaluation.items()
        for model, measured in models.items()
        for index, seed in enumerate(seeds)
    ]


def spread(metric: str, values: np.ndarray) -> dict[str, float]:
    """A metric over clients, NaN left out: standard deviation, minimum, 10th percentile, worst tenth."""
    values = np.sort(values[np.isfinite(values)].astype(np.float64))
    if not values.size:  # precision, where no client's model predicts the class
        values = np.array([np.nan])
    tenth = -(-values.size // 10)
    worst = values[-tenth:] if lower_is_better(metric) else values[:tenth]
    return {
        "std": float(values.std()),
        "min": float(values[0]),
        "p10": float(np.percentile(values, 10)),
        "worst_tenth": float(worst.mean()),
    }


def save_clients(path: Path, round: int, evaluation: ClientEvaluation) -> None:
    """Writes every client's metrics: `<split>/<model>/<metric>` [seeds, clients], in one step.

    Beside them are `<split>/<model>/client`, the clients' indices, `<split>/<model>/examples`, how many
    examples each was measured on, and `round`.
    """
    arrays: dict[str, Any] = {"round": np.int64(round)}
    for split, models in evaluation.items():
        for model, measured in models.items():
            arrays[f"{split}/{model}/{_INDEX}"] = measured.clients
            arrays[f"{split}/{model}/{_EXAMPLES}"] = measured.examples
            for metric, values in measured.metrics.items():
                arrays[f"{split}/{model}/{metric}"] = values
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())


def load_clients(path: Path) -> dict[str, dict[str, ClientMetrics]]:
    """Reads what `save_clients` wrote; nothing where there is no file.

    Raises:
      ValueError: names the file that is damaged.
    """
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name != "round"}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    evaluation: dict[str, dict[str, ClientMetrics]] = {}
    for name in arrays:
        if name.count("/") != 2:
            raise ValueError(f"{path} is damaged: it has an array {name!r}.")
        split, model, metric = name.split("/")
        models = evaluation.setdefault(split, {})
        if model not in models:
            clients, examples = (f"{split}/{model}/{part}" for part in (_INDEX, _EXAMPLES))
            if clients not in arrays or examples not in arrays:
                raise ValueError(f"{path} is damaged: {split}/{model} has no clients or examples.")
            models[model] = ClientMetrics(arrays[clients], arrays[examples], {})
        if metric not in (_INDEX, _EXAMPLES):
            models[model].metrics[metric] = arrays[name]
    return evaluation


def _over_clients(metric: str, values: np.ndarray, examples: np.ndarray) -> dict[str, Any]:
    names = [metric, *(metric + ending for ending in OVER_CLIENTS if metric != "loss")]
    is_defined = np.isfinite(values)
    # The loss is defined for all clients. If it is not finite for one of them, its model has diverged.
    if not is_defined.any() or (metric == "loss" and not is_defined.all()):
        return dict.fromkeys(names)
    defined, weights = values[is_defined].astype(np.float64), examples[is_defined]
    means = {metric: float(defined.mean())}
    if metric != "loss":
        means[f"{metric}_weighted"] = float(np.average(defined, weights=weights))
        means |= {f"{metric}_{name}": value for name, value in spread(metric, defined).items()}
    return {name: float(f"{value:.7g}") for name, value in means.items()}  # float32's digits
