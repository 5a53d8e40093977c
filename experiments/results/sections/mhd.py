"""Multi-Headed Distillation: what every head knows, and the orderings that the paper states."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import heads as heads_lib
from experiments.configs.cifar100_mhd import (
    EMBEDDING_WEIGHT,
    EMBEDDING_WEIGHTS,
    HEAD_WEIGHT,
    HEAD_WEIGHTS,
    HEADS,
    PUBLIC_SHARES,
    SKEWS,
)
from experiments.heads import Heads
from experiments.results.records import Record
from experiments.results.sections.beneath import own_notes
from experiments.results.sections.cells import mean_difference
from experiments.results.sections.commands import full_lengths, planned, sweep
from experiments.results.sections.fed_md import STOPPING
from experiments.results.sections.markdown import Plots, image, listed, table

CIFAR, BESIDE_FED_MD = "cifar100_mhd", "cifar_mhd_fed_md"
EXPERIMENTS = (CIFAR, BESIDE_FED_MD)
SPLIT = "test"
GRAPHS = ("islands", "directed_cycle", "complete")

# (what a run's heads know) -> % of each seed, float [seeds]
Measure = Callable[[Heads], np.ndarray]
Term = tuple[str, Measure]  # run of CIFAR, what of it


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


def mhd(records: Sequence[Record], notes: Mapping[str, str], plots: Plots) -> list[str]:
    """The eight orderings of the paper, each with the tables and plots that it is read from."""
    found = {run: one for run in planned(CIFAR) if (one := _known(_record(records, CIFAR, run)))}
    parts = [
        "## Multi-Headed Distillation",
        "Clients of a graph without a server (Zhmoginov et al., 2023), scaled to CIFAR-100: eight "
        "clients with 25 of 100 labels as their own and a small CNN (`experiments/configs/"
        f"{CIFAR}.py`). *Private* accuracy is that on test images as frequent as the client's own "
        "labels, *shared* accuracy that on all test images; in %, of the last round, means over "
        "clients and seeds. Head 0 is the main one, which gets no distillation. Differences are in "
        "points, within seeds, with Student's t over the seeds (95 %). Seeds differ in first weights "
        "and batches; who has which labels and images, and who gets whose checkpoint, is the same for "
        "all. The text that this library was written from has lost the paper's numbers: what stands "
        "beside ours are the orderings that its words state. Lost too, and settled here: that the own "
        "head is a candidate in the base set, that *All* has two teachers, how pools begin, what public "
        "batches do to running statistics, and that the learning rate falls to zero.",
    ]
    if not found and not any(r.experiment in EXPERIMENTS for r in records):
        return [*parts, *(f"Not run.\n\n{sweep(each, planned(each))}" for each in EXPERIMENTS)]
    for title, body, orderings in (
        ("1. Alone, MHD, more public images, pooled examples", _compared, COMPARED),
        ("2. Weights of the two losses", _weights, WEIGHTS),
        ("3 and 4. Profiles of heads", _profiles, PROFILES),
        ("5. Graphs: how far knowledge travels", _graphs, TOPOLOGY),
        ("6. Choice of targets, teachers, candidates, public images", _targets, TARGETS),
        ("7. One larger model among small ones", _larger, LARGER),
    ):
        parts += [f"### {title}", *body(found, plots), *_orderings(found, orderings)]
    parts += ["### 8. Beside FedMD", *_beside_fed_md(records)]
    used = [r for e in EXPERIMENTS for run in planned(e) if (r := _record(records, e, run))]
    parts += [*full_lengths(used), *own_notes(used)]
    for experiment in EXPERIMENTS:
        done = {record.run for record in used if record.experiment == experiment}
        if missing := [run for run in planned(experiment) if run not in done]:
            parts.append(f"Not run, or not to the end:\n\n{sweep(experiment, missing)}")
        parts.append(notes.get(experiment, ""))
    return parts


class Known(NamedTuple):
    """What the heads of a run know after the last round, by seed."""

    seeds: tuple[int, ...]
    heads: Heads


Found = Mapping[str, Known]


def heads_of(record: Record) -> Heads | None:
    """What a record says of heads; of pooled examples, whose models are nobody's, shared accuracies."""
    if record.heads is not None:
        return Heads(**{name: np.asarray(values) for name, values in record.heads.items()})
    accuracies = [own[SPLIT]["accuracy"] for own in record.final.values() if SPLIT in own]
    if not accuracies:
        return None
    each = np.transpose(accuracies)[:, :, None]
    count = each.shape[1]
    return Heads(each, np.full((*each.shape, count), np.nan), np.zeros((count, count), int))


# ------------------------------------------------------------------------------- tables and plots


def _compared(found: Found, plots: Plots) -> list[str]:
    labels = {
        "separate": "alone",
        f"heads,{HEADS}": f"MHD, {HEADS} heads",
        "mhd_plus": "MHD, all images public, twice the rounds",
        "fed_avg": "FedAvg every 50 steps",
        "fed_avg_200": "FedAvg every 200 steps",
        "periodic": "PeriodicCodist",
        "fed_avg_longer": "FedAvg every 50 steps, twice the rounds",
        "pooled": "one model on all examples",
        "pooled_longer": "one model on all examples, twice the rounds",
    }
    rows = {}
    for skew in SKEWS:
        for name, label in labels.items():
            kind, *heads = name.split(",")
            rows[f"s = {skew}: {label}"] = ",".join([kind, f"s={skew}", *heads])
    return [_heads_table(found, rows)]


def _weights(found: Found, plots: Plots) -> list[str]:
    parts = [
        "One auxiliary head. Cells are *main head, head 1*; nothing trains head 1 where ν_aux is 0. "
        "The paper says that both losses help up to "
        "a threshold, that both together are best, and that one of them is the stronger one at s = 0, "
        "the other at s = 100; which of them is lost, so it is measured here."
    ]
    for skew in SKEWS:
        for name, measure in (("private", private), ("shared", shared)):
            rows = [
                [
                    f"ν_emb = {embedding}",
                    *(
                        _pair(found, weights_run(skew, embedding, head), measure, head > 0)
                        for head in HEAD_WEIGHTS
                    ),
                ]
                for embedding in EMBEDDING_WEIGHTS
            ]
            headings = [f"s = {skew}, {name}", *(f"ν_aux = {weight}" for weight in HEAD_WEIGHTS)]
            parts.append(table(headings, rows))
    rows = [
        [f"s = {skew}, {name}", *_gains(found, skew, measure)]
        for skew in SKEWS
        for name, measure in (("private", private(0)), ("shared", shared(0)))
    ]
    parts.append(
        "What the main head gains over no distillation, in the best cell of those with embeddings' loss "
        "alone, with predictions' loss alone, and with both; the weights beside it. The best of two, "
        "three and six cells are chosen by the numbers that are shown, which favours the last; the "
        "differences below are of cells chosen before."
    )
    parts.append(table(["", "embeddings alone", "predictions alone", "both"], rows))
    return parts


def _gains(found: Found, skew: int, measure: Measure) -> list[str]:
    """The best cells of the sweep."""
    none = found.get(weights_run(skew, 0, 0))
    cells = []
    for embeddings, predictions in ((True, False), (False, True), (True, True)):
        gains = {}
        for embedding in EMBEDDING_WEIGHTS:
            for head in HEAD_WEIGHTS:
                one = found.get(weights_run(skew, embedding, head))
                if one and none and (embedding > 0, head > 0) == (embeddings, predictions):
                    differences = _differences([(one, measure)], [(none, measure)])
                    if differences:
                        gains[embedding, head] = differences
        if not gains:
            cells.append("not run")
            continue
        best = max(gains, key=lambda weights: np.mean(gains[weights]))
        cells.append(f"{mean_difference(gains[best])} ({best[0]}, {best[1]})")
    return cells


def weights_run(skew: int, embedding: float, head: float) -> str:
    """The run of the sweep with these weights, one of which stands among the numbers of heads."""
    if (embedding, head) == (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        return f"heads,s={skew},1"
    return f"weights,s={skew},{embedding},{head}"


def _profiles(found: Found, plots: Plots) -> list[str]:
    runs = {
        f"s = {skew}: {m} head{'' if m == 1 else 's'}": f"heads,s={skew},{m}"
        for skew in SKEWS
        for m in (1, 2, 3, 4)
    }
    panels = {
        f"s = {skew}, {name}": {
            label.split(": ")[1]: by_head(found[run].heads)
            for label, run in runs.items()
            if label.startswith(f"s = {skew}:") and run in found
        }
        for skew in SKEWS
        for name, by_head in (("private", _private_by_head), ("shared", _shared_by_head))
    }
    parts = [_heads_table(found, runs)]
    if all(panels.values()):
        plots["mhd_profiles.png"] = lambda: heads_lib.profiles(panels)
        parts.append(image("mhd_profiles.png", "Accuracy by head, for one to four heads"))
    return parts


def _graphs(found: Found, plots: Plots) -> list[str]:
    """Four clients: a table and a picture clients x heads x hops of each graph."""
    parts = [
        "Four clients with 25 labels each, of which no two have one in common, s = 100. Columns: "
        "accuracy on the labels of clients so many hops away; *none*: no way leads there. The paper "
        "counts what lies between: its transitive teacher of 1 hop is 2 hops away here.",
        _heads_table(found, {name.replace("_", " "): f"graph,{name}" for name in GRAPHS}),
    ]
    shown = [found[f"graph,{name}"].heads for name in GRAPHS if f"graph,{name}" in found]
    most = max((100 * heads.on_others.mean(axis=0).max() for heads in shown), default=100.0)
    for name in GRAPHS:
        if not (one := found.get(f"graph,{name}")):
            continue
        travelled = heads_lib.by_hops(one.heads)
        distances = sorted(travelled, key=lambda hops: (hops < 0, hops))
        titles = ["none" if n < 0 else f"{n} hop{'s' * (n != 1)}" for n in distances]
        rows = [
            [title, *(f"{100 * travelled[hops][head]:.1f}" for hops in distances)]
            for head, title in enumerate(one.heads.names)
        ]
        file = f"mhd_graph_{name}.png"
        plots[file] = functools.partial(heads_lib.picture, one.heads, name.replace("_", " "), most)
        parts += [
            table([name.replace("_", " "), *titles], rows),
            image(file, f"Accuracy of each client's heads on each client's labels, {name}"),
        ]
    if any(f"graph,{name}" in found for name in GRAPHS):
        parts.append("In the pictures: the colour is the accuracy, the number the hops.")
    return parts


def _targets(found: Found, plots: Plots) -> list[str]:
    chosen = {
        f"s = {skew}: {label}": run
        for skew in SKEWS
        for label, run in (
            ("most confident target", f"heads,s={skew},{HEADS}"),
            ("random target", f"choice,random,s={skew}"),
        )
    }
    teachers = {
        f"Δ = {n}": f"teachers,{n}" if n > 1 else f"heads,s=100,{HEADS}" for n in (1, 2, 3, 4)
    }
    candidates = {
        "base": "heads,s=100,4",
        "SL": "candidates,same_level",
        "SF, the skip rule": "candidates,self",
        "SL + SF": "candidates,same_level_and_self",
        "All: SL + SF, Δ = 2": "candidates,all",
        "All+: all images public": "candidates,all_plus",
        "All+, twice the rounds": "candidates,all_plus_longer",
        "base, rate 0.03 for 0.1": "slower,base",
        "SL + SF, rate 0.03 for 0.1": "slower,same_level_and_self",
        "one head, base": "heads,s=100,1",
        "one head, skip rule": "skip,one_head",
    }
    public = {f"{share} % public": f"public,{share}" for share in PUBLIC_SHARES}
    return [
        _heads_table(found, chosen),
        f"Teachers per step, {HEADS} heads, s = 100:",
        _heads_table(found, teachers),
        "Candidates, four heads, s = 100:",
        _heads_table(found, candidates),
        "Public images, four heads, s = 100, 70 % of the training images private:",
        _heads_table(found, public),
    ]


FIRST, OTHERS = slice(0, 1), slice(1, None)


def _larger(found: Found, plots: Plots) -> list[str]:
    labels = {
        "mhd": "MHD, client 0 large",
        "mhd_small_only": "MHD, all small",
        "separate": "alone, client 0 large",
        "fed_avg_small": "FedAvg, all small",
    }
    measures = [
        (head, measure(head, clients))
        for clients in (FIRST, OTHERS)
        for measure in (private, shared)
        for head in (0, -1)
    ]
    rows = []
    for method, label in labels.items():
        one = found.get(f"larger,{method}")
        # Without auxiliary heads the last one is the main one.
        has_heads = one and len(one.heads.names) > 1
        values = [
            f"{measure(one.heads).mean():.1f}" if one and (head == 0 or has_heads) else ""
            for head, measure in measures
        ]
        rows.append([label if one else f"{label}: not run", *values])
    headings = [
        f"{who}, {what}, {head}"
        for who in ("client 0", "clients 1 to 3")
        for what in ("private", "shared")
        for head in ("main", "last")
    ]
    return [
        "Four clients with half of the labels each, three heads; the same data in all rows.",
        table(["", *headings], rows),
    ]


def _beside_fed_md(records: Sequence[Record]) -> list[str]:
    """Gap to the pooled bound, and the spread of the ten models, of both methods."""
    runs = {run: _record(records, BESIDE_FED_MD, run) for run in planned(BESIDE_FED_MD)}
    theirs, rows = runs["fed_md"], []
    # Method -> seed -> what; MHD's of the last head.
    gaps: dict[str, dict[int, float]] = {}
    spreads: dict[str, dict[int, float]] = {}
    bounds: dict[str, dict[int, float]] = {}

    def add(method, label, seeds, before, after, bound):
        rows.append([label, *_against_bound(before, after, bound)])
        gap = bound.mean(axis=1) - after.mean(axis=1)
        gaps[method] = dict(zip(seeds, gap.tolist(), strict=True))
        spreads[method] = dict(zip(seeds, _spread(after).tolist(), strict=True))
        bounds[method] = dict(zip(seeds, bound.mean(axis=1).tolist(), strict=True))

    if theirs and theirs.phases.get("pooled"):
        before = [each[SPLIT]["accuracy"][0] for each in theirs.curve.values() if SPLIT in each]
        others = (theirs.final, theirs.phases["pooled"])
        after, bound = (
            [each[SPLIT]["accuracy"] for each in models.values() if SPLIT in each]
            for models in others
        )
        each = (100 * np.transpose(values) for values in (before, after, bound))
        add("FedMD", "FedMD", theirs.seeds, *each)
    known = {run: _known(runs[run]) for run in ("mhd", "separate", "pooled")}
    if all(known.values()):
        seeds = sorted(set.intersection(*(set(one.seeds) for one in known.values())))
        own, alone, bound = (
            100 * one.heads.shared[[one.seeds.index(seed) for seed in seeds]]
            for one in known.values()
        )
        for head, name in enumerate(known["mhd"].heads.names):
            add("MHD", f"MHD, {name}", seeds, alone[:, :, 0], own[:, :, head], bound[:, :, 0])
    lines = []
    for text, values, more, less in (
        ("MHD's bound less FedMD's", bounds, "MHD", "FedMD"),
        ("FedMD's gap to its bound less that of MHD's last head", gaps, "FedMD", "MHD"),
        ("FedMD's spread of models less that of MHD's last head", spreads, "FedMD", "MHD"),
    ):
        both = sorted(set(values.get("FedMD", {})) & set(values.get("MHD", {})))
        differences = [values[more][seed] - values[less][seed] for seed in both]
        lines.append([text, mean_difference(differences) if both else "not run", "above 0"])
    parts = [
        "The ten networks and the data of the FedMD experiments at a size for a CPU: CIFAR-10 public, "
        f"six superclasses of CIFAR-100 private (`experiments/configs/{BESIDE_FED_MD}.py`). *Alone*: "
        "FedMD's parties after transfer learning, MHD's on their own images. *Bound*: on all "
        "parties' private examples, of which FedMD's starts from what the public data taught. "
        "*Spread*: standard deviation over the ten models.",
    ]
    if rows:
        parts.append(table(["", "Alone", "After", "Bound", "Gap", "Spread"], rows))
    if theirs:
        stopping = STOPPING[theirs.config.get("phases", {}).get("stopping")]
        parts.append(f"Before FedMD's rounds: {stopping[0].lower()}{stopping[1:]}")
    return [*parts, table(["Ordering", "Difference, points", "Paper"], lines)]


def _against_bound(before: np.ndarray, after: np.ndarray, bound: np.ndarray) -> list[str]:
    """Cells; arguments are in %, [seeds, models], seeds and models in any order."""
    means = [each.mean() for each in (before, after, bound)]
    return [f"{value:.1f}" for value in (*means, means[2] - means[1], _spread(after).mean())]


def _spread(accuracies: np.ndarray) -> np.ndarray:
    return accuracies.std(axis=1, ddof=1)


def _heads_table(found: Found, runs: Mapping[str, str]) -> str:
    """A row for each label and its run: private / shared accuracy of every head."""
    most = max((len(found[run].heads.names) for run in runs.values() if run in found), default=1)
    rows = []
    for label, run in runs.items():
        if run not in found:
            rows.append([label, "not run", *[""] * (most + 1)])
            continue
        seeds, heads = found[run]
        cells = [
            f"{own:.1f} / {every:.1f}" if np.isfinite(own) else f"{every:.1f}"
            for own, every in zip(_private_by_head(heads), _shared_by_head(heads), strict=True)
        ]
        spread = shared(-1)(heads)
        deviation = f"{spread.std(ddof=1):.2f}" if len(seeds) > 1 else ""
        rows.append([label, *cells, *[""] * (most - len(cells)), deviation, listed(seeds)])
    headings = ["private / shared", "main", *(f"head {k}" for k in range(1, most))]
    return table([*headings, "± of the last, shared", "Seeds"], rows)


def _private_by_head(heads: Heads) -> np.ndarray:
    return 100 * heads.private.mean(axis=(0, 1))


def _shared_by_head(heads: Heads) -> np.ndarray:
    return 100 * heads.shared.mean(axis=(0, 1))


def _pair(found: Found, run: str, measure: Callable[[int], Measure], is_trained: bool) -> str:
    if run not in found:
        return "not run"
    heads = (0, 1) if is_trained else (0,)
    return ", ".join(f"{measure(head)(found[run].heads).mean():.1f}" for head in heads)


# ------------------------------------------------------------------------------------- orderings

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
                ((f"separate,s={s}", shared(MAIN)),),
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
                for name, run in (("pooled examples", "pooled"), ("FedAvg", "fed_avg"))
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
        (("larger,separate", shared(MAIN, FIRST)),),
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


def _orderings(found: Found, rows: Iterable[Ordering]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    lines = []
    for one in rows:
        runs = [run for run, _ in (*one.plus, *one.less)]
        values = []
        if all(run in found for run in runs):
            plus, less = (
                [(found[run], measure) for run, measure in terms] for terms in (one.plus, one.less)
            )
            values = _differences(plus, less)
        lines.append([one.text, mean_difference(values) if values else "not run", one.paper])
    return [table(["Ordering", "Difference, points", "Paper"], lines)]


def _differences(
    plus: Sequence[tuple[Known, Measure]], less: Sequence[tuple[Known, Measure]]
) -> list[float]:
    """The sum of `plus` less that of `less`, in the seeds that all have."""
    totals: dict[int, float] = {}
    terms = [*((1, *term) for term in plus), *((-1, *term) for term in less)]
    common = set.intersection(*(set(known.seeds) for _, known, _ in terms))
    for sign, known, measure in terms:
        for seed, value in zip(known.seeds, measure(known.heads), strict=True):
            if seed in common:
                totals[seed] = totals.get(seed, 0.0) + sign * float(value)
    return [totals[seed] for seed in sorted(totals)]


def _known(record: Record | None) -> Known | None:
    heads = heads_of(record) if record else None
    return Known(tuple(record.seeds), heads) if record and heads else None


def _record(records: Sequence[Record], experiment: str, run: str) -> Record | None:
    """The run's finished record with most rounds, of these most seeds, then the newest, or None."""
    found = [r for r in records if (r.experiment, r.run) == (experiment, run) and r.finished]
    return max(found, key=lambda r: (r.rounds, len(r.seeds), r.date or ""), default=None)
