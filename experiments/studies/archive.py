"""Committed records: read and checked."""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from experiments.studies.record import RESERVED
from experiments.studies.renamed import renamed
from fedcodist.report.runs import read_object

# Its FedAvg runs are what gains are over, and its small model is one for all pools' sizes.
TABLE_1 = "cifar100_table1"
# Rounds that an experiment's runs need, where its first runs turned out to be too short.
NEEDED_ROUNDS = {"fedsdd_scaled": 60}


class Record(NamedTuple):
    """One file, as `experiments.studies.record` writes it; accuracies are shares, one per seed.

    `phases`: of runs with phases before the first round, their names -> as `final`.
    `heads`: of methods of clients on a graph, the fields of `fedcodist.report.tables_heads.Heads`.
    `bytes`: model -> 'up' and 'down' -> bytes of one participation of one client, means over the run.
    `spectra` and `gradient_spectra`: of runs that recorded them, see `experiments.studies.record`.
    `data`: prepared folder -> source, unverified and num_examples by split, from its manifest.
    """

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
    phases: Mapping[str, dict[str, dict[str, dict[str, list[Any]]]]] = MappingProxyType({})
    heads: dict[str, list[Any]] | None = None
    bytes: Mapping[str, dict[str, int]] = MappingProxyType({})
    spectra: Mapping[str, dict[str, dict[str, list[Any]]]] = MappingProxyType({})
    gradient_spectra: Mapping[str, dict[str, dict[str, list[Any]]]] = MappingProxyType({})
    data: Mapping[str, dict[str, Any]] = MappingProxyType({})


def load_records(results: Path) -> list[Record]:
    """Every record in `results`, ordered by experiment, run, date and path.

    Raises:
      ValueError: one line that names a malformed file.
    """
    paths = sorted(Path(results).glob("*/*.json"))
    records = [_load(path) for path in paths if path.parent.name not in RESERVED]
    return sorted(records, key=lambda r: (r.experiment, r.run, r.date or "", str(r.path)))


def _load(path: Path) -> Record:
    content = renamed(read_object(path))
    fields = [name for name in Record._fields if name != "path"]
    needed = [name for name in fields if name not in Record._field_defaults]
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"{path} is not a record: {missing[0]!r} is missing.")
    record = Record(path, **{name: content[name] for name in fields if name in content})
    if fault := _fault(record):
        raise ValueError(f"{path} is not a record: {fault}.")
    needed_rounds = max(record.full_rounds, NEEDED_ROUNDS.get(record.experiment, 0))
    return record._replace(full_rounds=needed_rounds)


def _fault(record: Record) -> str | None:
    """A text about a record's first fault, or None."""
    for name, hint in get_type_hints(Record).items():
        value, kind = getattr(record, name), _kind(hint)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"{name} is {value!r}"
    if not isinstance(record.config.get("algorithm", {}), dict):
        return f"config.algorithm is {record.config['algorithm']!r}"
    if record.experiment != record.path.parent.name:
        return f"experiment is {record.experiment!r} in folder {record.path.parent.name!r}"
    if not record.seeds or not all(isinstance(seed, int) for seed in record.seeds):
        return f"seeds is {record.seeds!r}"
    if record.heads is not None and not _are_heads(record.heads, len(record.seeds)):
        return "heads is not what experiments.studies.record writes"
    try:
        finals = [
            *record.final.items(),
            *(m for own in record.phases.values() for m in own.items()),
        ]
        for model, splits in finals:
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
    return _fault_of_links(record)


def _kind(hint: Any) -> Any:
    """The type of a field's annotation for `isinstance`; integers are allowed for floats."""
    if isinstance(hint, UnionType):
        return reduce(or_, map(_kind, get_args(hint)))
    return int | float if hint is float else get_origin(hint) or hint


def _fault_of_links(record: Record) -> str | None:
    """A text about a fault in the bytes, the spectra or the data, or None."""
    is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    try:
        for model, ways in record.bytes.items():
            if not is_number(ways["up"]) or not is_number(ways["down"]):
                return f"bytes.{model} is {ways!r}"
        for kind in ("spectra", "gradient_spectra"):
            for model, layers in getattr(record, kind).items():
                for layer, own in layers.items():
                    numbers = [*own["round"], *own["rank"], *own["first"], *own["last"]]
                    if len(own["round"]) != len(own["rank"]) or not all(map(is_number, numbers)):
                        return f"{kind}.{model} has {layer!r} of {own!r}"
        for folder, about in record.data.items():
            counts = about["num_examples"].values()
            if not isinstance(about["source"], str) or not all(map(is_number, counts)):
                return f"data.{folder} is {about!r}"
    except (KeyError, TypeError, AttributeError) as error:
        return f"bytes, spectra or data is not what experiments.studies.record writes: {error}"
    return None


def _are_heads(heads: Mapping[str, Any], seeds: int) -> bool:
    """Whether the shapes of `tables_heads.Heads` fit together, and shares are shares."""
    try:
        shared, others, hops = (np.asarray(heads[n]) for n in ("shared", "on_others", "hops"))
        count, clients, each = shared.shape
    except (KeyError, ValueError):
        return False
    return (
        count == seeds
        and others.shape == (seeds, clients, each, clients)
        and hops.shape == (clients, clients)
        and all(((part >= 0) & (part <= 1)).all() for part in (shared, others))
    )


def _are_accuracies(values: Any, record: Record) -> bool:
    """Whether there is one share per seed; NaN is not allowed, as it is not between 0 and 1."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(values) == len(numbers) == len(record.seeds) and all(0 <= v <= 1 for v in numbers)
