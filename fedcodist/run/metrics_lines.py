"""Metrics lines, a dictionary per evaluation, model, split and seed, and a run's summary."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.run.client_metrics import OVER_CLIENTS, spread

Record = dict[str, Any]
# The keys of a metrics line that are not metrics.
WHAT_IS_MEASURED = ("round", "model", "split", "seed")
# Names that no metric may have: what lines have beside metrics, and endings of derived metrics.
_TAKEN = ("clients", "epsilon", "per_client", *WHAT_IS_MEASURED)
_ENDINGS = ("_per_client", "_per_label", "_mean", *OVER_CLIENTS)
TRAINING = "clients"  # the split of training's metrics lines
# Metrics of a round: whether a pool's updates are finite, and whether its model after the round is.
FINITE = ("finite", "finite_model")


def check_metric_name(where: str, name: str) -> None:
    """Raises ValueError if metrics lines use the name as a key.

    Args:
      where: what the message names.
      name: a metric's.
    """
    if name.endswith(_ENDINGS):
        raise ValueError(f"{where} must have a name that ends in none of {_ENDINGS}.")
    if name in _TAKEN or "/" in name:
        raise ValueError(f"{where} must have a name without '/' that is none of {_TAKEN}.")


def evaluation_records(
    round: int, evaluation: Mapping[str, Any], seeds: np.ndarray
) -> list[Record]:
    """Metrics lines of an evaluation, which is split -> model -> metric -> [seeds, ...].

    Values per label are left out where all are NaN; see `evaluation.evaluate`.
    """
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
                        if not np.isnan(values[index]).all():
                            record[f"per_label_{metric}"] = _plain(values[index])
                    else:
                        record[name] = _plain(values[index])
                records.append(record)
    return records


def _spread(metric: str, values: np.ndarray) -> Record:
    """A metric's mean and spread over the clients for which it is defined."""
    defined = values[np.isfinite(values)].astype(np.float64)
    mean = defined.mean() if defined.size else np.nan
    return {
        f"{metric}_mean": _plain(mean),
        **{f"{metric}_{name}": _plain(value) for name, value in spread(metric, values).items()},
    }


def training_records(
    round: int, history: Iterable[Mapping[str, np.ndarray]], seeds: np.ndarray
) -> list[Record]:
    """Metrics lines of training: means over the rounds since the last evaluation, per pool.

    Rounds without a metric, such as a codistillation's loss, have NaN and are left out of its mean.
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
                {"round": round, "model": pool, "split": TRAINING, "seed": int(seed)},
            )
            if name not in FINITE:
                record[name] = _plain(_over_rounds(values[index]))
    return list(records.values())


def _over_rounds(values: np.ndarray) -> np.ndarray:
    """Means of values [rounds, ...] over the rounds that are not NaN; NaN where all are."""
    counted = ~np.isnan(values)
    number = counted.sum(axis=0)
    total = np.where(counted, values, 0).sum(axis=0)
    return np.where(number, total / np.maximum(number, 1), np.nan)


def scalars(record: Record) -> dict[str, float]:
    """`<model>/<split>/<metric>` -> value, of all finite scalars of a metrics line, for loggers.

    A split's spread over clients has `per_client/<metric>_<statistic>` as the metric.
    """
    where = f"{record['model']}/{record['split']}"
    over_clients = {f"per_client/{name}": v for name, v in record.get("per_client", {}).items()}
    return {
        f"{where}/{name}": value
        for name, value in (record | over_clients).items()
        if isinstance(value, float)
    }


def summary_of(
    experiment: Any,
    records: Sequence[Record],
    variables: Mapping[str, Variables],
    seconds: float,
    seconds_per_round: float | None,
    last_round: int,
    stopped: str = "",
) -> dict[str, Any]:
    """The content of summary.json: final metrics by model and split, parameters, bytes and seconds.

    Args:
      experiment: the Experiment that was run.
      records: all metrics lines of the run.
      variables: model -> trained Variables, leaves [seeds, ...].
      seconds: run time, summed over all starts of the run.
      seconds_per_round: of all seeds together, without compilation and evaluation; None if no round
        was timed.
      last_round: the experiment's rounds, or the round in which a callback stopped the run.
      stopped: why it was stopped; empty if it was not.
    """
    return {
        "algorithm": experiment.algorithm.name,
        "rounds": last_round,
        **({"stopped": {"round": last_round, "why": stopped}} if stopped else {}),
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
            for pool, models in experiment.algorithm.personal_models.items()
            for name in models
        },
        "final": final_metrics(records, last_round),
        "seconds": round(seconds, 3),
        "seconds_per_round": seconds_per_round and float(f"{seconds_per_round:.4g}"),
        "finished": True,
    }


def final_metrics(records: Iterable[Record], round: int) -> dict[str, Any]:
    """Model -> split -> metric -> one value per seed, of the evaluation after a round."""
    final: dict[str, Any] = {}
    for record in records:
        if record["round"] == round and record["split"] != TRAINING and "loss" in record:
            metrics = final.setdefault(record["model"], {}).setdefault(record["split"], {})
            for name, value in record.items():
                if name not in WHAT_IS_MEASURED and not isinstance(value, dict | list):
                    metrics.setdefault(name, []).append(value)
    return final


def _measured(records: Sequence[Record], model: str, metric: str, otherwise: int) -> int:
    """A training metric's mean over rounds and seeds; `otherwise` if the method lacks the metric.

    Lines in which it is null are left out: in one of their rounds a Poisson cohort was empty.
    """
    total, rounds = 0.0, 0
    before = dict.fromkeys((record["seed"] for record in records), 0)
    for record in records:
        if record["model"] == model and metric in record:
            # A metrics line has the mean of the rounds since the line before.
            since = record["round"] - before[record["seed"]]
            before[record["seed"]] = record["round"]
            if record[metric] is not None:
                total, rounds = total + since * record[metric], rounds + since
    return round(total / rounds) if rounds else otherwise


def over_clients(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Means over clients of personal models' metrics [seeds, clients, ...], and `<metric>_per_client`.

    A mean is over the models for which the metric is defined; the loss is defined for all.
    """
    overall = {name: values for name, values in metrics.items() if not name.endswith("_per_client")}
    per_client = {
        f"{name}_per_client": values
        for name, values in overall.items()
        if values.ndim == 2 and name != "loss"
    }
    return {name: _mean(values, name == "loss") for name, values in overall.items()} | per_client


def _mean(values: np.ndarray, of_all: bool) -> np.ndarray:
    """The mean of values [seeds, clients, ...] over all clients, or over those with finite values."""
    counted = np.full(values.shape, True) if of_all else np.isfinite(values)
    number = counted.sum(axis=1)
    return np.where(
        number, np.where(counted, values, 0).sum(axis=1) / np.maximum(number, 1), np.nan
    )


def _plain(value: Any) -> Any:
    """Values as JSON numbers, null where they are not finite."""
    value = np.asarray(value, np.float64)
    if value.ndim:
        return [_plain(entry) for entry in value]
    # float32 has seven digits.
    return float(f"{value:.7g}") if np.isfinite(value) else None
