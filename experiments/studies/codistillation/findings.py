"""Compares our runs with the paper's claims."""

import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.claims import Comparison, Difference, is_baseline
from experiments.studies.codistillation.paper_numbers import TEST_IMAGES
from experiments.studies.samples import (
    Sample,
    baseline,
    common_seeds,
    equal_but,
    in_any_order,
    samples,
)
from experiments.studies.verdicts import DID_NOT_HOLD, HELD, OPEN, UNDECIDED, decided
from fedcodist.report.intervals import Estimate, contrast, paired

POOL_SIZE = ("pools.*.fraction",)


class Finding(NamedTuple):
    """The result of a comparison.

    Attributes:
      paper: the paper's difference; None if it has no numbers.
      ours: our difference; None if runs with equal settings are missing.
      word: HELD, DID_NOT_HOLD or UNDECIDED, or what is missing.
      rounds: of our runs.
      full_rounds: how many rounds a result needs.
    """

    paper: float | None
    ours: Estimate | None
    word: str
    rounds: int = 0
    full_rounds: int = 0

    @property
    def is_short(self) -> bool:
        return self.rounds < self.full_rounds


def find(
    comparison: Comparison, records: Sequence[Record], all_records: Sequence[Record] | None = None
) -> Finding:
    """Compares runs with equal settings, including the number of rounds.

    For a gain over FedAvg it takes the run that tables show. Two other runs are compared with settings
    that both have; of several such settings it takes the first in the order of `samples`.

    Args:
      comparison: what is compared.
      records: the runs that may be compared.
      all_records: the runs that show the spread over seeds, if these are more.
    """
    paper = _paper(comparison)
    is_gain = len(comparison.differences) == 1
    candidates = [_pairs(difference, records, is_gain) for difference in comparison.differences]
    chosen = next((pairs for pairs in product(*candidates) if _have_equal_settings(pairs)), None)
    if chosen is None:
        return Finding(paper, None, _lack(comparison, records, candidates))
    deviation = deviation_over_seeds(
        records if all_records is None else all_records, comparison.differences[0].plus.model
    )
    ours = _estimate(chosen, deviation)
    finding = Finding(
        paper,
        ours,
        decided(ours.value, ours.half_width, comparison.expected),
        chosen[0][0].rounds,
        max(sample.full_rounds for pair in chosen for sample in pair),
    )
    return finding._replace(word="not enough rounds") if finding.is_short else finding


def within_seeds(plus: Sample, minus: Sample, deviation: float) -> Estimate:
    """`plus` minus `minus` in the seeds that both have; as independent samples if they share none.

    Args:
      plus, minus: accuracies in %.
      deviation: that of the accuracy over seeds, for a single seed.
    """
    pairs = common_seeds(plus, minus)
    if not pairs:
        return contrast([plus.values], [minus.values], TEST_IMAGES, deviation)
    higher, lower = zip(*pairs, strict=True)
    return paired(higher, lower, TEST_IMAGES, deviation)


def verdict(findings: Sequence[Finding]) -> str:
    """HELD if every comparison held, DID_NOT_HOLD if one did not hold.

    Otherwise OPEN if runs are missing or have too few rounds, and UNDECIDED if all runs are there.
    """
    words = [finding.word for finding in findings]
    if DID_NOT_HOLD in words:
        return DID_NOT_HOLD
    if set(words) == {HELD}:
        return HELD
    lacks = (finding.ours is None or finding.is_short for finding in findings)
    return OPEN if any(lacks) else UNDECIDED


def deviation_over_seeds(records: Sequence[Record], model: str) -> float:
    """The standard deviation of a model's accuracy over seeds, for runs that have one seed.

    It is the root of the mean variance of the runs of Table 1 that have several seeds and the full
    length, each counted once; 0 without such runs.
    """
    variances = {
        tuple(record.path for record in shown.records): shown.deviation**2
        for run in paper_numbers.TABLE_1
        for shown in in_any_order(records, TABLE_1, run, model)
        if shown.deviation is not None and not shown.is_short
    }
    return math.sqrt(statistics.fmean(variances.values())) if variances else 0.0


def _estimate(pairs: Sequence[tuple[Sample, Sample]], deviation: float) -> Estimate:
    """The first pair's difference, minus the second's if there is one."""
    if len(pairs) == 1:
        return within_seeds(*pairs[0], deviation)
    common = [
        list(zip(*shared, strict=True))
        if (shared := common_seeds(*pair))
        else [sample.values for sample in pair]
        for pair in pairs
    ]
    (plus, minus), (taken, added) = common
    return contrast([plus, added], [minus, taken], TEST_IMAGES, deviation)


def _pairs(
    difference: Difference, records: Sequence[Record], only_shown: bool
) -> list[tuple[Sample, Sample]]:
    """Pairs of samples of both terms with equal settings; the pair that tables show comes first."""
    plus, minus, varying = difference
    if is_baseline(minus):
        runs = samples(records, *plus)[: 1 if only_shown else None]
        return [(s, b) for s in runs if (b := baseline(records, s.records[0], minus.model))]
    if is_baseline(plus):
        swapped = _pairs(Difference(minus, plus), records, only_shown)
        return [(higher, lower) for lower, higher in swapped]
    return [
        (first, other)
        for first in samples(records, *plus)
        for other in samples(records, *minus)
        if equal_but(first, other, varying)
    ]


def _have_equal_settings(pairs: Sequence[tuple[Sample, Sample]]) -> bool:
    (first, _), *others = pairs
    return all(equal_but(first, other, POOL_SIZE) for other, _ in others)


def _lack(
    comparison: Comparison,
    records: Sequence[Record],
    candidates: Sequence[Sequence[tuple[Sample, Sample]]],
) -> str:
    """The reason why nothing could be compared."""
    terms = [term for terms in comparison.terms for term in terms]
    if not all(samples(records, *term) for term in terms if not is_baseline(term)):
        return "runs missing"
    if any(is_baseline(term) for term in terms) and not all(candidates):
        return "no FedAvg run with these settings"
    return "no runs with equal settings"


def _paper(comparison: Comparison) -> float | None:
    total = 0.0
    for sign, terms in zip((1, -1), comparison.terms, strict=True):
        for term in terms:
            if term.experiment != TABLE_1:
                return None
            total += sign * paper_numbers.accuracy(term.run, term.model)
    return total
