"""The costs of a run: bytes, examples and FLOPs of its clients, by pool."""

import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedcodist.report.runs import TRAINING, Run, Series, mapping_of, number_of

if TYPE_CHECKING:
    from fedcodist.report.work import Flops

_WAYS = ("up", "down")


class Costs(NamedTuple):
    """What a whole run costs, per seed.

    Attributes:
      megabytes: pool, or party -> sent and received by its clients.
      examples: pool, or party -> number that its clients trained on, each counted as often as it was
        visited; NaN if unknown.
      flops: of the clients by pool, or party, and of the server; NaN if they are not counted.
    """

    megabytes: dict[str, float]
    examples: dict[str, float]
    flops: "Flops"


def costs_of_run(name: str, run: Run) -> Costs:
    """The costs of a finished run. A note is printed if its examples or FLOPs are unknown.

    Args:
      name: the run's name in notes.
      run: as `load_run` reads it.

    Raises:
      ValueError: the run has another config than the library's, or its files lack something.
    """
    config = run.config
    group = "parties" if "parties" in config else "pools"
    if not mapping_of(config, "evaluation") or not isinstance(config.get(group), dict):
        raise ValueError(
            f"{run.folder} was run without a config of the library: its costs are unknown."
        )
    sizes, rounds = run.summary["models"], run.summary["rounds"]
    try:
        clients, bytes_of = clients_per_round(config, sizes), bytes_per_round(config, sizes)
    except ValueError as error:
        raise ValueError(f"{run.folder}: its costs are unknown: {error}") from error
    megabytes = {pool: count * rounds / 1e6 for pool, count in bytes_of.items()}
    examples = dict.fromkeys(megabytes, 0.0)
    for model, of_client in _examples_of_client(name, run, clients).items():
        examples[pool_of(config, model)] += of_client * clients[model] * rounds
    return Costs(megabytes, examples, _flops(name, run, examples))


def _examples_of_client(name: str, run: Run, models: Iterable[str]) -> dict[str, float]:
    """Model -> examples that one of its clients trains on in a round, the mean over rounds and seeds.

    NaN, with a note, if clients count nothing.

    Raises:
      ValueError: metrics lines lack a model's examples.
    """
    examples = _mean_over_rounds(run, "client_examples")
    privacy = mapping_of(mapping_of(run.config, "training"), "privacy")
    if privacy.get("metrics") is False and not examples:
        reason = "training.privacy.metrics is False, so clients count nothing"
        print(f"note: {name}: client examples and FLOPs are left out: {reason}", file=sys.stderr)
        return dict.fromkeys(models, math.nan)
    for model in models:
        if model not in examples:
            raise ValueError(
                f"{run.folder}: metrics.jsonl has no client_examples of {model!r}, which rounds must "
                "return."
            )
    return {model: examples[model] for model in models}


def _flops(name: str, run: Run, examples: Mapping[str, float]) -> "Flops":
    """The run's FLOPs by its pools' examples; NaN, with a note, if they cannot be counted."""
    # Imported late because it imports JAX, so that a mistyped option is reported at once.
    from fedcodist.report.flops import flops_of_parties, flops_of_run
    from fedcodist.report.work import Flops

    rounds = run.summary["rounds"]
    # config.json lacks `execution`, which decides what teachers predict in streamed runs.
    config = run.config | {"execution": mapping_of(run.environment, "plan")}
    steps = next(iter(_mean_over_rounds(run, "distillation_steps").values()), None)
    try:
        if "parties" in config:
            return flops_of_parties(config, examples, rounds)
        # There are fewer rounds than the config has where a callback stopped the run.
        return flops_of_run(config | {"rounds": rounds}, examples, steps)
    except Exception as error:  # the table is useful without FLOPs
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"their count looks up {reason}, which is not set in the config"
        print(f"note: {name}: FLOPs are left out: {reason}", file=sys.stderr)
        return Flops(dict.fromkeys(examples, math.nan), math.nan)


def _mean_over_rounds(run: Run, metric: str) -> dict[str, float]:
    """Model -> mean of a metric over all rounds and seeds; NaN if it is always undefined."""
    values_of: dict[str, dict[int, list[float]]] = {}
    for series, records in run.records.items():
        for round, record in records.items():
            if metric in record:
                values = values_of.setdefault(series.model, {}).setdefault(round, [])
                # Undefined for rounds without clients, as Poisson cohorts may be.
                values += [] if record[metric] is None else [record[metric]]
    means = {}
    for model, by_round in values_of.items():
        ends = sorted(by_round)
        lines = list(zip(_rounds_of_lines(ends), (by_round[end] for end in ends), strict=True))
        counted = sum(rounds for rounds, values in lines if values)
        total = sum(rounds * statistics.fmean(values) for rounds, values in lines if values)
        means[model] = total / counted if counted else math.nan
    return means


def _rounds_of_lines(ends: Sequence[int]) -> list[int]:
    """How many rounds each metrics line describes: it has the mean since the previous line.

    Args:
      ends: the lines' rounds, in ascending order.
    """
    return np.diff([0, *ends]).tolist()


def clients_per_round(config: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    """The number of clients that train each model in a round.

    It is the cohort size of the model's pool, or the model's part of it if the pool has several models.
    A party's model has one client.

    Args:
      config: of the run.
      models: names of the models that clients train, in their order, without ensembles.

    Raises:
      ValueError: the config has another form than the library's, as one that was given from Python may.
    """
    names, pools = list(models), mapping_of(config, "pools")
    if "parties" in config:
        return dict.fromkeys(names, 1)
    cohorts = {pool: mapping_of(pools, pool).get("cohort_size", 0) for pool in pools}
    for pool, size in cohorts.items():
        if not isinstance(size, int):
            raise ValueError(f"pools.{pool}.cohort_size must be a number of clients, got {size!r}.")
    sizes = mapping_of(config, "algorithm").get("group_sizes") if len(cohorts) == 1 else None
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != len(names)):
        raise ValueError(
            f"algorithm.group_sizes must be {len(names)} numbers, one for each model, got {sizes!r}."
        )
    counts = dict.fromkeys(names, 0)
    for pool, cohort in cohorts.items():
        of_pool = [name for name in names if pool_of(config, name) == pool]
        counts |= zip(of_pool, sizes or _even(cohort, len(of_pool)), strict=True)
    return counts


def _even(cohort: int, groups: int) -> list[int]:
    """The sizes of groups that divide a cohort; the first ones get more."""
    return [cohort // groups + (place < cohort % groups) for place in range(groups)]


def pool_of(config: Mapping[str, Any], model: str) -> str:
    """The pool whose clients train a model: the only pool, or the one in the model's name.

    Personal models have the name of their pool and an ending, such as `large_teachers`.
    """
    pools = list(mapping_of(config, "pools"))
    if len(pools) == 1:
        return pools[0]
    keepers = [pool for pool in pools if model.startswith(f"{pool}_")]
    return model if model in pools or not keepers else max(keepers, key=len)


def pools_of(config: Mapping[str, Any], model: str, pools: Collection[str]) -> list[str]:
    """The pools, or parties, whose costs are a model's: its own, or all if it belongs to none of them.

    All of them work for a model of the server, such as an ensemble.

    Args:
      config: of the run.
      model: its name.
      pools: all pools, or parties, whose costs are known.
    """
    pool = pool_of(config, model)
    return [pool] if pool in pools else list(pools)


def bytes_per_round(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, int]:
    """Pool -> bytes that its clients send and receive in a round.

    Args:
      config: of the run.
      sizes: `models` in the run's summary.

    Raises:
      ValueError: as `clients_per_round` does.
    """
    total: dict[str, int] = {}
    for model, clients in clients_per_round(config, sizes).items():
        participation = sum(sizes[model][f"bytes_{way}_per_participation"] for way in _WAYS)
        pool = pool_of(config, model)
        total[pool] = total.get(pool, 0) + participation * clients
    return total


def bytes_after(run: Run, seed: int, rounds: Sequence[int]) -> dict[str, np.ndarray]:
    """Pool -> bytes that its clients have sent and received after each of the rounds, float [rounds].

    Where a method measures its bytes, they are those of the metrics lines, which may change over the
    rounds. Otherwise every round has as many as `bytes_per_round` says.

    Args:
      run: a finished one.
      seed: as in its metrics lines.
      rounds: in ascending order, at least one.

    Raises:
      ValueError: as `clients_per_round` does.
    """
    sizes = mapping_of(run.summary, "models")
    total: dict[str, np.ndarray] = {}
    for model, clients in clients_per_round(run.config, sizes).items():
        lines = run.records.get(Series(model, TRAINING, seed), {})
        ends = sorted(lines)
        ends += [rounds[-1]] if rounds[-1] > max(ends, default=0) else []
        participation = [_participation(lines.get(end, {}), sizes[model]) for end in ends]
        exchanged = clients * np.cumsum(np.multiply(_rounds_of_lines(ends), participation))
        pool = pool_of(run.config, model)
        total[pool] = total.get(pool, 0) + np.interp(rounds, [0, *ends], [0, *exchanged])
    return total


def _participation(line: Mapping[str, Any], sizes: Mapping[str, Any]) -> float:
    """Bytes of a participation by a metrics line, or by the summary where the line does not say them."""
    total = 0.0
    for way in _WAYS:
        measured = number_of(line, f"client_bytes_{way}")
        if measured is None or math.isnan(measured):  # it is null if a Poisson cohort was empty
            measured = sizes[f"bytes_{way}_per_participation"]
        total += measured
    return total
