"""Compares our runs with the paper's claims."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.claims import Comparison, Difference, is_baseline
from experiments.studies.codistillation.paper_numbers import TEST_IMAGES
from experiments.studies.pages import DID_NOT_HOLD, HELD, OPEN, UNDECIDED
from experiments.studies.samples import Sample, baseline, equal_but, samples
from fedcodist.report.intervals import Estimate, contrast

POOL_SIZE = ("pools.*.fraction",)


class Finding(NamedTuple):
    """The result of a comparison: the paper's difference, ours, and whether ours decides it.

    `paper` is None if the paper has no numbers, `ours` if runs with equal settings are missing. Our
    runs have `rounds` of `full_rounds`.
    """

    paper: float | None
    ours: Estimate | None
    decided: str
    rounds: int = 0
    full_rounds: int = 0

    @property
    def is_short(self) -> bool:
        return self.rounds < self.full_rounds


def find(comparison: Comparison, records: Sequence[Record]) -> Finding:
    """Compares runs with equal settings, including the number of rounds.

    For a gain over FedAvg it takes the run that tables show. Two other runs are compared with settings
    that both have; of several such settings it takes the first in the order of `samples`.
    """
    paper = _paper(comparison)
    is_gain = len(comparison.differences) == 1
    candidates = [_pairs(difference, records, is_gain) for difference in comparison.differences]
    chosen = next((pairs for pairs in product(*candidates) if _have_equal_settings(pairs)), None)
    if chosen is None:
        return Finding(paper, None, _lack(comparison, records, candidates))
    (first_plus, first_minus), *second = chosen
    plus = [first_plus, *(taken for _, taken in second)]
    minus = [first_minus, *(added for added, _ in second)]
    ours = contrast([s.values for s in plus], [s.values for s in minus], TEST_IMAGES)
    finding = Finding(
        paper,
        ours,
        "within the interval",
        first_plus.rounds,
        max(sample.full_rounds for sample in (*plus, *minus)),
    )
    if finding.is_short:
        return finding._replace(decided="not enough rounds")
    if abs(ours.value) > ours.half_width:
        return finding._replace(decided="yes" if ours.value > 0 else "no")
    return finding


def verdict(findings: Sequence[Finding]) -> str:
    """HELD if every comparison held, DID_NOT_HOLD if one is refuted.

    Otherwise OPEN if runs are missing or have too few rounds, and UNDECIDED if an interval contains
    zero.
    """
    if any(finding.decided == "no" for finding in findings):
        return DID_NOT_HOLD
    if all(finding.decided == "yes" for finding in findings):
        return HELD
    lacks = (finding.ours is None or finding.is_short for finding in findings)
    return OPEN if any(lacks) else UNDECIDED


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
