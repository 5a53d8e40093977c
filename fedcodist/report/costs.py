"""The costs of rounds by a run's config: clients per model, bytes per pool."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcodist.report.collection import TRAINING
from fedcodist.report.runs import Run, Series, mapping_of, number_of

_WAYS = ("up", "down")


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
        # A metrics line has the mean over the rounds since the line before.
        since = np.diff([0, *ends])
        participation = [_participation(lines.get(end, {}), sizes[model]) for end in ends]
        exchanged = clients * np.cumsum(since * participation)
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
