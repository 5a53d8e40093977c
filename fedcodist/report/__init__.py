"""Table, plots and a single HTML file from any set of run folders.

    python -m fedcodist.report RUN [RUN ...] [--output DIR] [--title TITLE] [--metric NAME]

A RUN is a run folder or a folder that contains some. Runs that differ only in their seed are one method:
the report gives its mean and standard deviation over the seeds.

The modules in reading order:

- `runs` reads a run folder, `Run`, with the evaluations of each model, split and seed, `Series`.
- `collection` groups runs that differ only in their seed into a `Method`, and methods into a
  `Collection`. `settings` compares their settings.
- `accuracy_table`, `plots` and `page` show a `Collection`; modules named `*_plot` draw one figure each.
- `costs` has the `Costs` of a run, `flops` its FLOPs. `entries` joins costs and quality of a model into
  an `Entry`. `ranking` orders entries, and `ranking_table` shows them.
- `tables_domains`, `tables_heads` and `tables_parties` are commands for papers' own tables.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fedcodist.config.command_line import Parser
from fedcodist.report.accuracy_table import table
from fedcodist.report.collection import Collection, collect, default_title
from fedcodist.report.page import page
from fedcodist.report.plots import INSTALL_PLOTS, write_plots
from fedcodist.report.ranking_table import RankingTable, write_ranking


class ReportFiles(NamedTuple):
    """The files of a report. There are no plots without matplotlib or without data to plot."""

    html: Path
    plots: tuple[Path, ...]
    ranking: tuple[Path, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 if nothing can be reported or written."""
    parser = Parser(
        prog="python -m fedcodist.report",
        description="Table, plots and a single HTML file from any set of run folders.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or above")
    parser.add_argument("--output", type=Path, help="where to write (default: beside the runs)")
    parser.add_argument("--title", help="heading (default: the experiments' names)")
    parser.add_argument(
        "--metric", help="what is shown (default: accuracy or, where no run has it, another one)"
    )
    options = parser.parse_args(arguments)
    try:
        collection = collect(options.runs, options.metric)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return show_report(collection, options.output or default_output(options.runs), options.title)


def show_report(
    collection: Collection,
    output: Path,
    title: str | None = None,
    ranking: RankingTable | None = None,
) -> int:
    """Prints the table and writes the report; returns the exit status: 0, or 2 if writing fails."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    title = title or default_title(collection)
    console.print(table(collection, title))
    for note in collection.notes:
        _say(console, f"note: {note}")
    try:
        files = write_report(collection, output, title, ranking)
    except OSError as error:
        print(f"report: cannot write to {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if not files.plots:
        _say(console, INSTALL_PLOTS)
    for path in (*files.plots, *files.ranking, files.html):
        _say(console, f"wrote {path}")
    return 0


def write_report(
    collection: Collection,
    output: Path | str,
    title: str = "",
    ranking: RankingTable | None = None,
) -> ReportFiles:
    """Writes report.html and plots of accuracy, by rounds, bytes and epsilon, of the loss, and by label.

    Where the collection has another metric, plots of accuracy are of this one and have its name. A plot
    without data is left out, and so are all plots without matplotlib. The HTML file contains the plots
    and refers to no other file. A ranking is on top of it, and in ranking.md and ranking.json.

    Raises:
      OSError: `output` cannot be written.
    """
    output = Path(output)
    title = title or default_title(collection)
    output.mkdir(parents=True, exist_ok=True)
    plots = write_plots(collection, output)
    html = output / "report.html"
    html.write_text(page(collection, title, plots, ranking), encoding="utf-8")
    return ReportFiles(html, tuple(plots), write_ranking(ranking, output) if ranking else ())


def default_output(paths: Sequence[Path]) -> Path:
    """The path itself if there is only one, otherwise the deepest folder that contains all paths."""
    if len(paths) == 1:
        return paths[0]
    above = Path(os.path.commonpath([path.resolve() for path in paths]))
    current = Path.cwd()
    if above == Path(above.anchor):
        return Path()
    return above.relative_to(current) if above.is_relative_to(current) else above


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
