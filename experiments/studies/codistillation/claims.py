"""The codistillation paper's claims on CIFAR-100, each a list of differences of test accuracies."""

import csv
from pathlib import Path
from typing import NamedTuple

from experiments.studies.archive import TABLE_1
from experiments.studies.codistillation.paper_numbers import run_name
from experiments.studies.samples import Term
from experiments.studies.settings import OWN, UNLABELLED
from fedcodist.config.registry import BASELINE, METHOD_NAMES

CLAIMS = Path(__file__).with_name("claims.csv")
UNLABELLED_NAMES = {"in_domain": "in-domain", "cifar10": "CIFAR-10"}
# What runs may differ in that are compared: nothing, the unlabelled images, or a method's own settings.
VARYING = {"": (), "unlabelled": UNLABELLED, "own": OWN}


class Difference(NamedTuple):
    """`plus` minus `minus`. Their runs have equal settings, except those that `varying` matches.

    Settings that FedAvg does not read may always differ from another method's.
    """

    plus: Term
    minus: Term
    varying: tuple[str, ...] = ()


class Comparison(NamedTuple):
    """A difference, or if there are two the first minus the second, and where the paper says it lies.

    The runs of the two have equal settings, except for the share of clients with the large model.
    """

    text: str
    differences: tuple[Difference] | tuple[Difference, Difference]
    expected: str = "above 0"  # see `experiments.studies.verdicts.decided`

    @property
    def terms(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """(terms that are added, terms that are subtracted)."""
        first, *second = self.differences
        plus = (first.plus, *(each.minus for each in second))
        return plus, (first.minus, *(each.plus for each in second))


class Claim(NamedTuple):
    """Holds if every comparison does."""

    text: str
    comparisons: tuple[Comparison, ...]


def claims() -> list[Claim]:
    """The claims, in the order of the page."""
    by_claim: dict[str, list[Comparison]] = {}
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            difference = Difference(
                _term(line["plus"]), _term(line["minus"]), VARYING[line["varying"]]
            )
            comparison = Comparison(line["comparison"], (difference,), line["expected"])
            if line["second_plus"]:
                second = Difference(_term(line["second_plus"]), _term(line["second_minus"]))
                comparison = comparison._replace(differences=(difference, second))
            by_claim.setdefault(line["claim"], []).append(comparison)
    return [Claim(text, tuple(comparisons)) for text, comparisons in by_claim.items()]


def gain(method: str, pool_size: int, unlabelled: str, model: str) -> Comparison:
    """A cell of Table 1 against FedAvg with the same pool."""
    return Comparison(
        f"{METHOD_NAMES[method]}, {UNLABELLED_NAMES[unlabelled]}, {pool_size:,}, {model}: "
        "above FedAvg",
        (
            Difference(
                Term(TABLE_1, run_name(method, pool_size, unlabelled), model),
                Term(TABLE_1, run_name(BASELINE, pool_size, ""), model),
            ),
        ),
    )


def is_baseline(term: Term) -> bool:
    """Whether a term is a run of FedAvg."""
    return term.run.startswith(BASELINE)


def _term(text: str) -> Term:
    return Term(*text.split(" "))
