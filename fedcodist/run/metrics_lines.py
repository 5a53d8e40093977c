"""What a run writes down: a dictionary per evaluation, model, split and seed, and the summary."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcodist.core.model import Variables, parameter_count

Record = dict[str, Any]
# What of a record is no metric.
WHAT_IS_MEASURED = ("round", "model", "split", "seed")
# A round's metrics that say whether what a pool's clients sent is finite, and its model after the round.
FINITE = ("finite", "finite_model")


def evaluation_records(
    round: int, evaluation: Mapping[str, Any], seeds: np.ndarray
) -> list[Record]:
    """One per split, model and seed; `evaluation` is split -> model -> metric -> [seeds, ...]."""
    records = []
    for split, models in evaluation.items():
        for model, metrics in models.items():
            for index, seed in enumerate(seeds):
                record: Record = {
                    "round": round,
                    "model": model,
                    "split": split,
                    "seed": int(seed),
                }
                for name, values in metrics.items():
                    if name.endswith("_per_client"):
                        metric = name.removesuffix("_per_client")
                        record.setdefault("per_client", {}).update(_spread(metric, values[index]))
                    elif values[index].ndim:
                        metric = name.removesuffix("_per_label")
                        record[f"per_label_{metric}"] = _plain(values[index])
                    else:
                        record[name] = _plain(values[index])
                records.append(record)
    return records


def _spread(metric: str, values: np.ndarray) -> Record:
    """How a metric differs between the clients that have one."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:  # precision, where no client's model predicts the class
        values = np.array([np.nan])
    return {
        f"{metric}_mean": _plain(values.mean()),
        f"{metric}_p10": _plain(np.percentile(values, 10)),
        f"{metric}_min": _plain(values.min()),
    }


def training_records(
    round: int, history: Iterable[Mapping[str, np.ndarray]], seeds: np.ndarray
) -> list[Record]:
    """Means of the rounds' own metrics since the last evaluation, per pool.

    A metric that a round lacks, such as a codistillation's loss, is no number there and left out.
    """
    blocks = list(history)
    if not blocks:
        return []
    records: dict[tuple[str, int], Record] = {}
    for key in blocks[0]:
        pool, name = key.split("/", 1)
        values = np.concatenate([block[key] for block in blocks], axis=1).astype(np.float64)
        for index, seed in enumerate(seeds):
            record = records.setdefault(
                (pool, int(seed)),
                {"round": round, "model": pool, "split": "clients", "seed": int(seed)},
            )
            if name not in FINITE:
                record[name] = _plain(_over_rounds(values[index]))
    return list(records.values())


def _over_rounds(values: np.ndarray) -> np.ndarray:
    """Means over rounds, [rounds, ...], of those that have the metric; NaN where none has."""
    counted = ~np.isnan(values)
    number = counted.sum(axis=0)
    total = np.where(counted, values, 0).sum(axis=0)
    return np.where(number, total / np.maximum(number, 1), np.nan)


def accuracies(records: Iterable[Record]) -> dict[str, float]:
    """Each model's accuracy on the first split that has one, averaged over seeds."""
    first: dict[str, tuple[str, list[float]]] = {}
    for record in records:
        if record.get("accuracy") is not None:
            split, values = first.setdefault(record["model"], (record["split"], []))
            if split == record["split"]:
                values.append(record["accuracy"])
    return {model: float(np.mean(values)) for model, (_, values) in first.items()}


def summary_of(
    experiment: Any,
    records: Sequence[Record],
    variables: Mapping[str, Variables],
    seconds: float,
) -> dict[str, Any]:
    """summary.json: final numbers by model and split, parameters and bytes, the time it took.

    Args:
      experiment: the Experiment that was run.
      records: all of its records.
      variables: model -> trained Variables, leaves [seeds, ...].
      seconds: of all starts.
    """
    final: dict[str, Any] = {}
    for record in records:
        if record["round"] == experiment.rounds and "loss" in record:
            metrics = final.setdefault(record["model"], {}).setdefault(record["split"], {})
            for name, value in record.items():
                if name not in WHAT_IS_MEASURED and not isinstance(value, dict | list):
                    metrics.setdefault(name, []).append(value)
    return {
        "algorithm": experiment.algorithm.name,
        "rounds": experiment.rounds,
        "models": {
            name: {
                "parameters": parameter_count(variables[name].params) // experiment.seeds,
                "bytes_down_per_participation": _measured(
                    records, name, "client_bytes_down", communication.down
                ),
                "bytes_up_per_participation": _measured(
                    records, name, "client_bytes_up", communication.up
                ),
            }
            for name, communication in experiment.algorithm.communication.items()
        },
        "personal_models": {
            name: pool
            for pool, kept in experiment.algorithm.personal_models.items()
            for name in kept
        },
        "final": final,
        "seconds": round(seconds, 3),
        "finished": True,
    }


def _measured(records: Sequence[Record], model: str, metric: str, otherwise: int) -> int:
    """The mean over all rounds and seeds of a metric of training, where the method has it."""
    total = dict.fromkeys((record["seed"] for record in records), 0.0)
    before = dict.fromkeys(total, 0)
    for record in records:
        if record["model"] == model and metric in record:
            seed = record["seed"]
            # A record has the mean of the rounds since the one before.
            total[seed] += (record["round"] - before[seed]) * record[metric]
            before[seed] = record["round"]
    rounds = sum(before.values())
    return round(sum(total.values()) / rounds) if rounds else otherwise


def over_clients(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Metrics [seeds, clients, ...] of clients' own models: their means, and how they spread.

    A mean is over the models for which a metric is defined, but for the loss, which always is.
    """
    own = {name: each for name, each in metrics.items() if not name.endswith("_per_client")}
    spread = {f"{n}_per_client": each for n, each in own.items() if each.ndim == 2 and n != "loss"}
    return {name: _mean(each, name == "loss") for name, each in own.items()} | spread


def _mean(values: np.ndarray, of_all: bool) -> np.ndarray:
    """Over clients, [seeds, clients, ...]; of all or of those that are numbers, NaN for none."""
    counted = np.full(values.shape, True) if of_all else np.isfinite(values)
    number = counted.sum(axis=1)
    return np.where(
        number, np.where(counted, values, 0).sum(axis=1) / np.maximum(number, 1), np.nan
    )


def _plain(value: Any) -> Any:
    """JSON numbers; what is not finite becomes null."""
    value = np.asarray(value, np.float64)
    if value.ndim:
        return [_plain(each) for each in value]
    # Seven digits are what float32 holds.
    return float(f"{value:.7g}") if np.isfinite(value) else None
