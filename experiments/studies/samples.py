"""Samples over seeds: final values of the runs with the same settings."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.config_files import config_of
from experiments.studies.settings import method_of, read_by_fed_avg, settings, without
from fedcodist.config.registry import BASELINE


class Term(NamedTuple):
    """One accuracy: a model of a run. Written '<experiment> <run> <model>' in data files."""

    experiment: str
    run: str
    model: str


class Sample(NamedTuple):
    """Final accuracies, or another metric, in %, one per seed, of runs with the same settings."""

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    rounds: int
    full_rounds: int
    records: tuple[Record, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over the seeds; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def is_short(self) -> bool:
        return self.rounds < self.full_rounds


class Curve(NamedTuple):
    """Mean accuracy in % by round, and its standard deviation over the seeds (0 for one seed)."""

    rounds: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]


def samples(
    records: Sequence[Record],
    experiment: str,
    run: str,
    model: str,
    split: str = "test",
    metric: str = "accuracy",
) -> list[Sample]:
    """A finished run's final accuracies, a sample for each of its settings, each seed once.

    The sample that tables show comes first. Samples with FedAvg runs of the same settings come before
    others, then those with most rounds, then those with the present settings of the config file, then
    those with most seeds, then the newest; accuracy is never a criterion.
    FedAvg's small model in Table 1 does not depend on the large model's pool, so its sample has all
    FedAvg runs.
    """
    alike = _alike(records, experiment, run, model)
    # Groups are ordered, not samples, so that both models in a table's cell are of the same run.
    if len(alike) > 1:
        alike = sorted(alike, key=lambda group: _preference(records, group), reverse=True)
    return [shown for group in alike if (shown := joined(group, model, split, metric))]


def in_any_order(records: Sequence[Record], experiment: str, run: str, model: str) -> list[Sample]:
    """What `samples` gives, without the time that their order takes."""
    alike = _alike(records, experiment, run, model)
    return [shown for group in alike if (shown := joined(group, model, "test"))]


def sample(
    records: Sequence[Record],
    experiment: str,
    run: str,
    model: str,
    split: str = "test",
    metric: str = "accuracy",
) -> Sample | None:
    """The sample that tables show; None if there is none."""
    return next(iter(samples(records, experiment, run, model, split, metric)), None)


def baseline(records: Iterable[Record], record: Record, model: str) -> Sample | None:
    """FedAvg's test accuracies with the run's values of all settings that both read; None if not run.

    Its runs are those of Table 1 and those of the run's own experiment.
    """
    wanted = read_by_fed_avg(record, model)
    equal = [
        other
        for other in records
        if other.experiment in (TABLE_1, record.experiment)
        and method_of(other) == BASELINE
        and read_by_fed_avg(other, model) == wanted
    ]
    return joined(_newest_first(equal), model, "test")


def joined(
    group: Sequence[Record], model: str, split: str, metric: str = "accuracy"
) -> Sample | None:
    """Joins the finished records of equal settings; of several with a seed the first is used.

    Seeds where the metric is undefined are left out.
    """
    values: dict[int, float] = {}
    used = []
    for record in group:
        metrics = record.final.get(model, {}).get(split)
        if metrics is None or metric not in metrics or not record.finished:
            continue
        by_seed = {
            s: v for s, v in zip(record.seeds, metrics[metric], strict=True) if v is not None
        }
        new = {seed: 100 * share for seed, share in by_seed.items() if seed not in values}
        values |= new
        used += [record] if new else []
    if not values:
        return None
    seeds = tuple(sorted(values))
    full_rounds = max(record.full_rounds for record in used)
    accuracies = tuple(values[seed] for seed in seeds)
    return Sample(accuracies, seeds, used[0].rounds, full_rounds, tuple(used))


def equal_but(one: Sample, other: Sample, varying: Sequence[str]) -> bool:
    """Whether their runs have the same settings, except those that match the patterns."""
    mine, theirs = (without(settings(sample.records[0]), varying) for sample in (one, other))
    return mine == theirs


def common_seeds(one: Sample, other: Sample) -> list[tuple[float, float]]:
    """The two values of each common seed, in the order of seeds."""
    mine, theirs = (dict(zip(sample.seeds, sample.values, strict=True)) for sample in (one, other))
    return [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """Records with the same experiment, run and settings together, of each group the newest first."""
    alike = _grouped(records, lambda record: [record.experiment, record.run, settings(record)])
    return [_newest_first(group) for group in alike]


def curve(
    records: Sequence[Record], experiment: str, run: str, model: str, split: str
) -> Curve | None:
    """Accuracies by round of the runs in `sample`'s choice, at the rounds that every seed has."""
    final = sample(records, experiment, run, model, split)
    if final is None:
        return None
    by_seed = []
    for seed in final.seeds:
        record = next(record for record in final.records if seed in record.seeds)
        points = record.curve.get(model, {}).get(split, {"round": [], "accuracy": []})
        index = record.seeds.index(seed)
        values = zip(points["round"], points["accuracy"], strict=True)
        by_seed.append(
            {at: 100 * shares[index] for at, shares in values if shares[index] is not None}
        )
    rounds = sorted(set.intersection(*(set(values) for values in by_seed)))
    columns = [[values[round] for values in by_seed] for round in rounds]
    deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in columns]
    if not rounds:
        return None
    return Curve(tuple(rounds), tuple(map(statistics.fmean, columns)), tuple(deviations))


def _alike(records: Sequence[Record], experiment: str, run: str, model: str) -> list[list[Record]]:
    """The records of a run's samples of a model, those of equal settings together."""
    candidates = _candidates(records, experiment, run, model)
    return _grouped(candidates, lambda record: settings(record, model))


def _candidates(records: Iterable[Record], experiment: str, run: str, model: str) -> list[Record]:
    """The finished records for a run's sample of a model, in order of preference."""
    any_pool = experiment == TABLE_1 and run.startswith(BASELINE) and model == "small"
    return _newest_first(
        record
        for record in records
        if record.experiment == experiment
        and (record.run == run or (any_pool and method_of(record) == BASELINE))
        and record.finished
        and model in record.final
    )


def _preference(
    records: Sequence[Record], group: Sequence[Record]
) -> tuple[bool, int, bool, int, str]:
    first = group[0]
    config = config_of(first.experiment, first.run)
    is_present = config is not None and settings(first._replace(config=config)) == settings(first)
    has_baselines = all(baseline(records, first, model) for model in first.final)
    seeds = {seed for record in group for seed in record.seeds}
    newest = max(record.date or "" for record in group)
    return has_baselines, first.rounds, is_present, len(seeds), newest


def _grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> list[list[Record]]:
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(json.dumps(key(record), sort_keys=True), []).append(record)
    return list(grouped.values())


def _newest_first(records: Iterable[Record]) -> list[Record]:
    """The newest first, but FedAvg's runs at 4,700 before all others: they give its small model."""
    newest = sorted(records, key=lambda record: record.date or "", reverse=True)
    return sorted(newest, key=lambda record: record.run != "fed_avg,4700")
