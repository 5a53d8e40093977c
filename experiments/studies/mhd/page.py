"""Multi-Headed Distillation: what every head knows, and the orderings that the paper states."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.configs.cifar100_mhd import (
    EMBEDDING_WEIGHTS,
    HEAD_WEIGHTS,
    HEADS,
    PUBLIC_SHARES,
    SKEWS,
)
from experiments.studies.mhd.orderings import (
    COMPARED,
    FIRST,
    LARGER,
    OTHERS,
    PROFILES,
    TARGETS,
    TOPOLOGY,
    WEIGHTS,
    Measure,
    Ordering,
    private,
    shared,
    weights_run,
)
from experiments.studies.records import Record
from experiments.studies.sections.cells import mean_difference
from experiments.studies.sections.commands import full_lengths, planned, sweep
from experiments.studies.sections.footnotes import own_notes
from experiments.studies.sections.markdown import Plots, image, listed, table
from fedcodist.report import tables_heads as heads_lib
from fedcodist.report.tables_heads import Heads
from fedcodist.report.tables_parties import STOPPING

CIFAR, BESIDE_FED_MD = "cifar100_mhd", "cifar_mhd_fed_md"
EXPERIMENTS = (CIFAR, BESIDE_FED_MD)
SPLIT = "test"
GRAPHS = ("islands", "directed_cycle", "complete")


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
        "local_only_steps": "alone",
        f"heads,{HEADS}": f"MHD, {HEADS} heads",
        "mhd_plus": "MHD, all images public, twice the rounds",
        "fed_avg": "FedAvg every 50 steps",
        "fed_avg_200": "FedAvg every 200 steps",
        "periodic": "PeriodicCodist",
        "fed_avg_longer": "FedAvg every 50 steps, twice the rounds",
        "centralised": "one model on all examples",
        "centralised_longer": "one model on all examples, twice the rounds",
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


def _larger(found: Found, plots: Plots) -> list[str]:
    labels = {
        "mhd": "MHD, client 0 large",
        "mhd_small_only": "MHD, all small",
        "local_only_steps": "alone, client 0 large",
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

    if theirs and theirs.phases.get("centralised"):
        before = [each[SPLIT]["accuracy"][0] for each in theirs.curve.values() if SPLIT in each]
        others = (theirs.final, theirs.phases["centralised"])
        after, bound = (
            [each[SPLIT]["accuracy"] for each in models.values() if SPLIT in each]
            for models in others
        )
        each = (100 * np.transpose(values) for values in (before, after, bound))
        add("FedMD", "FedMD", theirs.seeds, *each)
    known = {run: _known(runs[run]) for run in ("mhd", "local_only_steps", "centralised")}
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
