"""Accuracies of every head of every client: private, shared, and by distance in the graph.

    python -m fedcodist.report.tables_heads RUN [RUN ...] [--clients] [--picture FILE]

Shared accuracy is measured on all test examples. For private accuracy, labels are weighted by their
frequency in the client's data. The second table has a client's accuracy on the private labels of other
clients by their distance in the graph; the picture has it for all pairs of clients. With --clients both
accuracies of every client follow.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.command_line import Parser
from fedcodist.config.registry import DECENTRALISED
from fedcodist.core.extras import check_installed
from fedcodist.core.metric_kinds import decimal
from fedcodist.report.plots import as_written
from fedcodist.report.runs import read_lines, read_object
from fedcodist.report.styles import COLOURS, MARKERS


class Heads(NamedTuple):
    """Accuracies after the last round, in the order of clients.

    Attributes:
      shared: float [seeds, clients, heads], the main head first.
      on_others: float [seeds, clients, heads, clients], on the private labels of the client of the last
        axis. The diagonal is the private accuracy.
      hops: int [clients, clients], distances in the graph.
    """

    shared: np.ndarray
    on_others: np.ndarray
    hops: np.ndarray

    @property
    def private(self) -> np.ndarray:
        """Private accuracies, float [seeds, clients, heads]."""
        return np.moveaxis(np.diagonal(self.on_others, axis1=1, axis2=3), -1, 1)

    @property
    def names(self) -> list[str]:
        """Names of the heads."""
        return ["main", *(f"head {k}" for k in range(1, self.shared.shape[2]))]


def read_heads(folder: Path) -> Heads:
    """Reads a finished run of a method of `fedcodist.config.graph_methods`.

    Raises:
      ValueError: the folder holds no such run.
    """
    # Imported late because they import JAX: a mistyped option is reported at once.
    from fedcodist.algorithms.graph import graphs
    from fedcodist.algorithms.parties.groups import party_names
    from fedcodist.config.data import load_data
    from fedcodist.config.division import divided
    from fedcodist.config.graph_methods import decentralised_groups, graph_of
    from fedcodist.datasets.primary_labels import accuracy_on_labels, label_frequencies
    from fedcodist.models.multi_headed import accuracy_name

    try:
        config = ConfigDict(read_object(folder / "config.json"))
        records = [record for _, record in read_lines(folder / "metrics.jsonl")]
        has_ended = (folder / "summary.json").is_file()
        summary = read_object(folder / "summary.json") if has_ended else {}
    except ValueError as error:
        raise ValueError(f"{folder} holds no run: {error}") from error
    if config.algorithm.name not in DECENTRALISED:
        raise ValueError(
            f"{folder} holds a run of {config.algorithm.name}, which has no such clients."
        )
    splits = config.evaluation.final_splits or config.evaluation.splits
    if not splits:
        raise ValueError(f"{folder} holds a run that was evaluated on clients' own examples alone.")
    split = splits[0]
    config = divided(config)
    data = load_data(config.data)
    groups = decentralised_groups(config, data)
    places = {
        party: client
        for name, names in party_names(groups).items()
        for party, client in zip(names, groups[name].clients.tolist(), strict=True)
    }
    rounds = summary.get("rounds", config.rounds)  # a callback may have stopped the run
    last = [record for record in records if record["round"] == rounds and record["split"] == split]
    if not last:
        raise ValueError(f"{folder} holds a run that has not finished.")
    heads = 1 + sum(key.startswith("accuracy_head_") for key in last[0])
    classes = len(last[0]["per_label_accuracy"])
    per_label = np.zeros((config.seeds, len(places), heads, classes))
    shared = np.zeros(per_label.shape[:-1])
    for record in last:
        index = record["seed"] - config.seed, places[record["model"]]
        for head in range(heads):
            name = accuracy_name(head)
            per_label[(*index, head)] = np.array(record[f"per_label_{name}"], float)
            shared[(*index, head)] = math.nan if record[name] is None else record[name]
    frequencies = label_frequencies(data.splits["train"], classes)
    graph = graph_of(config, len(places))
    if graph.ndim == 3:  # a graph that changes: the union of the run's edges
        graph = np.any(graph[:rounds], axis=0)
    on_others = accuracy_on_labels(per_label[..., None, :], frequencies)
    return Heads(shared, on_others, graphs.hops(graph))


def recorded_heads(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The results of heads for a run's archive, shares to five digits; None for other methods.

    Args:
      folder: of a finished run.
      config: the run's config.

    Raises:
      ValueError: the data of the run are missing; its clients' labels are needed.
    """
    if config.get("algorithm", {}).get("name") not in DECENTRALISED:
        return None
    heads = read_heads(folder)._asdict()
    return {name: np.round(values, 5).tolist() for name, values in heads.items()}


def by_hops(heads: Heads) -> dict[int, np.ndarray]:
    """Hops -> accuracy on the private labels of clients at this distance, float [heads]; -1: no path."""
    return {int(hops): at_hops(heads, hops).mean(axis=0) for hops in np.unique(heads.hops)}


def at_hops(heads: Heads, hops: int) -> np.ndarray:
    """Accuracy on the private labels of clients at a distance, float [seeds, heads]; -1: no path."""
    return np.moveaxis(heads.on_others, 2, -1)[:, heads.hops == hops].mean(axis=1)


def tables(heads: Heads) -> str:
    """Both tables in per cent, means over clients and seeds."""
    lines = ["            private     shared"]
    for head, name in enumerate(heads.names):
        values = [accuracies[:, :, head].mean() for accuracies in (heads.private, heads.shared)]
        lines.append(f"{name:<8}" + "".join(f"{decimal(100 * value):>11}" for value in values))
    travelled = by_hops(heads)
    distances = sorted(travelled, key=lambda hops: (hops < 0, hops))
    titles = ["none" if hops < 0 else str(hops) for hops in distances]
    lines += ["", "hops    " + "".join(f"{title:>11}" for title in titles)]
    for head, name in enumerate(heads.names):
        values = [travelled[hops][head] for hops in distances]
        lines.append(f"{name:<8}" + "".join(f"{decimal(100 * value):>11}" for value in values))
    return "\n".join(lines)


def table_of_clients(heads: Heads) -> str:
    """Every client's private / shared accuracy in per cent by head, means over seeds."""
    private, shared = (
        100 * accuracies.mean(axis=0) for accuracies in (heads.private, heads.shared)
    )
    lines = ["client  " + "".join(f"{name:>15}" for name in heads.names)]
    for client in range(len(shared)):
        both = zip(private[client], shared[client], strict=True)
        cells = [f"{decimal(a)} / {decimal(b)}" for a, b in both]
        lines.append(f"{client:<8}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def picture(heads: Heads, title: str = "", brightest: float = 100.0) -> Any:
    """A figure, per head: every client's accuracy on every client's private labels, and by hops.

    A cell shows the accuracy in % and, in brackets, the number of hops to the other client.

    Args:
      heads: of a run.
      title: of the figure.
      brightest: accuracy in % of the brightest colour, the same for all figures that are compared.
    """
    count = heads.shared.shape[2]
    figure, (*maps, by_distance) = _panels(count + 1, 2.9)
    image = None
    for head, axis in enumerate(maps):
        accuracies = 100 * heads.on_others[:, :, head].mean(axis=0)
        image = axis.imshow(accuracies, vmin=0, vmax=brightest)
        axis.set_title("main head" if head == 0 else f"head {head}", fontsize=10)
        axis.set_xlabel("labels of client")
        axis.set_ylabel("model of client")
        axis.set_xticks(range(len(accuracies)))
        axis.set_yticks(range(len(accuracies)))
        for (client, other), hops in np.ndenumerate(heads.hops):
            distance = f"({hops})" if hops >= 0 else "(–)"
            axis.text(
                other,
                client,
                f"{accuracies[client, other]:.0f}\n{distance}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if accuracies[client, other] < brightest / 2 else "black",
            )
    figure.colorbar(image, ax=maps, label="accuracy, %", shrink=0.7)
    travelled = by_hops(heads)
    distances = sorted(travelled, key=lambda hops: (hops < 0, hops))
    for head in range(count):
        by_distance.plot(
            range(len(distances)),
            [100 * travelled[hops][head] for hops in distances],
            color=COLOURS[head % len(COLOURS)],
            marker=MARKERS[head % len(MARKERS)],
            label="main head" if head == 0 else f"head {head}",
        )
    titles = ["no way" if hops < 0 else str(hops) for hops in distances]
    by_distance.set_xticks(range(len(distances)), titles)
    by_distance.set_xlabel("hops")
    by_distance.set_ylabel("accuracy, %")
    by_distance.legend(fontsize=7)
    about = "In a cell: accuracy in % (hops to the client whose labels they are)"
    figure.suptitle(as_written(f"{title}. {about}" if title else about), fontsize=10)
    return figure


def profiles(panels: Mapping[str, Mapping[str, np.ndarray]]) -> Any:
    """A figure: accuracy in % by head, a panel for each title, a line for each label, float [heads]."""
    figure, axes = _panels(len(panels), 2.8, per_row=2)
    # A line that one panel lacks keeps its colour in the others.
    order = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    shown: dict[str, Any] = {}
    for plot, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, values in lines.items():
            number = order.index(label)
            (shown[label],) = plot.plot(
                range(len(values)),
                values,
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=5,
                linewidth=1.6,
            )
        num_heads = max(map(len, lines.values()))
        plot.set_xticks(range(num_heads), ["main", *map(str, range(1, num_heads))])
        plot.set_title(as_written(title), fontsize=10)
        plot.set_xlabel("head")
        plot.set_ylabel("accuracy (%)")
        plot.grid(color="0.9", linewidth=0.8)
    figure.legend(
        list(shown.values()),
        [as_written(label) for label in shown],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    return figure


def _panels(count: int, height: float, per_row: int = 3) -> tuple[Any, list[Any]]:
    """A figure without a display and its axes, at most `per_row` in a row."""
    from matplotlib.figure import Figure

    columns = min(count, per_row)
    rows = -(-count // columns)
    figure = Figure(figsize=(2.9 * columns + 0.6, height * rows + 0.3), layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for surplus in every[count:]:
        surplus.remove()
    return figure, every[:count]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 without matplotlib, or 2 for a mistake or without any result.

    Folders without such a run, such as one of centralised training, are named and left out.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--clients", action="store_true", help="every client's accuracies too")
    parser.add_argument("--picture", type=Path, help="of the first run that is shown")
    settings = parser.parse_args(arguments)
    try:
        if settings.picture is not None:
            check_installed("--picture", "matplotlib", "plot")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shown = 0
    for run in settings.runs:
        try:
            heads = read_heads(run)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        print(f"{run}\n{tables(heads)}\n")
        if settings.clients:
            print(f"{table_of_clients(heads)}\n")
        shown += 1
        if settings.picture and shown == 1:
            try:
                picture(heads, run.name).savefig(settings.picture)
            except (ValueError, OSError) as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
    return 0 if shown else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
