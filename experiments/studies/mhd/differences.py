"""Differences between runs within seeds, by what an ordering measures of their heads."""

from collections.abc import Sequence

from experiments.studies.mhd.known import Known, KnownRuns
from experiments.studies.mhd.orderings import Measure, Ordering


def difference_of(known: KnownRuns, ordering: Ordering) -> list[float]:
    """The difference in each seed that all runs have; empty if one was not run."""
    if not all(run in known for run, _ in (*ordering.plus, *ordering.less)):
        return []
    both = (ordering.plus, ordering.less)
    return differences_of(*([(known[run], measure) for run, measure in terms] for terms in both))


def differences_of(
    plus: Sequence[tuple[Known, Measure]], less: Sequence[tuple[Known, Measure]]
) -> list[float]:
    """The sum of `plus` minus that of `less`, in the seeds that all have."""
    totals: dict[int, float] = {}
    terms = [*((1, *term) for term in plus), *((-1, *term) for term in less)]
    common = set.intersection(*(set(known.seeds) for _, known, _ in terms))
    for sign, known, measure in terms:
        for seed, value in zip(known.seeds, measure(known.heads), strict=True):
            if seed in common:
                totals[seed] = totals.get(seed, 0.0) + sign * float(value)
    return [totals[seed] for seed in sorted(totals)]
