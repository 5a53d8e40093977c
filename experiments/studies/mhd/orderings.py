"""The orderings of Multi-Headed Distillation's paper, as differences between runs of cifar100_mhd.py."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.configs.cifar100_mhd import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    HEADS,
    PUBLIC_SHARES,
    SKEWS,
)
from fedcodist.report import tables_heads as heads_lib
from fedcodist.report.tables_heads import Heads

# (what a run's heads know) -> % of each seed, float [seeds]
Measure = Callable[[Heads], np.ndarray]
Term = tuple[str, Measure]  # run of cifar100_mhd.py, what of it


class Ordering(NamedTuple):
    """The sum of some measures less that of others, and what the paper says of it, in words."""

    text: str
    plus: tuple[Term, ...]
    less: tuple[Term, ...]
    paper: str


def shared(head: int, clients: slice = slice(None)) -> Measure:
    """Mean over clients of a head's accuracy on all test images."""
    return lambda heads: 100 * heads.shared[:, clients, head].mean(axis=1)


def private(head: int, clients: slice = slice(None)) -> Measure:
    """Mean over clients of a head's accuracy on the client's own labels."""
    return lambda heads: 100 * heads.private[:, clients, head].mean(axis=1)


def at_hops(hops: int, head: int) -> Measure:
    """Accuracy on the labels of clients that far away; -1: those that no way leads to."""
    return lambda heads: 100 * heads_lib.at_hops(heads, hops)[:, head]


def best_private_of_others(heads: Heads) -> np.ndarray:
    """Of the auxiliary heads the best one's private accuracy."""
    return 100 * heads.private[:, :, 1:].mean(axis=1).max(axis=-1)


def best_shared_of_others(heads: Heads) -> np.ndarray:
    """Of the auxiliary heads the best one's shared accuracy."""
    return 100 * heads.shared[:, :, 1:].mean(axis=1).max(axis=-1)


def weights_run(skew: int, embedding: float, head: float) -> str:
    """The run of the sweep with these weights, one of which stands among the numbers of heads."""
    if (embedding, head) == (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        return f"heads,s={skew},1"
    return f"weights,s={skew},{embedding},{head}"


FIRST, OTHERS = slice(0, 1), slice(1, None)
LAST, MAIN = -1, 0


def _more(text: str, run: str, other: str, measure: Measure, paper: str = "above 0") -> Ordering:
    return Ordering(text, ((run, measure),), ((other, measure),), paper)


def _within(text: str, run: str, measure: Measure, other: Measure, paper: str) -> Ordering:
    return Ordering(text, ((run, measure),), ((run, other),), paper)


def _base(skew: int, heads: int = HEADS) -> str:
    return f"heads,s={skew},{heads}"


COMPARED = (
    *(
        ordering
        for s in SKEWS
        for ordering in (
            Ordering(
                f"s = {s}: MHD's last head less clients alone, shared",
                ((_base(s), shared(LAST)),),
                ((f"local_only_steps,s={s}", shared(MAIN)),),
                "above 0",
            ),
            _more(
                f"s = {s}: more public images, longer, last head",
                f"mhd_plus,s={s}",
                _base(s),
                shared(LAST),
            ),
            *(
                Ordering(
                    f"s = {s}: {name} less MHD with more public images, as many rounds, shared",
                    ((f"{run}_longer,s={s}", shared(MAIN)),),
                    ((f"mhd_plus,s={s}", shared(LAST)),),
                    "a little above 0",
                )
                for name, run in (
                    ("all examples in one place", "centralised"),
                    ("FedAvg", "fed_avg"),
                )
            ),
        )
    ),
    _more("MHD at s = 0 less at s = 100, last head, shared", _base(0), _base(100), shared(LAST)),
)


WEIGHTS = tuple(
    _more(
        f"s = {s}: {text}, {name}, shared",
        weights_run(s, *more),
        weights_run(s, *less),
        shared(head),
        paper,
    )
    for s in SKEWS
    for text, more, less, paper, heads in (
        ("embeddings' weight 1 less 0, ν_aux = 0", (1, 0), (0, 0), "above 0", (0,)),
        ("predictions' weight 1 less 0, ν_emb = 0", (0, 1), (0, 0), "above 0", (0,)),
        ("both less embeddings alone", (1, 1), (1, 0), "above 0", (0,)),
        ("both less predictions alone", (1, 1), (0, 1), "above 0", (0, 1)),
        ("ν_aux = 3 less 1, ν_emb = 1", (1, 3), (1, 1), "below 0 from some weight on", (0, 1)),
        ("ν_emb = 3 less 1, ν_aux = 1", (3, 1), (1, 1), "below 0 from some weight on", (0, 1)),
    )
    for head, name in enumerate(("main head", "head 1"))
    if head in heads
)


PROFILES = (
    _within(
        "s = 0: head 1 less main, private, one head", _base(0, 1), private(1), private(0), "above 0"
    ),
    _within(
        "s = 0: head 1 less main, shared, one head", _base(0, 1), shared(1), shared(0), "above 0"
    ),
    _within(
        "s = 100: head 1 less main, shared, one head",
        _base(100, 1),
        shared(1),
        shared(0),
        "far above 0",
    ),
    _within(
        "s = 100: head 1 less main, private, one head",
        _base(100, 1),
        private(1),
        private(0),
        "below 0",
    ),
    *(
        _more(
            f"s = {s}: main head with ν_aux = 1 less without, shared",
            _base(s, 1),
            weights_run(s, 1, 0),
            shared(MAIN),
        )
        for s in SKEWS
    ),
    _more(
        "s = 100: four heads less one, last head, shared",
        _base(100, 4),
        _base(100, 1),
        shared(LAST),
        "far above 0",
    ),
    _within(
        "s = 100: main less the best of four other heads, private",
        _base(100, 4),
        private(MAIN),
        best_private_of_others,
        "above 0",
    ),
)


CYCLE, ISLANDS, COMPLETE = "graph,directed_cycle", "graph,islands", "graph,complete"


TOPOLOGY = (
    _more("cycle less islands, last head, shared", CYCLE, ISLANDS, shared(LAST), "far above 0"),
    _more("cycle less islands, main head, shared", CYCLE, ISLANDS, shared(MAIN), "about 0"),
    *(
        Ordering(
            f"cycle less islands, head {head} less head {head - 1}, shared",
            ((CYCLE, shared(head)), (ISLANDS, shared(head - 1))),
            ((ISLANDS, shared(head)), (CYCLE, shared(head - 1))),
            "above 0",
        )
        for head in (1, 2, 3)
    ),
    _within(
        "cycle, labels 2 hops away: head 2 less head 1",
        CYCLE,
        at_hops(2, 2),
        at_hops(2, 1),
        "above 0",
    ),
    _within(
        "cycle, labels 2 hops away: head 3 less head 1",
        CYCLE,
        at_hops(2, 3),
        at_hops(2, 1),
        "above 0",
    ),
    _within(
        "cycle, labels 3 hops away: head 3 less head 2",
        CYCLE,
        at_hops(3, 3),
        at_hops(3, 2),
        "clearly above 0",
    ),
    _within(
        "islands, last head: labels in the island less outside",
        ISLANDS,
        at_hops(1, LAST),
        at_hops(-1, LAST),
        "far above 0",
    ),
    _more(
        "complete less cycle, last head, shared",
        COMPLETE,
        CYCLE,
        shared(LAST),
        "about 0, if the complete graph is its baseline",
    ),
)


TARGETS = (
    *(
        _more(
            f"s = {s}: most confident less random, last head, shared",
            _base(s),
            f"choice,random,s={s}",
            shared(LAST),
        )
        for s in SKEWS
    ),
    *(
        _more(
            f"s = {s}: most confident less random, main head, shared",
            _base(s),
            f"choice,random,s={s}",
            shared(MAIN),
        )
        for s in SKEWS
    ),
    Ordering(
        "most confident less random, last head, shared: s = 100 less s = 0",
        ((_base(100), shared(LAST)), ("choice,random,s=0", shared(LAST))),
        (("choice,random,s=100", shared(LAST)), (_base(0), shared(LAST))),
        "above 0",
    ),
    _more("Δ = 2 less 1, last head, shared", "teachers,2", _base(100), shared(LAST)),
    _more("Δ = 3 less 2, last head, shared", "teachers,3", "teachers,2", shared(LAST)),
    _more("Δ = 4 less 3, last head, shared", "teachers,4", "teachers,3", shared(LAST), "about 0"),
    _more("Δ = 4 less 1, main head, private", "teachers,4", _base(100), private(MAIN), "about 0"),
    _more(
        "SL + SF less base, best auxiliary head, shared",
        "candidates,same_level_and_self",
        _base(100, 4),
        best_shared_of_others,
        "above 0 for one auxiliary head; which one is lost",
    ),
    _more(
        "All less SL + SF, last head, shared",
        "candidates,all",
        "candidates,same_level_and_self",
        shared(LAST),
    ),
    _more(
        "All+ less All, last head, shared", "candidates,all_plus", "candidates,all", shared(LAST)
    ),
    _more(
        "All+ longer less All+, last head, shared",
        "candidates,all_plus_longer",
        "candidates,all_plus",
        shared(LAST),
    ),
    _more("one head: skip rule less base, shared", "skip,one_head", _base(100, 1), shared(LAST)),
    _more(
        "four heads: skip rule less base, last head, shared",
        "candidates,self",
        _base(100, 4),
        shared(LAST),
        "about 0",
    ),
    _more(
        "four heads less one with the skip rule, last head, shared",
        _base(100, 4),
        "skip,one_head",
        shared(LAST),
    ),
    *(
        _more(
            f"{more} % public less {less} %, {name} head, shared",
            f"public,{more}",
            f"public,{less}",
            shared(head),
        )
        for less, more in itertools.pairwise(PUBLIC_SHARES)
        for name, head in (("main", MAIN), ("last", LAST))
    ),
)


LARGER = (
    _more(
        "small clients, last head, shared: beside a large one less among small ones",
        "larger,mhd",
        "larger,mhd_small_only",
        shared(LAST, OTHERS),
    ),
    Ordering(
        "small clients, shared: last head beside a large one less FedAvg among small ones",
        (("larger,mhd", shared(LAST, OTHERS)),),
        (("larger,fed_avg_small", shared(MAIN, OTHERS)),),
        "not stated",
    ),
    Ordering(
        "large client, last head, shared: MHD among small ones less alone",
        (("larger,mhd", shared(LAST, FIRST)),),
        (("larger,local_only_steps", shared(MAIN, FIRST)),),
        "not stated",
    ),
    _more(
        "client 0, last head, shared: large less small, MHD",
        "larger,mhd",
        "larger,mhd_small_only",
        shared(LAST, FIRST),
    ),
    Ordering(
        "client 0, shared: large in MHD, last head, less small in FedAvg",
        (("larger,mhd", shared(LAST, FIRST)),),
        (("larger,fed_avg_small", shared(MAIN, FIRST)),),
        "above 0",
    ),
)


def orderings() -> list[Ordering]:
    """All that are measured on CIFAR-100."""
    return [*COMPARED, *WEIGHTS, *PROFILES, *TOPOLOGY, *TARGETS, *LARGER]
