"""The orderings of Multi-Headed Distillation's paper, as differences between runs.

The runs are those of cifar100_mhd.py; digits_mhd_orderings.py has runs of the same names.

A line of `orderings.csv` has the sum of some measures minus that of others, and the paper's statement.
Terms are 'RUN MEASURE HEAD [CLIENTS]': the mean over clients of a head's `shared` or `private` accuracy,
`first` the first client's or `others` the others'; `hops2` is that on the labels of clients two hops
away, `no_way` of those that no way leads to; `best_shared_of_others` that of the best auxiliary head.
"""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.configs.cifar100_mhd import EMBEDDING_WEIGHT, HEAD_WEIGHT
from fedcodist.report import tables_heads as heads_lib
from fedcodist.report.tables_heads import Heads

# accuracies of a run's heads -> % for each seed, float [seeds]
Measure = Callable[[Heads], np.ndarray]
Term = tuple[str, Measure]  # (run, its measure)
HEADS_BY_NAME = {"main": 0, "last": -1}
FIRST, OTHERS, ALL = slice(0, 1), slice(1, None), slice(None)


class Ordering(NamedTuple):
    """The sum of some measures minus that of others, and the paper's statement on it, in words.

    `in_words` is what the table at the top of the page says; other orderings have ''. `again` says what
    differs on digits from another ordering that is on the same statement of the paper.
    """

    section: str
    text: str
    plus: tuple[Term, ...]
    less: tuple[Term, ...]
    paper: str
    in_words: str
    again: str


NOT_STATED = "not stated"  # in the place of the paper's statement
DIGITS_ONLY = "digits"  # section of orderings that are measured on digits only


def orderings() -> list[Ordering]:
    """The orderings that are measured on CIFAR-100."""
    return [o for o in _all_orderings() if o.section != DIGITS_ONLY]


def orderings_on_digits() -> list[Ordering]:
    """The orderings that are measured on digits: those of CIFAR-100 and some more."""
    # On digits the graph is complete in all other runs too.
    every = _all_orderings({"graph,complete": "heads,s=100,3"})
    # The paper's graphs have four clients, of which three heads reach all. Here there are eight.
    return [
        o._replace(paper=NOT_STATED) if o.text.startswith("complete less") else o for o in every
    ]


def _all_orderings(same_run: Mapping[str, str] = {}) -> list[Ordering]:
    """All orderings of the table; `same_run` maps a run to the one that is used in its place."""

    def terms(text: str) -> Any:
        for run, other in same_run.items():
            text = text.replace(run, other)
        return _terms(text)

    path = Path(__file__).with_name("orderings.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Ordering(
                line["section"],
                line["ordering"],
                terms(line["plus"]),
                terms(line["minus"]),
                line["paper"],
                line["in words"],
                line["again"] or "",
            )
            for line in csv.DictReader(file)
        ]


def shared(head: int, clients: slice = ALL) -> Measure:
    """Mean over clients of a head's accuracy on all test images."""
    return lambda heads: 100 * heads.shared[:, clients, head].mean(axis=1)


def private(head: int, clients: slice = ALL) -> Measure:
    """Mean over clients of a head's accuracy on the client's own labels."""
    return lambda heads: 100 * heads.private[:, clients, head].mean(axis=1)


def weights_run(skew: int, embedding: float, head: float) -> str:
    """The run with these weights; the run with the default weights is named by its number of heads."""
    if (embedding, head) == (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        return f"heads,s={skew},1"
    return f"weights,s={skew},{embedding},{head}"


def _terms(text: str) -> tuple[Term, ...]:
    return tuple(_term(*term.split(" ")) for term in text.split("; "))


def _term(run: str, measure: str, head: str = "", clients: str = "") -> Term:
    number = HEADS_BY_NAME[head] if head in HEADS_BY_NAME else int(head or 0)
    whose = {"": ALL, "first": FIRST, "others": OTHERS}[clients]
    if measure in ("shared", "private"):
        return run, (shared if measure == "shared" else private)(number, whose)
    if measure in ("best_shared_of_others", "best_private_of_others"):
        return run, _best_of_others(measure.split("_")[1])
    hops = -1 if measure == "no_way" else int(measure.removeprefix("hops"))
    return run, lambda heads: 100 * heads_lib.at_hops(heads, hops)[:, number]


def _best_of_others(accuracy: str) -> Measure:
    """The accuracy of the best auxiliary head."""
    return lambda heads: 100 * getattr(heads, accuracy)[:, :, 1:].mean(axis=1).max(axis=-1)
