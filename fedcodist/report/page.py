"""The single HTML file: table, plots, differences of settings, runs, environment, configs."""

import base64
import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from fedcodist.report.accuracy_table import (
    caption_of,
    number_cells,
    number_headings,
    result_rows,
    statistics_of,
)
from fedcodist.report.cells import metric_name, percent, split_name
from fedcodist.report.collection import (
    Collection,
    Method,
    Statistic,
    last_evaluations,
    progress_of,
    statistic_of,
)
from fedcodist.report.plots import INSTALL_PLOTS
from fedcodist.report.ranking_table import TEXT_COLUMNS, RankingTable
from fedcodist.report.runs import Run, mapping_of, number_of
from fedcodist.report.settings import (
    differing_keys,
    distinct,
    flatten,
    settings_of_run,
    shown_setting,
)

# Colours have names, so that the dark mode changes them in one place. Plots keep a white background.
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --quiet: #5b6470; --page: #f5f6f8; --card: #fff;
  --edge: #e1e4e8; --rule: #c9ced6; --line: #eceef1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e6ea; --quiet: #a2abb6; --page: #14171b; --card: #1d2126; --edge: #31373e;
    --rule: #4a525c; --line: #2a3037; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0;
  overflow-wrap: break-word; -webkit-text-size-adjust: 100%; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 0 0 .7rem; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; margin: 1.2rem 0;
  padding: 1.1rem 1.3rem; }
.wide { overflow-x: auto; }
.quiet { color: var(--quiet); font-size: .88rem; margin: .4rem 0 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid var(--rule); vertical-align: bottom; }
tr + tr td { border-top: 1px solid var(--line); }
tbody tr.first td { border-top-color: var(--rule); }
.number { text-align: right; white-space: nowrap; }
code, pre { font: .86rem/1.45 ui-monospace, monospace; }
pre { background: var(--page); padding: .8rem; border-radius: 6px; overflow-x: auto; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; background: #fff;
  border-radius: 6px; }
summary { cursor: pointer; }
ul { margin: .3rem 0 0; padding-left: 1.2rem; }
@media (max-width: 40rem) {
  body { font-size: 14px; }
  main { padding: 1rem .5rem 2rem; }
  section { padding: .8rem .7rem; margin: .7rem 0; border-radius: 6px; }
  h1 { font-size: 1.3rem; }
  th, td { padding-right: .7rem; }
}
"""


_PLOT_HEADINGS = {
    "loss": "Loss over the rounds",
    "per_label_accuracy": "Accuracy per label",
    "clients": "Accuracy of each client on its own examples",
}


def page(
    collection: Collection, title: str, plots: Sequence[Path], ranking: RankingTable | None = None
) -> str:
    """The whole document as text; it refers to no other file."""
    runs = [run for method in collection.methods for run in method.runs]
    sections = [
        _section(f"Ranking: {ranking.title}", _ranking_html(ranking)) if ranking else "",
        _section("Results", _results_html(collection)),
        *(_plot_html(path, collection.metric) for path in plots),
        *([] if plots else [_section("Plots", f"<p>{escape(INSTALL_PLOTS)}</p>")]),
        _section("Accuracy over the clients", _per_client_html(collection)),
        _section("What the methods' settings differ in", _differences_html(collection)),
        _section("Runs", _runs_html(collection)),
        _section("Notes", _notes_html(collection)),
        _section("Environment", _environment_html(runs)),
        _section("Full configs", _configs_html(collection)),
    ]
    counted = (
        f"{_plural(len(collection.methods), 'method')}, {_plural(len(collection.models), 'model')},"
        f" {_plural(len(runs), 'run')}, written {datetime.now():%Y-%m-%d %H:%M}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="quiet">{counted}</p>'
        + "".join(sections)
        + "</main></body></html>\n"
    )


def _plot_heading(name: str, metric: str) -> str:
    of_the_metric = {
        metric: "over the rounds",
        f"{metric}_by_bytes": "against bytes exchanged",
        f"{metric}_by_epsilon": "against epsilon",
    }
    return _PLOT_HEADINGS.get(name) or f"{metric_name(metric)} {of_the_metric[name]}"


def _plot_html(path: Path, metric: str) -> str:
    heading = _plot_heading(path.stem, metric)
    return _section(heading, _image(path, heading))


def _section(heading: str, body: str) -> str:
    return f"\n<section><h2>{escape(heading)}</h2>{body}</section>" if body else ""


def _ranking_html(ranking: RankingTable) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in ranking.notes)
    drawn = _table_html(ranking.headings, ranking.rows, TEXT_COLUMNS)
    return f'{drawn}<ul class="quiet">{notes}</ul>'


def _results_html(collection: Collection) -> str:
    rows = result_rows(collection)
    several = any(statistic.seeds > 1 for statistic in statistics_of(rows))
    headings = ["Method", "Model", *number_headings(collection, several)]
    cells = [[row.method, row.model, *number_cells(row, collection, several)] for row in rows]
    return f'{_table_html(headings, cells)}<p class="quiet">{escape(caption_of(rows))}</p>'


def _per_client_html(collection: Collection) -> str:
    shown = {
        "accuracy_mean": "mean",
        "accuracy_std": "deviation",
        "accuracy_p10": "10th percentile",
        "accuracy_worst_tenth": "worst tenth",
        "accuracy_min": "minimum",
    }
    cells = []
    for method in collection.methods:
        for model in collection.models:
            for split in collection.splits:
                values = _per_client(method, model, split, list(shown))
                if values:
                    numbers = [percent(values.get(key)) for key in shown]
                    cells.append([method.label, model, split_name(split), *numbers])
    headings = ["Method", "Model", "Split", *(f"Accuracy, %\n{name}" for name in shown.values())]
    return _table_html(headings, cells, texts=3) if cells else ""


def _per_client(
    method: Method, model: str, split: str, metrics: Sequence[str]
) -> dict[str, Statistic]:
    """The metrics over clients after the last round, with their means over the seeds."""
    of_seeds = []
    for record in last_evaluations(method, model, split):
        # Clients are evaluated on their own examples, and metrics are means over clients.
        if "clients" in record:
            of_seeds.append({**record, "accuracy_mean": record.get("accuracy")})
        elif per_client := mapping_of(record, "per_client"):
            of_seeds.append(per_client)
    result = {}
    for metric in metrics:
        values = [value for shares in of_seeds if (value := number_of(shares, metric)) is not None]
        if values:
            result[metric] = statistic_of(values)
    return result


def _differences_html(collection: Collection) -> str:
    settings = [settings_of_run(method.runs[0]) for method in collection.methods]
    keys = differing_keys(settings)
    if not keys:
        return ""
    headings = ["Setting", *(method.label for method in collection.methods)]
    cells = [[key, *(shown_setting(flat, key) for flat in settings)] for key in keys]
    return _table_html(headings, cells, texts=len(headings))


def _runs_html(collection: Collection) -> str:
    cells = []
    for method in collection.methods:
        for run in method.runs:
            seeds = sorted({series.seed for series in run.records})
            seconds = number_of(run.summary, "seconds")
            state = "finished" if run.finished else "unfinished"
            cells.append(
                [
                    method.label,
                    str(run.config.get("name") or "–"),
                    str(run.folder),
                    f"{state}, {progress_of(run)}",
                    ", ".join(map(str, seeds)),
                    "–" if seconds is None else f"{seconds:,.1f} s",
                ]
            )
    return _table_html(["Method", "Experiment", "Folder", "State", "Seeds", "Time"], cells, texts=5)


def _notes_html(collection: Collection) -> str:
    if not collection.notes:
        return ""
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in collection.notes)}</ul>"


def _environment_html(runs: Sequence[Run]) -> str:
    flat = [flatten(run.environment) for run in runs if run.environment]
    cells = []
    for key in distinct(key for settings in flat for key in settings):
        values = distinct(shown_setting(settings, key) for settings in flat if key in settings)
        more = f"\nand {len(values) - 4} more" if len(values) > 4 else ""
        cells.append([key, "\n".join(values[:4]) + more])
    return _table_html(["", "Value (all that occur among the runs)"], cells, texts=2)


def _configs_html(collection: Collection) -> str:
    return "".join(
        f"<details><summary>{escape(method.label)} · {escape(str(run.folder))}</summary>"
        f"<pre>{escape(json.dumps(run.config, indent=2))}</pre></details>"
        for method in collection.methods
        for run in method.runs
    )


def _table_html(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 2) -> str:
    """A table whose first `texts` columns are text and whose others are numbers."""
    if not rows:
        return ""

    def cell(tag: str, index: int, text: str) -> str:
        kind = "" if index < texts else ' class="number"'
        return f"<{tag}{kind}>{escape(text).replace(chr(10), '<br>')}</{tag}>"

    head = "".join(cell("th", index, text) for index, text in enumerate(headings))
    body = []
    blocks = len({row[0] for row in rows}) < len(rows)
    for number, row in enumerate(rows):
        new = blocks and number > 0 and row[0] != rows[number - 1][0]
        start = '<tr class="first">' if new else "<tr>"
        cells = "".join(cell("td", index, text) for index, text in enumerate(row))
        body.append(f"{start}{cells}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _image(path: Path, alternative: str) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(alternative)}" src="data:image/png;base64,{encoded}">'


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
