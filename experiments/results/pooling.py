"""Committed records: read, checked, and pooled over the seeds of runs with the same settings."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.record import RESERVED

TABLE_1 = "cifar100_table1"
# What runs pooled into one sample may differ in: none of it changes what is trained.
NOT_SETTINGS = ("name", "run", "seed", "seeds", "notes", "full_rounds", "evaluation")


class Record(NamedTuple):
    """One file, as `experiments.record` writes it; accuracies are shares, one per seed."""

    path: Path
    experiment: str
    run: str
    command: str | None
    config: dict[str, Any]
    commit: str | None
    seeds: list[int]
    rounds: int
    full_rounds: int
    finished: bool
    last_round: int
    device: str | None
    date: str | None
    seconds: float | None
    final: dict[str, dict[str, dict[str, list[Any]]]]
    curve: dict[str, dict[str, dict[str, list[Any]]]]
    notes: list[str]


class Sample(NamedTuple):
    """Final accuracies in %, one per seed, of runs with the same settings."""

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


def load_records(results: Path) -> list[Record]:
    """Every record in `results`, ordered by experiment, run, date and path.

    Raises:
      ValueError: one line that names a malformed file.
    """
    paths = sorted(Path(results).glob("*/*.json"))
    records = [_load(path) for path in paths if path.parent.name not in RESERVED]
    return sorted(records, key=lambda r: (r.experiment, r.run, r.date or "", str(r.path)))


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """Records with the same experiment, run and settings together."""
    return _grouped(records, lambda record: [record.experiment, record.run, settings(record)])


def sample(
    records: Iterable[Record],
    experiment: str,
    run: str,
    model: str,
    split: str = "test",
    rounds: int | None = None,
) -> Sample | None:
    """A finished run's final accuracies, each seed once; None where there are none.

    Of several settings of one run it takes the one with most rounds, then most seeds, then the
    newest: never by accuracy. `rounds` asks for that many rounds. FedAvg's small model in Table 1 is
    the same whatever the large model's pool, so that one baseline is pooled over all FedAvg runs.
    """
    return pooled(_candidates(records, experiment, run, model, rounds), model, split)


def pooled(grouped: Iterable[Sequence[Record]], model: str, split: str) -> Sample | None:
    """The sample of the group to show, see `sample`; each group's first record of a seed counts."""
    found = [one for group in grouped if (one := _sample(group, model, split))]
    return max(found, key=_preference, default=None)


def curve(
    records: Iterable[Record], experiment: str, run: str, model: str, split: str
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
        values = [100 * each[index] for each in points["accuracy"]]
        by_seed.append(dict(zip(points["round"], values, strict=True)))
    rounds = sorted(set.intersection(*(set(values) for values in by_seed)))
    columns = [[values[round] for values in by_seed] for round in rounds]
    deviations = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in columns]
    if not rounds:
        return None
    return Curve(tuple(rounds), tuple(map(statistics.fmean, columns)), tuple(deviations))


def settings(record: Record) -> dict[str, Any]:
    """What a run's results depend on besides the seed, as dotted keys."""
    return {k: v for k, v in _flat(record.config).items() if k.split(".")[0] not in NOT_SETTINGS}


def differences(grouped: Sequence[Sequence[Record]]) -> list[str]:
    """For each group the settings that tell it from the others, `algorithm.alpha=0.5`."""
    each = [settings(group[0]) for group in grouped]
    keys = dict.fromkeys(key for one in each for key in one)
    differing = [k for k in keys if len({json.dumps(one.get(k)) for one in each}) > 1]
    return [", ".join(f"{key}={_text(one.get(key))}" for key in differing) for one in each]


def _candidates(records, experiment, run, model, rounds):
    def counts(record):
        return record.experiment == experiment and rounds in (None, record.rounds)

    if experiment == TABLE_1 and run.startswith("fed_avg,") and model == "small":
        found = [r for r in records if counts(r) and r.run.startswith("fed_avg,")]
        # Stable: the newest of the run at 4,700 first, for a seed that several have.
        found = sorted(_newest_first(found), key=lambda record: record.run != "fed_avg,4700")
        return _grouped(
            [record for record in found if model in record.final],
            lambda r: {k: v for k, v in settings(r).items() if not k.startswith("pools.large.")},
        )
    return groups(_newest_first(r for r in records if counts(r) and r.run == run))


def _grouped(records, key):
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(json.dumps(key(record), sort_keys=True), []).append(record)
    return list(found.values())


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.date or "", reverse=True)


def _sample(group: Sequence[Record], model: str, split: str) -> Sample | None:
    values: dict[int, float] = {}
    used = []
    for record in group:
        metrics = record.final.get(model, {}).get(split)
        if metrics is None or not record.finished:
            continue
        by_seed = zip(record.seeds, metrics["accuracy"], strict=True)
        new = {seed: 100 * share for seed, share in by_seed if seed not in values}
        values |= new
        used += [record] if new else []
    if not values:
        return None
    seeds = tuple(sorted(values))
    full_rounds = max(record.full_rounds for record in used)
    accuracies = tuple(values[seed] for seed in seeds)
    return Sample(accuracies, seeds, used[0].rounds, full_rounds, tuple(used))


def _preference(one: Sample) -> tuple[int, int, str]:
    return one.rounds, len(one.seeds), max(record.date or "" for record in one.records)


def _load(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a record: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a record: no JSON object.")
    fields = [name for name in Record._fields if name != "path"]
    if missing := [name for name in fields if name not in content]:
        raise ValueError(f"{path} is not a record: {missing[0]!r} is missing.")
    record = Record(path, **{name: content[name] for name in fields})
    if fault := _fault(record):
        raise ValueError(f"{path} is not a record: {fault}.")
    return record


def _fault(record: Record) -> str | None:
    """What is wrong with a record, or None."""
    kinds: dict[str, Any] = dict(
        experiment=str,
        run=str,
        command=str | None,
        config=dict,
        commit=str | None,
        seeds=list,
        rounds=int,
        full_rounds=int,
        finished=bool,
        last_round=int,
        device=str | None,
        date=str | None,
        seconds=int | float | None,
        final=dict,
        curve=dict,
        notes=list,
    )
    for name, kind in kinds.items():
        value = getattr(record, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"{name} is {value!r}"
    if record.experiment != record.path.parent.name:
        return f"experiment is {record.experiment!r} in folder {record.path.parent.name!r}"
    if not record.seeds or not all(isinstance(seed, int) for seed in record.seeds):
        return f"seeds is {record.seeds!r}"
    try:
        for model, splits in record.final.items():
            for split, metrics in splits.items():
                if not _are_accuracies(metrics["accuracy"], record):
                    return f"final.{model}.{split}.accuracy is {metrics['accuracy']!r}"
        for model, splits in record.curve.items():
            for split, points in splits.items():
                rounds, values = points["round"], points["accuracy"]
                if len(rounds) != len(values) or not all(isinstance(r, int) for r in rounds):
                    return f"curve.{model}.{split} has {len(rounds)} rounds, {len(values)} values"
                for value in values:
                    if not _are_accuracies(value, record):
                        return f"curve.{model}.{split}.accuracy has {value!r}"
    except (KeyError, TypeError, AttributeError) as error:
        return f"final or curve is not model, split, metric: {error}"
    return None


def _are_accuracies(values: Any, record: Record) -> bool:
    """One share per seed; NaN is not between 0 and 1."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(values) == len(numbers) == len(record.seeds) and all(0 <= v <= 1 for v in numbers)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
