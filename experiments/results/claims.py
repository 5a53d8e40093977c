"""The codistillation paper's claims on CIFAR-100, each a list of differences of test accuracies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.report import METHOD_NAMES
from experiments.results import paper_numbers
from experiments.results.intervals import Estimate, contrast
from experiments.results.paper_numbers import METHODS, POOL_SIZES, TEST_IMAGES, run_name
from experiments.results.pooling import TABLE_1, Record, Sample, sample

FIGURE_4 = "cifar100_figure4"
FEW_IMAGES = 600
HOLDS, FAILS, UNDECIDED, OPEN = "holds", "does not hold", "undecided", "not enough runs"
UNLABELLED_NAMES = {"in_domain": "in-domain", "cifar10": "CIFAR-10"}


class Term(NamedTuple):
    """One accuracy: a model of a run."""

    experiment: str
    run: str
    model: str


class Comparison(NamedTuple):
    """The claim is that the sum of `plus` exceeds that of `minus`."""

    text: str
    plus: tuple[Term, ...]
    minus: tuple[Term, ...]


class Claim(NamedTuple):
    """Holds if every comparison does."""

    text: str
    comparisons: tuple[Comparison, ...]


class Finding(NamedTuple):
    """What a comparison gave: the paper's difference, ours, and whether ours decides it.

    `paper` is None where the paper has no numbers, `ours` where runs of one length are missing; of
    `rounds` out of `full_rounds`.
    """

    paper: float | None
    ours: Estimate | None
    decided: str
    rounds: int = 0
    full_rounds: int = 0


def claims() -> list[Claim]:
    """The claims, in the order of RESULTS.md."""
    both = [(method, size) for method in METHODS for size in (3100, 4700)]
    return [
        Claim(
            "Codistillation with in-domain unlabelled data lifts both models at 3,100 and 4,700 "
            "examples",
            tuple(gain(m, s, "in_domain", model) for m, s in both for model in ("small", "large")),
        ),
        Claim(
            "The large model gains most where its pool is smallest (in-domain)",
            tuple(_larger_gain(m, 3100, s) for m in METHODS for s in (4700, 6300)),
        ),
        Claim(
            f"{FEW_IMAGES} unlabelled images are enough for a gain over FedAvg (in-domain, 4,700 "
            "examples)",
            tuple(_few_images(m, model) for m in METHODS for model in ("small", "large")),
        ),
        Claim(
            "Out-of-domain data: the small model gains in all six cells",
            tuple(gain(m, s, "cifar10", "small") for m in METHODS for s in POOL_SIZES),
        ),
        Claim(
            "Out-of-domain data: the large model does better with in-domain data in all six cells",
            tuple(_better_in_domain(m, s) for m in METHODS for s in POOL_SIZES),
        ),
        Claim(
            "Out-of-domain data: the large model falls below FedAvg at 6,300 examples",
            tuple(_falls_below(m, 6300, "cifar10") for m in METHODS),
        ),
        Claim(
            "PeriodicCodist is above MergedCodist for the small model at every size (in-domain)",
            tuple(_periodic_above_merged(s) for s in POOL_SIZES),
        ),
    ]


def gain(method: str, pool_size: int, unlabelled: str, model: str) -> Comparison:
    """A cell of Table 1 against FedAvg with the same pool."""
    return Comparison(
        f"{METHOD_NAMES[method]}, {UNLABELLED_NAMES[unlabelled]}, {pool_size:,}, {model}: "
        "above FedAvg",
        (_cell(method, pool_size, unlabelled, model),),
        (_cell("fed_avg", pool_size, unlabelled, model),),
    )


def find(comparison: Comparison, records: Sequence[Record]) -> Finding:
    """Compares runs of equal length: the longest that every term has."""
    paper = _paper(comparison)
    plus, minus = _samples(comparison, records)
    if not plus:
        terms = (*comparison.plus, *comparison.minus)
        all_there = all(sample(records, *term) for term in terms)
        return Finding(paper, None, "runs of unequal length" if all_there else "runs missing")
    one = plus[0]
    ours = contrast([s.values for s in plus], [s.values for s in minus], TEST_IMAGES)
    decided = "within the interval"
    if abs(ours.value) > ours.half_width:
        decided = "yes" if ours.value > 0 else "no"
    return Finding(paper, ours, decided, one.rounds, max(s.full_rounds for s in plus + minus))


def verdict(findings: Sequence[Finding]) -> str:
    """'holds' if every comparison does, 'does not hold' if one is refuted.

    Else 'not enough runs' where some are missing, and 'undecided' where a difference lies within its
    interval.
    """
    if any(finding.decided == "no" for finding in findings):
        return FAILS
    if all(finding.decided == "yes" for finding in findings):
        return HOLDS
    return OPEN if any(finding.ours is None for finding in findings) else UNDECIDED


def _samples(
    comparison: Comparison, records: Sequence[Record]
) -> tuple[list[Sample], list[Sample]]:
    for rounds in sorted({record.rounds for record in records}, reverse=True):
        found: list[list[Sample]] = [
            [one for term in terms if (one := sample(records, *term, rounds=rounds))]
            for terms in (comparison.plus, comparison.minus)
        ]
        if list(map(len, found)) == [len(comparison.plus), len(comparison.minus)]:
            return found[0], found[1]
    return [], []


def _paper(comparison: Comparison) -> float | None:
    total = 0.0
    for sign, terms in ((1, comparison.plus), (-1, comparison.minus)):
        for term in terms:
            if term.experiment != TABLE_1:
                return None
            total += sign * paper_numbers.accuracy(term.run, term.model)
    return total


def _cell(method: str, pool_size: int, unlabelled: str, model: str) -> Term:
    return Term(TABLE_1, run_name(method, pool_size, unlabelled), model)


def _larger_gain(method: str, smaller: int, larger: int) -> Comparison:
    cell: Callable[[str, int], Term] = lambda m, size: _cell(m, size, "in_domain", "large")
    return Comparison(
        f"{METHOD_NAMES[method]}, large: gain at {smaller:,} above gain at {larger:,}",
        (cell(method, smaller), cell("fed_avg", larger)),
        (cell("fed_avg", smaller), cell(method, larger)),
    )


def _few_images(method: str, model: str) -> Comparison:
    return Comparison(
        f"{METHOD_NAMES[method]}, {FEW_IMAGES} images, {model}: above FedAvg",
        (Term(FIGURE_4, f"{method},{FEW_IMAGES}", model),),
        (_cell("fed_avg", 4700, "", model),),
    )


def _better_in_domain(method: str, pool_size: int) -> Comparison:
    return Comparison(
        f"{METHOD_NAMES[method]}, {pool_size:,}, large: in-domain above CIFAR-10",
        (_cell(method, pool_size, "in_domain", "large"),),
        (_cell(method, pool_size, "cifar10", "large"),),
    )


def _falls_below(method: str, pool_size: int, unlabelled: str) -> Comparison:
    return Comparison(
        f"FedAvg, {pool_size:,}, large: above {METHOD_NAMES[method]}, "
        f"{UNLABELLED_NAMES[unlabelled]}",
        (_cell("fed_avg", pool_size, unlabelled, "large"),),
        (_cell(method, pool_size, unlabelled, "large"),),
    )


def _periodic_above_merged(pool_size: int) -> Comparison:
    return Comparison(
        f"small, {pool_size:,}: PeriodicCodist above MergedCodist",
        (_cell(METHODS[0], pool_size, "in_domain", "small"),),
        (_cell(METHODS[1], pool_size, "in_domain", "small"),),
    )
