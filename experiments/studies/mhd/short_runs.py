"""The sections of runs on CIFAR-100 that are far shorter than the paper's, and so decide nothing."""

import functools
from collections.abc import Callable

import numpy as np

from experiments.configs.cifar100_mhd import EMBEDDING_WEIGHTS, HEAD_WEIGHTS, SKEWS
from experiments.studies.mhd.differences import differences_of
from experiments.studies.mhd.heads_table import ROWS, heads_table, private_by_head, shared_by_head
from experiments.studies.mhd.known import KnownRuns
from experiments.studies.mhd.orderings import FIRST, OTHERS, Measure, private, shared, weights_run
from experiments.studies.pages import Notes, Plots
from experiments.studies.sections.cells import NOT_RUN
from experiments.studies.sections.markdown import image, table
from fedcodist.report import tables_heads as heads_lib
from fedcodist.report.spread import mean_difference

GRAPHS = ("islands", "directed_cycle", "complete")


def _compared(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    return [heads_table(known, ROWS["compared"])]


def _weights(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    parts = []
    for skew in SKEWS:
        for name, measure in (("private", private), ("shared", shared)):
            rows = [
                [
                    f"ν_emb = {embedding}",
                    *(
                        _pair(known, weights_run(skew, embedding, head), measure, head > 0)
                        for head in HEAD_WEIGHTS
                    ),
                ]
                for embedding in EMBEDDING_WEIGHTS
            ]
            headings = [f"s = {skew}, {name}", *(f"ν_aux = {weight}" for weight in HEAD_WEIGHTS)]
            parts.append(table(headings, rows))
    rows = [
        [f"s = {skew}, {name}", *_gains(known, skew, measure)]
        for skew in SKEWS
        for name, measure in (("private", private(0)), ("shared", shared(0)))
    ]
    parts.append(notes["Best weights"])
    parts.append(table(["", "embeddings alone", "predictions alone", "both"], rows))
    return parts


def _gains(known: KnownRuns, skew: int, measure: Measure) -> list[str]:
    """The best cells of the sweep."""
    none = known.get(weights_run(skew, 0, 0))
    cells = []
    for embeddings, predictions in ((True, False), (False, True), (True, True)):
        gains = {}
        for embedding in EMBEDDING_WEIGHTS:
            for head in HEAD_WEIGHTS:
                cell = known.get(weights_run(skew, embedding, head))
                if cell and none and (embedding > 0, head > 0) == (embeddings, predictions):
                    differences = differences_of([(cell, measure)], [(none, measure)])
                    if differences:
                        gains[embedding, head] = differences
        if not gains:
            cells.append(NOT_RUN)
            continue
        best = max(gains, key=lambda weights: np.mean(gains[weights]))
        cells.append(f"{mean_difference(gains[best])} ({best[0]}, {best[1]})")
    return cells


def _pair(known: KnownRuns, run: str, measure: Callable[[int], Measure], is_trained: bool) -> str:
    if run not in known:
        return NOT_RUN
    heads = (0, 1) if is_trained else (0,)
    return ", ".join(f"{measure(head)(known[run].heads).mean():.1f}" for head in heads)


def _profiles(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    runs = ROWS["profiles"]
    panels = {
        f"s = {skew}, {name}": {
            label.split(": ")[1]: by_head(known[run].heads)
            for label, run in runs.items()
            if label.startswith(f"s = {skew}:") and run in known
        }
        for skew in SKEWS
        for name, by_head in (("private", private_by_head), ("shared", shared_by_head))
    }
    parts = [heads_table(known, runs)]
    if all(panels.values()):
        plots["mhd_profiles.png"] = lambda: heads_lib.profiles(panels)
        parts.append(image("mhd_profiles.png", "Accuracy by head, for one to four heads"))
    return parts


def _graphs(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    """For four clients, a table and a picture (clients x heads x hops) of each graph."""
    parts = [heads_table(known, ROWS["graphs"])]
    shown = [known[f"graph,{name}"].heads for name in GRAPHS if f"graph,{name}" in known]
    most = max((100 * heads.on_others.mean(axis=0).max() for heads in shown), default=100.0)
    for name in GRAPHS:
        if not (shown_run := known.get(f"graph,{name}")):
            continue
        travelled = heads_lib.by_hops(shown_run.heads)
        distances = sorted(travelled, key=lambda hops: (hops < 0, hops))
        titles = ["none" if n < 0 else f"{n} hop{'s' * (n != 1)}" for n in distances]
        rows = [
            [title, *(f"{100 * travelled[hops][head]:.1f}" for hops in distances)]
            for head, title in enumerate(shown_run.heads.names)
        ]
        file = f"mhd_graph_{name}.png"
        plots[file] = functools.partial(
            heads_lib.picture, shown_run.heads, name.replace("_", " "), most
        )
        parts += [
            table([name.replace("_", " "), *titles], rows),
            image(file, f"Accuracy of each client's heads on each client's labels, {name}"),
        ]
    return parts


def _targets(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    return [
        heads_table(known, ROWS["choice"]),
        "**Teachers per step**, three heads, s = 100",
        heads_table(known, ROWS["teachers"]),
        "**Candidates**, four heads, s = 100",
        heads_table(known, ROWS["candidates"]),
        "**Public images**, four heads, s = 100, 70 % of the training images private",
        heads_table(known, ROWS["public"]),
    ]


def _larger(known: KnownRuns, notes: Notes, plots: Plots) -> list[str]:
    measures = [
        (head, measure(head, clients))
        for clients in (FIRST, OTHERS)
        for measure in (private, shared)
        for head in (0, -1)
    ]
    rows = []
    for label, run in ROWS["larger"].items():
        shown = known.get(run)
        # Without auxiliary heads the last one is the main one.
        has_heads = shown and len(shown.heads.names) > 1
        values = [
            f"{measure(shown.heads).mean():.1f}" if shown and (head == 0 or has_heads) else ""
            for head, measure in measures
        ]
        rows.append([label if shown else f"{label}: not run", *values])
    headings = [
        f"{who}, {what}, {head}"
        for who in ("client 0", "clients 1 to 3")
        for what in ("private", "shared")
        for head in ("main", "last")
    ]
    return [table(["", *headings], rows)]


SECTIONS = {
    "compared": ("Alone, MHD, more public images, pooled examples", _compared),
    "weights": ("Weights of the two losses", _weights),
    "profiles": ("Profiles of heads", _profiles),
    "graphs": ("Graphs: how far knowledge travels", _graphs),
    "targets": ("Choice of targets, teachers, candidates, public images", _targets),
    "larger": ("One larger model among small ones", _larger),
}
