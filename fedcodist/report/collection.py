"""Groups runs that differ only in their seed into methods, with means and deviations over the seeds."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedcodist.config.registry import METHOD_NAMES, load_methods, method_of
from fedcodist.report.runs import (
    TRAINING,
    Run,
    Series,
    find_run_folders,
    first_seed,
    load_run,
    mapping_of,
    number_of,
)
from fedcodist.report.settings import differing_settings, distinct, settings_of_run

ACCURACY = "accuracy"
# Numbers of metrics lines that are no metrics.
_NO_METRICS = ("round", "model", "split", "seed", "clients", "epsilon")


class Statistic(NamedTuple):
    """Mean and sample standard deviation (None for a single seed) over the seeds."""

    mean: float
    spread: float | None
    seeds: int


class Curve(NamedTuple):
    """A metric by round, for the rounds at which every seed has it."""

    rounds: tuple[int, ...]
    statistics: tuple[Statistic, ...]


class Method(NamedTuple):
    """Runs with the same settings; `members` are the (run, seed) that are averaged, each seed once."""

    label: str
    runs: tuple[Run, ...]
    members: tuple[tuple[Run, int], ...]
    finished: bool


class Collection(NamedTuple):
    """The contents of a report; `splits` are those with the metric that the report shows."""

    methods: tuple[Method, ...]
    models: tuple[str, ...]
    splits: tuple[str, ...]
    notes: tuple[str, ...]
    metric: str = ACCURACY


def collect(paths: Iterable[Path | str], metric: str | None = None) -> Collection:
    """Loads every run in or below `paths` and groups those that differ only in their seed.

    If a method has finished runs, only these are averaged, so means never mix runs of different lengths.

    Args:
      paths: run folders or folders above.
      metric: what the report shows. By default the accuracy or, if no run has one, the first metric that
        is no loss, or the loss.

    Raises:
      ValueError: a path does not exist, no run with an evaluation is found, or none has the metric.
    """
    searched = [Path(path) for path in paths]
    notes: list[str] = []
    runs = []
    for folder in find_run_folders(searched, notes):
        try:
            run = load_run(folder)
        except ValueError as error:
            notes.append(f"{error}; skipped")
            continue
        notes.extend(run.notes)
        if any(_accuracy_or_loss(record) for record in run.records.values()):
            runs.append(run)
        else:
            notes.append(f"{folder} has no evaluation yet; skipped")
    if not runs:
        places = ", ".join(map(str, searched))
        reasons = "".join(f" ({note})" for note in notes[:1])
        raise ValueError(f"no run with an evaluation in or below {places}{reasons}")
    names = _metrics(runs)
    if metric not in (None, *names):
        raise ValueError(f"--metric must be one of {names}, got {metric!r}.")
    metric = metric or next(iter(names), ACCURACY)
    methods = _group(runs, notes)
    return Collection(methods, _models(runs), _splits(runs, metric), tuple(notes), metric)


def _accuracy_or_loss(records: Mapping[int, Mapping[str, Any]]) -> bool:
    return any("accuracy" in record or "loss" in record for record in records.values())


def _group(runs: Sequence[Run], notes: list[str]) -> tuple[Method, ...]:
    _register_methods(runs, notes)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(settings_of_run(run), sort_keys=True), []).append(run)
    ranks = {name: rank for rank, name in enumerate(METHOD_NAMES)}
    ordered = sorted(
        groups.values(), key=lambda group: ranks.get(method_of(group[0].config), len(ranks))
    )
    labels = _labels([group[0] for group in ordered])
    return tuple(_method(label, group, notes) for label, group in zip(labels, ordered, strict=True))


def _register_methods(runs: Sequence[Run], notes: list[str]) -> None:
    """Imports the modules that register the runs' own methods, whose titles the tables have."""
    of_runs = [run.config.get("methods") for run in runs]
    for modules in distinct(tuple(of_run) for of_run in of_runs if isinstance(of_run, list)):
        try:
            load_methods({"methods": modules})
        except ValueError as error:
            notes.append(f"tables have names in place of titles: {error}")


def _labels(of_methods: Sequence[Run]) -> list[str]:
    """A label for a run of each method: its name, and that of the run where configs have run names.

    Without run names, the settings in which runs of one method differ are added.
    """
    labels = []
    configs = [run.config for run in of_methods]
    for method_run in of_methods:
        config = method_run.config
        name = method_of(config)
        same = [settings_of_run(other) for other in of_methods if method_of(other.config) == name]
        settings = settings_of_run(method_run)
        differences = differing_settings(settings, same)
        base = METHOD_NAMES.get(name, name)
        if mapping_of(config, "phases").get("stopping") == "test_data":
            base += ", phases stopped on test data"
        runs = [other.get("run") for other in configs if method_of(other) == name]
        if all(isinstance(run, str) and run for run in runs) and len(set(runs)) == len(runs):
            run = config["run"]
            labels.append(base if run == name else f"{base} ({run})")
        elif len(differences) > 3:
            number = same.index(settings) + 1
            labels.append(f"{base} #{number} ({', '.join(differences[:2])}, ...)")
        else:
            labels.append(f"{base} ({', '.join(differences)})" if differences else base)
    return labels


def _method(label: str, runs: Sequence[Run], notes: list[str]) -> Method:
    finished = any(run.finished for run in runs)
    members: dict[tuple[int, ...], tuple[Run, int]] = {}
    for run in runs:
        if not run.finished:
            left_out = ": left out of its method's mean" if finished else ""
            notes.append(f"{run.folder} is unfinished ({progress_of(run)}){left_out}")
            if finished:
                continue
        seeds = distinct(series.seed for series in run.records)
        first = first_seed(run.config)
        # A run's metrics lines have its seeds themselves, or numbers counted from 0.
        absolute = all(seed >= first for seed in seeds)
        repeated = []
        for seed in seeds:
            identity = (seed,) if absolute else (first, seed)
            if identity in members:
                repeated.append(str(seed))
            else:
                members[identity] = (run, seed)
        if repeated:
            again = f"{run.folder} repeats seed {', '.join(repeated)} of {label}"
            notes.append(f"{again}: counted once")
    return Method(label, tuple(runs), tuple(members.values()), finished)


def progress_of(run: Run) -> str:
    """How far a run came."""
    reached = max((round for series in run.records.values() for round in series), default=0)
    total = run.config.get("rounds")
    return f"{reached} of {total} rounds" if total else f"{reached} rounds"


def _metrics(runs: Sequence[Run]) -> list[str]:
    """Names of numbers that evaluations have: the accuracy first, then other metrics, then the loss."""
    names = distinct(
        name
        for run in runs
        for series, records in run.records.items()
        if series.split != TRAINING
        for record in records.values()
        for name in record
        if name not in _NO_METRICS and number_of(record, name) is not None
    )
    return sorted(names, key=lambda name: (name != ACCURACY, name == "loss"))


def _models(runs: Sequence[Run]) -> tuple[str, ...]:
    """Names of models, the smallest first where sizes are known."""
    models = distinct(series.model for run in runs for series in run.records)
    sizes = {}
    for run in runs:
        for model, description in mapping_of(run.summary, "models").items():
            size = description.get("parameters") if isinstance(description, dict) else None
            if isinstance(size, int):
                sizes[model] = size
    known = all(model in sizes for model in models)
    return tuple(sorted(models, key=lambda model: sizes[model]) if known else models)


def _splits(runs: Sequence[Run], metric: str) -> tuple[str, ...]:
    """Splits with the metric, the test split first."""
    splits = distinct(
        series.split
        for run in runs
        for series, records in run.records.items()
        if series.split != TRAINING and any(metric in record for record in records.values())
    )
    first = ("test", "held_out")
    return tuple(sorted(splits, key=lambda x: first.index(x) if x in first else len(first)))


def with_metric(collection: Collection, metric: str) -> Collection:
    """The collection with this metric in place of its own, if one of its runs has it."""
    runs = [run for method in collection.methods for run in method.runs]
    if metric not in _metrics(runs):
        return collection
    return collection._replace(metric=metric, splits=_splits(runs, metric))


def curve(method: Method, model: str, split: str, metric: str) -> Curve:
    """A metric's mean and spread over a method's seeds; empty where it was not measured."""
    by_seed = []
    for run, seed in method.members:
        records = run.records.get(Series(model, split, seed), {})
        values = {
            round: value
            for round, record in records.items()
            if (value := number_of(record, metric)) is not None
        }
        if values:
            by_seed.append(values)
    if not by_seed:
        return Curve((), ())
    rounds = sorted(set.intersection(*(set(values) for values in by_seed)))
    statistics = tuple(statistic_of([values[round] for values in by_seed]) for round in rounds)
    return Curve(tuple(rounds), statistics)


def statistic_of(values: Sequence[float]) -> Statistic:
    """Mean and sample standard deviation of one value per seed."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Statistic(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Statistic(mean, math.sqrt(variance), count)


def last_round(run: Run) -> int | None:
    """The round in which a finished run ended, which a callback may have chosen; None before its end."""
    return run.summary.get("rounds", run.config.get("rounds")) if run.finished else None


def last_evaluations(method: Method, model: str, split: str) -> list[dict[str, Any]]:
    """Each seed's evaluation after its run's last round; empty where it was not evaluated then.

    If the run has not finished, it is the last evaluation of which all seeds have the accuracy.
    """
    common_rounds = curve(method, model, split, ACCURACY).rounds
    last_common = common_rounds[-1] if common_rounds else None
    records = []
    for run, seed in method.members:
        by_round = run.records.get(Series(model, split, seed), {})
        end = last_round(run) or last_common
        records.append({} if end is None else by_round.get(end, {}))
    return records


def final(method: Method, model: str, split: str, metric: str) -> Statistic | None:
    """A metric after each finished run's own last round; None where a seed lacks it."""
    values = []
    for run, seed in method.members:
        records = run.records.get(Series(model, split, seed), {})
        record = records.get(end, {}) if (end := last_round(run)) is not None else {}
        if (value := number_of(record, metric)) is None:
            return None
        values.append(value)
    return statistic_of(values) if values else None


def default_title(collection: Collection) -> str:
    """The names of the experiments in the collection."""
    runs = [run for method in collection.methods for run in method.runs]
    names = distinct(str(run.config.get("name") or run.folder.name) for run in runs)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
