"""Joins the records of long runs whose seeds were run one by one."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.studies.archive import Record
from experiments.studies.settings import settings

# The phase before the first round that a run may take from another run's cache.
PUBLIC = "public"


def most_seeds(records: Iterable[Record]) -> Record | None:
    """A run's record with most rounds, then most seeds, then the newest; None if there is none.

    Records of the same settings without a common seed are joined into one, with the path, the command
    and the commit of the first. Of several records of a seed the newest is joined. Records with heads or
    spectra are not joined.
    """
    found: list[Record] = []
    newest_first = sorted(records, key=lambda record: record.date or "", reverse=True)
    for record in sorted(newest_first, key=lambda record: record.seeds):
        place = next((i for i, other in enumerate(found) if _are_parts(other, record)), None)
        if place is None:
            found.append(record)
        else:
            found[place] = _joined(found[place], record)
    best = lambda record: (record.last_round, len(record.seeds), record.date or "")
    return max(found, key=best, default=None)


def _are_parts(one: Record, other: Record) -> bool:
    """Whether records differ only in seeds, and in time, machine and commit of their runs."""

    def about(record: Record) -> tuple[Any, ...]:
        rounds = {
            (model, split): points["round"]
            for model, splits in record.curve.items()
            for split, points in splits.items()
        }
        phases = record.phases.keys() - {PUBLIC}
        return settings(record), record.data, record.last_round, rounds, phases

    if any(each.heads or each.spectra or each.gradient_spectra for each in (one, other)):
        return False
    return not set(one.seeds) & set(other.seeds) and about(one) == about(other)


def _joined(one: Record, other: Record) -> Record:
    seconds = None if None in (one.seconds, other.seconds) else one.seconds + other.seconds
    return one._replace(
        seeds=[*one.seeds, *other.seeds],
        date=max(one.date or "", other.date or "") or None,
        seconds=seconds,
        final=_side_by_side(one.final, other.final),
        curve=_side_by_side(one.curve, other.curve),
        phases={
            name: _side_by_side(own, other.phases[name])
            for name, own in one.phases.items()
            if name in other.phases
        },
    )


def _side_by_side(one: Any, other: Any) -> Any:
    """Both records' values at the leaves: lists of one per seed, in a curve one such list per round."""
    if isinstance(one, Mapping):
        return {
            key: own if key == "round" else _side_by_side(own, other[key])
            for key, own in one.items()
            if key in other  # a newer version may have more metrics
        }
    if one and isinstance(one[0], list):
        return [[*own, *others] for own, others in zip(one, other, strict=True)]
    return [*one, *other]
