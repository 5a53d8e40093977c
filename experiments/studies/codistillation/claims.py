"""The codistillation paper's claims on CIFAR-100, each a list of differences of test accuracies."""

from typing import NamedTuple

from experiments.studies.codistillation.paper_numbers import MODELS, POOL_SIZES, run_name
from experiments.studies.records import FIGURE_4, TABLE_1
from experiments.studies.settings import OWN, UNLABELLED
from fedcodist.config.registry import BASELINE, CODISTILLATION, METHOD_NAMES

FEW_IMAGES = 600
UNLABELLED_NAMES = {"in_domain": "in-domain", "cifar10": "CIFAR-10"}
PERIODIC, MERGED = CODISTILLATION


class Term(NamedTuple):
    """One accuracy: a model of a run."""

    experiment: str
    run: str
    model: str

    @property
    def is_baseline(self) -> bool:
        return self.run.startswith(BASELINE)


class Difference(NamedTuple):
    """`plus` less `minus`, whose runs have equal settings but those that `varying` matches.

    What FedAvg does not read of another method's settings varies in any case.
    """

    plus: Term
    minus: Term
    varying: tuple[str, ...] = ()


class Comparison(NamedTuple):
    """The claim is that the difference is above zero, or above the second where there are two.

    The two are of runs with equal settings but the share of clients with the large model.
    """

    text: str
    differences: tuple[Difference] | tuple[Difference, Difference]

    @property
    def terms(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """The terms that are added, and those that are taken off."""
        first, *second = self.differences
        plus = (first.plus, *(each.minus for each in second))
        return plus, (first.minus, *(each.plus for each in second))


class Claim(NamedTuple):
    """Holds if every comparison does."""

    text: str
    comparisons: tuple[Comparison, ...]


def claims() -> list[Claim]:
    """The claims, in the order of RESULTS.md."""
    both = [(method, size) for method in CODISTILLATION for size in (3100, 4700)]
    return [
        Claim(
            "Codistillation with in-domain unlabelled data lifts both models at 3,100 and 4,700 "
            "examples",
            tuple(gain(m, s, "in_domain", model) for m, s in both for model in MODELS),
        ),
        Claim(
            "The large model gains most where its pool is smallest (in-domain)",
            tuple(_larger_gain(m, 3100, s) for m in CODISTILLATION for s in (4700, 6300)),
        ),
        Claim(
            "MergedCodist with in-domain data: the large model falls below FedAvg at 6,300 examples",
            (_falls_below(MERGED, 6300, "in_domain"),),
        ),
        Claim(
            f"{FEW_IMAGES} unlabelled images are enough for a gain over FedAvg (in-domain, 4,700 "
            "examples)",
            tuple(_few_images(m, model) for m in CODISTILLATION for model in MODELS),
        ),
        Claim(
            "Out-of-domain data: the small model gains in all six cells",
            tuple(gain(m, s, "cifar10", "small") for m in CODISTILLATION for s in POOL_SIZES),
        ),
        Claim(
            "Out-of-domain data: the large model does better with in-domain data in all six cells",
            tuple(_better_in_domain(m, s) for m in CODISTILLATION for s in POOL_SIZES),
        ),
        Claim(
            "Out-of-domain data: the large model falls below FedAvg at 6,300 examples",
            tuple(_falls_below(m, 6300, "cifar10") for m in CODISTILLATION),
        ),
        Claim(
            "PeriodicCodist is above MergedCodist for the small model at every size (in-domain)",
            tuple(_above(PERIODIC, MERGED, s, "small") for s in POOL_SIZES),
        ),
        Claim(
            "For the large model MergedCodist is above PeriodicCodist at 3,100 examples and below it "
            "at 4,700 and 6,300 (in-domain)",
            (
                _above(MERGED, PERIODIC, 3100, "large"),
                *(_above(PERIODIC, MERGED, s, "large") for s in (4700, 6300)),
            ),
        ),
    ]


def gain(method: str, pool_size: int, unlabelled: str, model: str) -> Comparison:
    """A cell of Table 1 against FedAvg with the same pool."""
    return Comparison(
        f"{METHOD_NAMES[method]}, {UNLABELLED_NAMES[unlabelled]}, {pool_size:,}, {model}: "
        "above FedAvg",
        (_gain(method, pool_size, unlabelled, model),),
    )


def _gain(method: str, pool_size: int, unlabelled: str, model: str) -> Difference:
    cell = _cell(method, pool_size, unlabelled, model)
    return Difference(cell, _fed_avg(pool_size, model))


def _larger_gain(method: str, smaller: int, larger: int) -> Comparison:
    return Comparison(
        f"{METHOD_NAMES[method]}, large: gain at {smaller:,} above gain at {larger:,}",
        (
            _gain(method, smaller, "in_domain", "large"),
            _gain(method, larger, "in_domain", "large"),
        ),
    )


def _few_images(method: str, model: str) -> Comparison:
    run = Term(FIGURE_4, f"{method},{FEW_IMAGES}", model)
    return Comparison(
        f"{METHOD_NAMES[method]}, {FEW_IMAGES} images, {model}: above FedAvg",
        (Difference(run, _fed_avg(4700, model)),),
    )


def _better_in_domain(method: str, pool_size: int) -> Comparison:
    near, far = (_cell(method, pool_size, each, "large") for each in UNLABELLED_NAMES)
    return Comparison(
        f"{METHOD_NAMES[method]}, {pool_size:,}, large: in-domain above CIFAR-10",
        (Difference(near, far, UNLABELLED),),
    )


def _falls_below(method: str, pool_size: int, unlabelled: str) -> Comparison:
    cell = _cell(method, pool_size, unlabelled, "large")
    return Comparison(
        f"FedAvg, {pool_size:,}, large: above {METHOD_NAMES[method]}, "
        f"{UNLABELLED_NAMES[unlabelled]}",
        (Difference(_fed_avg(pool_size, "large"), cell),),
    )


def _above(higher: str, lower: str, pool_size: int, model: str) -> Comparison:
    plus, minus = (_cell(method, pool_size, "in_domain", model) for method in (higher, lower))
    return Comparison(
        f"{model}, {pool_size:,}: {METHOD_NAMES[higher]} above {METHOD_NAMES[lower]}",
        (Difference(plus, minus, OWN),),
    )


def _cell(method: str, pool_size: int, unlabelled: str, model: str) -> Term:
    return Term(TABLE_1, run_name(method, pool_size, unlabelled), model)


def _fed_avg(pool_size: int, model: str) -> Term:
    return _cell(BASELINE, pool_size, "", model)
