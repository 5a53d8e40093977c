"""Reads what runs are ranked by: each model's quality and costs, with all seeds of a method together."""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcodist.config.registry import method_of
from fedcodist.core.metric_kinds import is_share
from fedcodist.report.collection import Method
from fedcodist.report.costs import Costs, costs_of_run, pools_of
from fedcodist.report.data_of_runs import DataOfRun, data_of
from fedcodist.report.runs import Run, epsilon_of, first_seed, largest_epsilon, mapping_of

ALL_PARTIES = "all parties"


class Entry(NamedTuple):
    """One model, or ensemble, of one run; costs are per seed.

    Attributes:
      run, model: their names.
      values: the accuracy or another metric after the last round, one per seed; shares are in %. NaN if
        undefined, such as precision without a prediction.
      seeds: the seeds' numbers, in the same order.
      split: the split on which it was measured.
      megabytes: sent and received in the whole run by the model's clients. These are all clients of its
        pool, even if the pool is divided among several models, or the model's party. For a model that
        parties or pools share, such as the server's, they are those of all.
      examples: number that these clients trained on, each counted as often as it was visited.
      client_flops: FLOPs of these clients; NaN if they are not counted.
      server_flops: FLOPs of the server.
      seconds: time of the whole run, all seeds.
      seconds_per_round: of all seeds together, without compilation and evaluation; NaN if unknown.
      shared: for a personal model, the name of the model that clients share. A fine-tuned personal model
        has the name of the fine-tuned shared model, which the run may lack.
      head: the auxiliary head that was measured; None for the main head, or a model without heads.
      num_models: number of models of which this is the mean.
      stopped_on_test_data: whether phases before the first round stopped on test data.
      epsilon: the largest of any client; infinite without noise, None if no method is private.
      data: seed -> what the run folder says of its data; seeds may divide the data in other ways.
      run_examples: number that all clients of the run trained on; NaN if unknown.
    """

    run: str
    model: str
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    split: str
    megabytes: float
    examples: float
    client_flops: float
    server_flops: float
    seconds: float
    seconds_per_round: float
    shared: str | None = None
    head: int | None = None
    num_models: int = 1
    stopped_on_test_data: bool = False
    epsilon: float | None = None
    data: Mapping[int, DataOfRun] = {}
    run_examples: float = math.nan


class UnknownMetric(ValueError):
    """A run does not have the metric."""


def read_run(
    name: str, run: Run, metric: str = "accuracy", split: str | None = None
) -> list[Entry]:
    """All models of a finished run, on one split.

    Args:
      name: the run's name in the ranking.
      run: as `load_run` reads it.
      metric: its name in metrics lines.
      split: such as `client_test`; by default the first of the final splits.

    Raises:
      UnknownMetric: the run has no model with this metric.
      ValueError: the run is unfinished, was not measured on the split, or its files lack something.
    """
    # Imported late because it imports JAX, so that a mistyped option is reported at once.
    from fedcodist.core.method import PARTIES

    if not run.finished:
        raise ValueError(f"{run.folder} holds no finished run.")
    costs = costs_of_run(name, run)
    entries = _entries(name, run, metric, _checked_split(name, run, split), costs)
    if "parties" not in run.config:
        return entries
    parties = costs.examples
    if {entry.model for entry in entries} == {PARTIES}:  # each was evaluated on its own examples
        return [e._replace(model=ALL_PARTIES, num_models=len(parties)) for e in entries]
    heads = dict.fromkeys(entry.head for entry in entries if entry.model in parties)
    means = [_all_parties([e for e in entries if e.head == head], parties) for head in heads]
    return [*means, *entries]


def _checked_split(name: str, run: Run, split: str | None) -> str:
    """The split, or by default the first of the final splits. Raises ValueError for an unknown one."""
    known = list(dict.fromkeys(itertools.chain(*run.summary["final"].values())))
    if split not in (None, *known):
        raise ValueError(f"--split must be one of {known} for {name}, got {split!r}.")
    evaluation = mapping_of(run.config, "evaluation")
    final_splits = evaluation.get("final_splits") or evaluation.get("splits") or ()
    # Where only clients' own examples are evaluated, the splits are theirs.
    return split or next(iter(final_splits), None) or known[0]


def _entries(name: str, run: Run, metric: str, split: str, costs: Costs) -> list[Entry]:
    """The run's models with their costs, and again by the last head of models with heads.

    Raises:
      UnknownMetric: no model has the metric.
    """
    config, summary = run.config, run.summary
    last_head = mapping_of(config, "parties").get("heads")
    shared_of = _shared_models(summary)
    stopping = (config.get("phases") or {}).get("stopping")
    scale = 100 if is_share(metric) else 1
    entries = []
    measured: dict[str, None] = {}
    for model, splits in summary["final"].items():
        values = splits.get(split, {})
        measured |= dict.fromkeys(values)
        pools = pools_of(config, model, costs.examples)
        for key, head in ((metric, None), (f"{metric}_head_{last_head}", last_head)):
            if key not in values:
                continue
            # Undefined values are null.
            of_seeds = [math.nan if value is None else scale * value for value in values[key]]
            seeds = _seeds(run, len(of_seeds))
            entries.append(
                Entry(
                    run=name,
                    model=model,
                    values=tuple(of_seeds),
                    seeds=seeds,
                    split=split,
                    megabytes=sum(costs.megabytes[pool] for pool in pools),
                    examples=sum(costs.examples[pool] for pool in pools),
                    client_flops=sum(costs.flops.clients[pool] for pool in pools),
                    server_flops=costs.flops.server,
                    seconds=summary["seconds"],
                    # Run folders of earlier versions do not have this time.
                    seconds_per_round=summary.get("seconds_per_round") or math.nan,
                    shared=shared_of.get(model),
                    head=head,
                    stopped_on_test_data=stopping == "test_data",
                    epsilon=epsilon_of(summary),
                    data=dict.fromkeys(seeds, data_of(run, split)),
                    run_examples=sum(costs.examples.values()),
                )
            )
    if not entries:
        raise unknown_metric(metric, list(measured), name)
    return entries


def _seeds(run: Run, count: int) -> tuple[int, ...]:
    """Those of the metrics lines; if these count seeds from 0, the config's."""
    first = first_seed(run.config)
    found = sorted({series.seed for series in run.records})
    is_absolute = len(found) == count and found[0] >= first
    return tuple(found) if is_absolute else tuple(range(first, first + count))


def _shared_models(summary: Mapping[str, Any]) -> dict[str, str]:
    """Personal model -> the model that clients share, also for both after fine-tuning."""
    from fedcodist.core.method import FINE_TUNED

    shared_of = summary.get("personal_models", {})
    return shared_of | {
        f"{personal}{FINE_TUNED}": f"{shared}{FINE_TUNED}" for personal, shared in shared_of.items()
    }


def _all_parties(entries: Sequence[Entry], parties: Collection[str]) -> Entry:
    """The mean over parties of their values, seed by seed, and the sum of their costs."""
    of_parties = [entry for entry in entries if entry.model in parties]
    values = zip(*(entry.values for entry in of_parties), strict=True)
    return of_parties[0]._replace(
        model=ALL_PARTIES,
        values=tuple(map(statistics.fmean, values)),
        megabytes=sum(entry.megabytes for entry in of_parties),
        examples=sum(entry.examples for entry in of_parties),
        client_flops=sum(entry.client_flops for entry in of_parties),
        num_models=len(of_parties),
    )


def unknown_metric(metric: str, names: Sequence[str], run: str) -> UnknownMetric:
    """The error, whose message lists the run's metrics."""
    return UnknownMetric(f"--metric must be one of {names} for {run}, got {metric!r}.")


def read_methods(
    methods: Sequence[Method], metric: str = "accuracy", split: str | None = None
) -> tuple[list[Entry], list[ValueError]]:
    """The models of all methods with finished runs, and the reasons why others are left out.

    Runs that differ only in their seed are one method. It has the name of its run, or a longer name if
    several methods would have the same.

    Args:
      methods: from `collect`.
      metric, split: as in `read_run`.

    Raises:
      ValueError: nothing is left.
    """
    names = [
        str(method.runs[0].config.get("run") or method_of(method.runs[0].config))
        for method in methods
    ]
    entries: list[Entry] = []
    without: list[ValueError] = []
    for name, method in zip(names, methods, strict=True):
        name = name if names.count(name) == 1 else method.label
        # A run contains dictionaries, so it has no hash.
        runs = {run.folder: run for run, _ in method.members}
        try:
            entries += _over_runs([read_run(name, run, metric, split) for run in runs.values()])
        except ValueError as error:
            without.append(error)
    if not entries:
        raise without[0]
    return entries, without


def _over_runs(runs: Sequence[Sequence[Entry]]) -> list[Entry]:
    """The entries of runs that differ only in their seed as one; a repeated seed counts once."""
    joined: dict[tuple[str, int | None], list[Entry]] = {}
    for entries in runs:
        for entry in entries:
            joined.setdefault((entry.model, entry.head), []).append(entry)
    return [_over_seeds(entries) for entries in joined.values()]


def _over_seeds(entries: Sequence[Entry]) -> Entry:
    value_of: dict[int, float] = {}
    counted = []  # how many seeds of each entry
    for entry in entries:
        before = len(value_of)
        for seed, value in zip(entry.seeds, entry.values, strict=True):
            value_of.setdefault(seed, value)
        counted.append(len(value_of) - before)

    def mean(values: Iterable[float]) -> float:
        pairs = zip(counted, values, strict=True)
        return sum(seeds * value for seeds, value in pairs if seeds) / len(value_of)

    def total(seconds: Iterable[float]) -> float:
        triples = zip(counted, entries, seconds, strict=True)
        return sum(seeds / len(entry.seeds) * time for seeds, entry, time in triples if seeds)

    return entries[0]._replace(
        values=tuple(value_of.values()),
        seeds=tuple(value_of),
        # As above, the first entry with a seed counts.
        data={seed: data for entry in reversed(entries) for seed, data in entry.data.items()},
        megabytes=mean(entry.megabytes for entry in entries),
        examples=mean(entry.examples for entry in entries),
        run_examples=mean(entry.run_examples for entry in entries),
        client_flops=mean(entry.client_flops for entry in entries),
        server_flops=mean(entry.server_flops for entry in entries),
        seconds=total(entry.seconds for entry in entries),
        seconds_per_round=total(entry.seconds_per_round for entry in entries),
        epsilon=largest_epsilon(entry.epsilon for entry in entries),
    )
