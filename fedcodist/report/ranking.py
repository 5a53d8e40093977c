"""Ranks runs on the same clients, and takes differences to a baseline within seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedcodist.core.metric_kinds import lower_is_better
from fedcodist.report.data_of_runs import other_data
from fedcodist.report.entries import ALL_PARTIES, Entry
from fedcodist.report.intervals import student_half_width


class Difference(NamedTuple):
    """Mean of the difference to the baseline over the seeds of both, and half of its 95 % interval."""

    mean: float
    half_width: float | None
    seeds: int


def ranked(
    entries: Sequence[Entry],
    baseline: str,
    models: Sequence[str] | None,
    metric: str = "accuracy",
) -> list[Entry]:
    """The entries of the wanted models, the best first; entries undefined for any seed are last.

    Raises:
      ValueError: no run has such a model.
    """
    known = list(dict.fromkeys(entry.model for entry in entries))
    for model in models or ():
        if model not in known:
            raise unknown_model(model, known)
    if models:
        shown = [entry for entry in entries if entry.model in models]
    else:
        wanted = {_compared_as(entry) for entry in entries if entry.run == baseline}
        wanted = {ALL_PARTIES} if ALL_PARTIES in wanted else wanted
        shown = [e for e in without_shared(entries) if _compared_as(e) in wanted]
    sign = 1 if lower_is_better(metric) else -1

    def place(entry: Entry) -> tuple[bool, float]:
        is_undefined = not is_defined(entry.values)
        return is_undefined, 0.0 if is_undefined else sign * statistics.fmean(entry.values)

    return sorted(shown, key=place)


def unknown_model(model: str, known: Sequence[str]) -> ValueError:
    """The error, whose message lists the models."""
    return ValueError(f"--model must be one of {list(known)}, got {model!r}.")


def difference(entry: Entry, entries: Sequence[Entry], baseline: str) -> Difference | None:
    """The difference to the baseline's model of the same name, or to its only model, within seeds.

    None if there is no such model, if either value is undefined, if the runs have no common seed, or if
    they were measured on different splits or had different data with a common seed, where seeds are no
    pairs. The interval is by Student's t over the seeds' differences. With one seed there is none.
    """
    candidates = [other for other in entries if other.run == baseline and other.head is None]
    same = [other for other in candidates if other.model == entry.model]
    same = same or [o for o in candidates if _compared_as(o) == _compared_as(entry)] or candidates
    if len(same) != 1 or same[0] == entry:
        return None
    if same[0].split != entry.split or other_data_of_seeds(entry, same[0]):
        return None
    ours, theirs = (dict(zip(e.seeds, e.values, strict=True)) for e in (entry, same[0]))
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences or not is_defined(differences):
        return None
    mean, half_width = statistics.fmean(differences), student_half_width(differences)
    return Difference(mean, half_width, len(differences))


def other_data_of_seeds(ours: Entry, theirs: Entry) -> str:
    """What `other_data` says of the first common seed whose data differ; empty if there is none."""
    common = [seed for seed in ours.data if seed in theirs.data]
    differences = (other_data(ours.data[seed], theirs.data[seed]) for seed in common)
    return next(filter(None, differences), "")


def _compared_as(entry: Entry) -> str:
    """The name by which models are compared: for a personal model, that of the shared model."""
    return entry.shared or entry.model


def without_shared(entries: Sequence[Entry]) -> list[Entry]:
    """The entries without shared models that personal models replace in the ranking."""
    shared = {(entry.run, entry.shared) for entry in entries}
    return [entry for entry in entries if (entry.run, entry.model) not in shared]


def is_defined(values: Sequence[float]) -> bool:
    """Whether all are finite."""
    return all(map(math.isfinite, values))
