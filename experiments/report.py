"""Table, plots and a single HTML file from any set of run folders.

    python -m experiments.report RUN [RUN ...] [--output DIR] [--title TITLE]

A RUN is a run folder or a folder above some. Runs that differ only in their seed are one method:
the report gives its mean and standard deviation over the seeds.
"""

import argparse
import base64
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.methods import BASELINE, METHOD_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INSTALL_PLOTS = "no plots: matplotlib is missing, install it with: pip install 'fedcodist[plot]'"

# What two runs of one method may differ in: which seed, and what the run is called.
NOT_SETTINGS = ("seed", "seeds", "name", "run", "workdir")
RUN_CONTENTS = ("metrics.jsonl", "summary.json", "environment.json", "checkpoints")

# Okabe and Ito's colours, told apart by colour-blind readers; their yellow is too pale for lines.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", "-.", (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Series(NamedTuple):
    """Evaluations of one model on one split with one seed, by round."""

    model: str
    split: str
    seed: int


class Run(NamedTuple):
    """A run folder's contents; `records[series][round]` is one line of `metrics.jsonl`."""

    folder: Path
    config: dict[str, Any]
    records: dict[Series, dict[int, dict[str, Any]]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    finished: bool
    notes: tuple[str, ...]


class Statistic(NamedTuple):
    """Mean and sample standard deviation (None for a single seed) over the seeds."""

    mean: float
    spread: float | None
    seeds: int


class Curve(NamedTuple):
    """A metric over the rounds at which every seed has it."""

    rounds: tuple[int, ...]
    statistics: tuple[Statistic, ...]


class Method(NamedTuple):
    """Runs with the same settings; `members` are the runs and seeds that count, each seed once."""

    label: str
    runs: tuple[Run, ...]
    members: tuple[tuple[Run, int], ...]
    finished: bool


class Collection(NamedTuple):
    """Everything a report is made of."""

    methods: tuple[Method, ...]
    models: tuple[str, ...]
    splits: tuple[str, ...]
    notes: tuple[str, ...]


class ReportFiles(NamedTuple):
    """Where a report lies; no plots where matplotlib is missing or nothing can be plotted."""

    html: Path
    plots: tuple[Path, ...]


class Row(NamedTuple):
    """One line of the result table: a method's model."""

    method: str
    model: str
    accuracy: dict[str, Statistic | None]
    bytes_up: int | None
    bytes_down: int | None
    rounds: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 if there is nothing to report."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report",
        description="Table, plots and a single HTML file from any set of run folders.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or above")
    parser.add_argument("--output", type=Path, help="where to write (default: beside the runs)")
    parser.add_argument("--title", help="heading (default: the experiments' names)")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    try:
        collection = collect(options.runs)
        title = options.title or default_title(collection)
        console.print(table(collection, title))
        for note in collection.notes:
            _say(console, f"note: {note}")
        files = write_report(collection, options.output or _default_output(options.runs), title)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: cannot write to {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if not files.plots:
        _say(console, INSTALL_PLOTS)
    for path in (*files.plots, files.html):
        _say(console, f"wrote {path}")
    return 0


def load_run(folder: Path | str) -> Run:
    """Reads a run folder, of a finished, running or killed run.

    Lines of `metrics.jsonl` that are no JSON object are left out, the last one (half-written by
    a killed run) silently, others with a note. Where a round was evaluated twice (a resumed run)
    the later line counts. Raises ValueError if `folder` is not a run folder or its `config.json`
    cannot be read.
    """
    folder = Path(folder)
    if not _is_run_folder(folder):
        raise ValueError(f"{folder} is not a run folder: it needs config.json and metrics.jsonl")
    notes: list[str] = []
    config = _read_object(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder / 'config.json'} is not a JSON object: not a run folder")
    summary = _read_object(folder / "summary.json") or {}
    environment = _read_object(folder / "environment.json") or {}
    records = _read_records(folder / "metrics.jsonl", _first_seed(config), notes)
    finished = summary.get("finished") is True
    _add_final_from_summary(records, summary, _first_seed(config))
    return Run(folder, config, records, summary, environment, finished, tuple(notes))


def collect(paths: Iterable[Path | str]) -> Collection:
    """Loads every run in or below `paths` and groups those that differ only in their seed.

    Where a method has finished runs, only these count: means never mix run lengths. Raises
    ValueError if a path does not exist or no run with an evaluation is found.
    """
    searched = [Path(path) for path in paths]
    notes: list[str] = []
    runs = []
    for folder in _find_run_folders(searched, notes):
        try:
            run = load_run(folder)
        except ValueError as error:
            notes.append(f"{error}; skipped")
            continue
        notes.extend(run.notes)
        if any(_accuracy_or_loss(record) for record in run.records.values()):
            runs.append(run)
        else:
            notes.append(f"{folder} has no evaluation yet; skipped")
    if not runs:
        found = ", ".join(map(str, searched))
        reasons = "".join(f" ({note})" for note in notes[:1])
        raise ValueError(f"no run with an evaluation in or below {found}{reasons}")
    methods = _group(runs, notes)
    return Collection(methods, _models(runs), _splits(runs), tuple(notes))


def table(collection: Collection, title: str = "") -> Table:
    """The result table, method x model, for a terminal."""
    rows = result_rows(collection)
    several = any(statistic.seeds > 1 for statistic in _statistics(rows))
    result = Table(
        title=Text(title) if title else None, caption=Text(_caption(rows)), box=box.SIMPLE_HEAD
    )
    for heading in ("Method", "Model"):
        result.add_column(heading)
    for heading in _number_headings(collection, several):
        result.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.method) and len(collection.models) > 1:
            result.add_section()
        shown = "" if row.method == previous else row.method
        cells = [shown, row.model, *_number_cells(row, collection, several)]
        result.add_row(*(Text(cell) for cell in cells))
        previous = row.method
    return result


def result_rows(collection: Collection) -> list[Row]:
    """The result table's rows: final accuracy on each split, bytes per participation, rounds."""
    return [
        _row(method, model, collection)
        for method in collection.methods
        for model in collection.models
        if any(series.model == model for run in method.runs for series in run.records)
    ]


def curve(method: Method, model: str, split: str, metric: str) -> Curve:
    """A metric's mean and spread over a method's seeds; empty where it was not measured."""
    by_seed = []
    for run, seed in method.members:
        records = run.records.get(Series(model, split, seed), {})
        values = {
            round: value
            for round, record in records.items()
            if (value := _number(record, metric)) is not None
        }
        if values:
            by_seed.append(values)
    if not by_seed:
        return Curve((), ())
    rounds = sorted(set.intersection(*(set(values) for values in by_seed)))
    statistics = tuple(_statistic([values[round] for values in by_seed]) for round in rounds)
    return Curve(tuple(rounds), statistics)


def clients_per_round(config: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    """How many clients train each model in a round: its pool's cohort, or a part of the only pool's.

    A party's model has one. `models`: the names of those that clients train, in their order; ensembles
    are none of them.
    """
    names, pools = list(models), _mapping(config, "pools")
    if "parties" in config:
        return dict.fromkeys(names, 1)
    cohorts = {pool: int(settings.get("cohort_size", 0)) for pool, settings in pools.items()}
    if len(cohorts) != 1:
        return {name: cohorts.get(name, 0) for name in names}
    sizes = _mapping(config, "algorithm").get("group_sizes")
    (cohort,) = cohorts.values()
    share, more = divmod(cohort, len(names))
    even = [share + (place < more) for place in range(len(names))]  # the first groups get more
    return dict(zip(names, sizes or even, strict=True))


def pool_of(config: Mapping[str, Any], model: str) -> str:
    """The pool whose clients train a model: the only one, where one is divided among several models.

    Models that a pool's clients keep have its name and an ending, such as `large_teachers`.
    """
    pools = list(_mapping(config, "pools"))
    if len(pools) == 1:
        return pools[0]
    keepers = [pool for pool in pools if model.startswith(f"{pool}_")]
    return model if model in pools or not keepers else max(keepers, key=len)


def bytes_per_round(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, int]:
    """Pool -> bytes that its clients send and receive in a round; `sizes`: a summary's `models`."""
    total: dict[str, int] = {}
    for model, clients in clients_per_round(config, sizes).items():
        each = sum(sizes[model][f"bytes_{way}_per_participation"] for way in ("up", "down"))
        pool = pool_of(config, model)
        total[pool] = total.get(pool, 0) + each * clients
    return total


def default_title(collection: Collection) -> str:
    """The names of the experiments in it."""
    runs = [run for method in collection.methods for run in method.runs]
    names = _distinct(str(run.config.get("name") or run.folder.name) for run in runs)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_report(collection: Collection, output: Path | str, title: str = "") -> ReportFiles:
    """Writes accuracy.png, accuracy_by_bytes.png, loss.png, per_label_accuracy.png and report.html.

    A plot without data is left out, and all are where matplotlib is missing. The HTML file holds
    the plots itself and refers to nothing outside. Raises OSError if `output` cannot be written.
    """
    output = Path(output)
    title = title or default_title(collection)
    output.mkdir(parents=True, exist_ok=True)
    plots = _plots(collection, output)
    html = output / "report.html"
    html.write_text(_html(collection, title, plots), encoding="utf-8")
    return ReportFiles(html, tuple(plots))


# Reading run folders


def _find_run_folders(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such folder: {path}")
        below = []
        for parent, children, _ in os.walk(path):
            if _is_run_folder(Path(parent)):
                below.append(Path(parent))
                children.clear()
            children[:] = sorted(child for child in children if not child.startswith("."))
        if not below:
            notes.append(f"{path} is not a run folder and has none below; skipped")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _is_run_folder(folder: Path) -> bool:
    beside = any((folder / name).exists() for name in RUN_CONTENTS)
    return beside and (folder / "config.json").is_file()


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _read_records(
    path: Path, first_seed: int, notes: list[str]
) -> dict[Series, dict[int, dict[str, Any]]]:
    records: dict[Series, dict[int, dict[str, Any]]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return records
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            series = Series(
                str(record["model"]), str(record["split"]), int(record.get("seed", first_seed))
            )
            round = int(record["round"])
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(lines):  # a whole line ends in a newline, so it is never the last
                notes.append(f"{path} line {number} is no evaluation; left out")
            continue
        records.setdefault(series, {}).setdefault(round, {}).update(record)
    return records


def _add_final_from_summary(
    records: dict[Series, dict[int, dict[str, Any]]], summary: dict[str, Any], first_seed: int
) -> None:
    """Final accuracies of a run whose `metrics.jsonl` was not kept."""
    for model, splits in _mapping(summary, "final").items():
        for split in _mapping({"splits": splits}, "splits"):
            values = _mapping(splits, split).get("accuracy")
            if any((model, split) == series[:2] for series in records):
                continue
            for index, value in enumerate(values if isinstance(values, list) else []):
                record = {"round": summary.get("rounds", 0), "accuracy": value}
                records[Series(model, split, first_seed + index)] = {record["round"]: record}


def _first_seed(config: Mapping[str, Any]) -> int:
    seed = config.get("seed")
    return seed if isinstance(seed, int) else 0


def _mapping(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _number(record: Mapping[str, Any], metric: str) -> float | None:
    """None where it was not measured; NaN where it was, but is not a finite number (JSON null)."""
    if metric not in record:
        return None
    value = record[metric]
    if value is None:
        return math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _accuracy_or_loss(records: Mapping[int, Mapping[str, Any]]) -> bool:
    return any("accuracy" in record or "loss" in record for record in records.values())


def _statistic(values: Sequence[float]) -> Statistic:
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Statistic(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Statistic(mean, math.sqrt(variance), count)


# Grouping


def _group(runs: Sequence[Run], notes: list[str]) -> tuple[Method, ...]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run.config), sort_keys=True), []).append(run)
    ranks = {name: rank for rank, name in enumerate(METHOD_NAMES)}
    ordered = sorted(
        groups.values(), key=lambda group: ranks.get(_algorithm(group[0].config), len(ranks))
    )
    labels = _labels([group[0].config for group in ordered])
    return tuple(_method(label, group, notes) for label, group in zip(labels, ordered, strict=True))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config flattened to dotted keys, without what runs of one method may differ in."""
    return {key: value for key, value in _flatten(config).items() if key not in NOT_SETTINGS}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _algorithm(config: Mapping[str, Any]) -> str:
    """What the server does, or where that is FedAvg's, what the clients do."""
    algorithm = config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
    if name == BASELINE:
        name = _mapping(config, "training").get("method", name)
    return str(name) if name else "unnamed"


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each config, with the settings that tell runs of one algorithm apart."""
    labels = []
    for config in configs:
        name = _algorithm(config)
        same = [_settings(other) for other in configs if _algorithm(other) == name]
        differing = _differing_keys(same)
        short = [key.rsplit(".", 1)[-1] for key in differing]
        settings = _settings(config)
        parts = [
            f"{last if short.count(last) == 1 else key}={_setting(settings, key)}"
            for key, last in zip(differing, short, strict=True)
        ]
        base = METHOD_NAMES.get(name, name)
        if _mapping(config, "phases").get("stopping") == "test_data":
            base += ", phases stopped on test data"
        if len(parts) > 3:
            number = same.index(settings) + 1
            labels.append(f"{base} #{number} ({', '.join(parts[:2])}, ...)")
        else:
            labels.append(f"{base} ({', '.join(parts)})" if parts else base)
    return labels


def _differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = _distinct(key for one in settings for key in one)
    return [key for key in keys if len({_setting(one, key) for one in settings}) > 1]


def _setting(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return "–"
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value)


def _method(label: str, runs: Sequence[Run], notes: list[str]) -> Method:
    finished = any(run.finished for run in runs)
    members: dict[tuple[int, ...], tuple[Run, int]] = {}
    for run in runs:
        if not run.finished:
            left_out = ": left out of its method's mean" if finished else ""
            notes.append(f"{run.folder} is unfinished ({_progress(run)}){left_out}")
            if finished:
                continue
        seeds = _distinct(series.seed for series in run.records)
        first = _first_seed(run.config)
        # Seeds inside a run are written as they are or counted from 0: then they are relative.
        absolute = all(seed >= first for seed in seeds)
        repeated = []
        for seed in seeds:
            identity = (seed,) if absolute else (first, seed)
            if identity in members:
                repeated.append(str(seed))
            else:
                members[identity] = (run, seed)
        if repeated:
            again = f"{run.folder} repeats seed {', '.join(repeated)} of {label}"
            notes.append(f"{again}: counted once")
    return Method(label, tuple(runs), tuple(members.values()), finished)


def _progress(run: Run) -> str:
    reached = max((round for series in run.records.values() for round in series), default=0)
    total = run.config.get("rounds")
    return f"{reached} of {total} rounds" if total else f"{reached} rounds"


def _models(runs: Sequence[Run]) -> tuple[str, ...]:
    """Smallest model first where the sizes are known."""
    models = _distinct(series.model for run in runs for series in run.records)
    sizes = {}
    for run in runs:
        for model, description in _mapping(run.summary, "models").items():
            size = description.get("parameters") if isinstance(description, dict) else None
            if isinstance(size, int):
                sizes[model] = size
    known = all(model in sizes for model in models)
    return tuple(sorted(models, key=lambda model: sizes[model]) if known else models)


def _splits(runs: Sequence[Run]) -> tuple[str, ...]:
    """Splits with an accuracy, the test split first."""
    splits = _distinct(
        series.split
        for run in runs
        for series, records in run.records.items()
        if any("accuracy" in record for record in records.values())
    )
    first = ("test", "held_out")
    return tuple(sorted(splits, key=lambda x: first.index(x) if x in first else len(first)))


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# The result table


def _row(method: Method, model: str, collection: Collection) -> Row:
    curves = {split: curve(method, model, split, "accuracy") for split in collection.splits}
    at = _last_common_round([one for one in curves.values() if one.rounds])
    accuracy = {
        split: one.statistics[one.rounds.index(at)] if at in one.rounds else None
        for split, one in curves.items()
    }
    described = _mapping(method.runs[0].summary, "models")
    for run in method.runs:
        described = described or _mapping(run.summary, "models")
    sizes = _mapping(described, model)
    total = method.runs[0].config.get("rounds")
    reached = "–" if at is None else str(at)
    rounds = reached if method.finished else f"{reached} of {total or '?'}, unfinished"
    up, down = (sizes.get(f"bytes_{way}_per_participation") for way in ("up", "down"))
    return Row(method.label, model, accuracy, up, down, rounds)


def _last_common_round(curves: Sequence[Curve]) -> int | None:
    """The last round evaluated on every split: a killed run may have reached only some."""
    if not curves:
        return None
    common = set.intersection(*(set(one.rounds) for one in curves))
    return max(common) if common else max(round for one in curves for round in one.rounds)


def _statistics(rows: Iterable[Row]) -> list[Statistic]:
    return [one for row in rows for one in row.accuracy.values() if one is not None]


def _number_headings(collection: Collection, several: bool) -> list[str]:
    accuracies = [f"Accuracy, %\n{_split_name(split)}" for split in collection.splits]
    seeds = ["Seeds"] if several else []
    return [*accuracies, "Bytes up*", "Bytes down*", "Rounds", *seeds]


def _number_cells(row: Row, collection: Collection, several: bool) -> list[str]:
    accuracies = [_percent(row.accuracy[split]) for split in collection.splits]
    counts = sorted({one.seeds for one in row.accuracy.values() if one is not None})
    seeds = ["/".join(map(str, counts)) or "–"] if several else []
    sizes = [human_bytes(row.bytes_up), human_bytes(row.bytes_down)]
    return [*accuracies, *sizes, row.rounds, *seeds]


def _caption(rows: Sequence[Row]) -> str:
    several = any(one.seeds > 1 for one in _statistics(rows))
    spread = "; ± standard deviation over the seeds" if several else ""
    return f"* per participation of one client{spread}"


def _percent(statistic: Statistic | None) -> str:
    if statistic is None:
        return "–"
    spread = "" if statistic.spread is None else f" ± {100 * statistic.spread:.2f}"
    return f"{100 * statistic.mean:.2f}{spread}"


def human_bytes(count: int | None) -> str:
    """A number of bytes in decimal units, `437.4 kB`."""
    if count is None:
        return "–"
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _split_name(split: str) -> str:
    return split.replace("_", " ")


# Plots


def _plots(collection: Collection, output: Path) -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    plots = {
        "accuracy.png": _accuracy_plot(collection),
        "accuracy_by_bytes.png": _bytes_plot(collection),
        "loss.png": _loss_plot(collection),
        "per_label_accuracy.png": _per_label_plot(collection),
    }
    written = []
    for name, figure in plots.items():
        if figure is not None:
            figure.savefig(output / name, dpi=144)
            written.append(output / name)
    return written


def _accuracy_plot(collection: Collection) -> "Figure | None":
    if not collection.splits:
        return None
    split = _followed_split(collection)
    label = f"{_split_name(split).capitalize()} accuracy (%)"
    return _curves_plot(collection, [(split, "accuracy", label, 100.0)])


def _bytes_plot(collection: Collection) -> "Figure | None":
    """The same against what clients have sent and received so far."""
    known = [
        _megabytes_per_round(m, model) for m in collection.methods for model in collection.models
    ]
    if not collection.splits or not any(known):
        return None
    split = _followed_split(collection)
    label = f"{_split_name(split).capitalize()} accuracy (%)"
    return _curves_plot(collection, [(split, "accuracy", label, 100.0)], by_bytes=True)


def _followed_split(collection: Collection) -> str:
    """The split that was evaluated most often: some are only looked at after the last round."""

    def evaluations(split: str) -> int:
        curves = [
            curve(method, model, split, "accuracy")
            for method in collection.methods
            for model in collection.models
        ]
        return max(len(one.rounds) for one in curves)

    return max(collection.splits, key=evaluations)


def _megabytes_per_round(method: Method, model: str) -> float | None:
    """What all clients of the model's pool send and receive; None before a run's end."""
    for run in method.runs:
        if sizes := _mapping(run.summary, "models"):
            total = bytes_per_round(run.config, sizes).get(pool_of(run.config, model))
            return total / 1e6 if total else None
    return None


def _loss_plot(collection: Collection) -> "Figure | None":
    panels = []
    evaluated = _followed_split(collection) if collection.splits else "test"
    for split, label in (
        (evaluated, f"{_split_name(evaluated).capitalize()} loss (nats)"),
        ("train", "Loss on the clients' data (nats)"),
    ):
        if any(
            curve(method, model, split, "loss").rounds
            for method in collection.methods
            for model in collection.models
        ):
            panels.append((split, "loss", label, 1.0))
    return _curves_plot(collection, panels) if panels else None


def _curves_plot(
    collection: Collection,
    quantities: Sequence[tuple[str, str, str, float]],
    by_bytes: bool = False,
) -> "Figure":
    """One row of panels per quantity (split, metric, label, factor), one column per model.

    `by_bytes`: against megabytes exchanged in place of rounds.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    columns = len(collection.models)
    width = max(6.0, 4.6 * columns)
    labels = [_legend_label(method, collection) for method in collection.methods]
    legend_columns = max(1, min(len(labels) + 1, int(width / (0.07 * max(map(len, labels)) + 0.6))))
    legend_rows = math.ceil((len(labels) + 1) / legend_columns)
    size = (width, 3.4 * len(quantities) + 0.45 + 0.22 * legend_rows)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.subplots(len(quantities), columns, squeeze=False, sharex="col", sharey="row")
    handles = {}
    for row, (split, metric, label, factor) in zip(axes, quantities, strict=True):
        row[0].set_ylabel(label)
        late = []
        for axis, model in zip(row, collection.models, strict=True):
            axis.grid(color="0.9", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not by_bytes))
            for number, method in enumerate(collection.methods):
                one = curve(method, model, split, metric)
                per_round = _megabytes_per_round(method, model) if by_bytes else 1.0
                if not one.rounds or per_round is None:
                    continue
                if not by_bytes:
                    _draw_codistillation_rounds(axis, method, one, _colour(number))
                handles[method.label] = _draw_curve(axis, one, number, factor, per_round)
                late += _after_the_start(one, factor)
        _show_from(row[0], late)
    for axis, model in zip(axes[0], collection.models, strict=True):
        axis.set_title(f"{model} model", fontsize=11, fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel(
            "Sent and received by all clients, MB" if by_bytes else "Communication round"
        )
    shown = {
        text: handles[method.label]
        for method, text in zip(collection.methods, labels, strict=True)
        if method.label in handles
    }
    if not by_bytes and any(_codistillation_rounds(method) for method in collection.methods):
        shown["codistillation"] = Line2D([], [], color="0.4", linestyle=":", linewidth=1)
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside lower center",
        ncols=legend_columns,
        title=_spread_title(labels),
        fontsize=9,
        title_fontsize=8.5,
        borderaxespad=0,
        frameon=False,
    )
    return figure


def _after_the_start(one: Curve, factor: float) -> list[float]:
    """A curve's values after the first tenth of its rounds."""
    return [
        factor * statistic.mean
        for round, statistic in zip(one.rounds, one.statistics, strict=True)
        if round >= one.rounds[-1] / 10 and math.isfinite(statistic.mean)
    ]


def _show_from(axis: "Axes", values: Sequence[float]) -> None:
    """Leaves the steep start of a run out of the picture, where methods do not differ."""
    if len(values) > 1 and max(values) > min(values):
        margin = 0.06 * (max(values) - min(values))
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, min(values) - margin), min(high, max(values) + margin))


def _draw_curve(axis: "Axes", one: Curve, number: int, factor: float, per_round: float) -> "Line2D":
    places = [round * per_round for round in one.rounds]
    means = [factor * statistic.mean for statistic in one.statistics]
    spreads = [factor * (statistic.spread or 0.0) for statistic in one.statistics]
    if any(spreads):
        below = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        above = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axis.fill_between(places, below, above, color=_colour(number), alpha=0.15, linewidth=0)
    style = LINES[number // len(COLOURS) % len(LINES)]
    (line,) = axis.plot(
        places,
        means,
        color=_colour(number),
        linestyle=style,
        linewidth=1.6,
        marker=MARKERS[number % len(MARKERS)],
        markersize=3.5,
        markevery=max(1, len(means) // 12),
    )
    return line


def _draw_codistillation_rounds(axis: "Axes", method: Method, one: Curve, colour: str) -> None:
    for round in _codistillation_rounds(method):
        if round <= one.rounds[-1]:
            axis.axvline(round, color=colour, linestyle=":", linewidth=1, alpha=0.6, zorder=1)


def _codistillation_rounds(method: Method) -> list[int]:
    """Rounds at which a periodic method distils; none where they are too many to be told apart."""
    config = method.runs[0].config
    period = _mapping(config, "algorithm").get("period")
    rounds = config.get("rounds")
    if not isinstance(period, int) or not isinstance(rounds, int) or period < 1:
        return []
    found = list(range(period, rounds + 1, period))
    return found if len(found) <= 40 else []


def _legend_label(method: Method, collection: Collection) -> str:
    counts = {
        statistic.seeds
        for model in collection.models
        for split in collection.splits
        for statistic in curve(method, model, split, "accuracy").statistics
    }
    seeds = f", {max(counts)} seeds" if counts and max(counts) > 1 else ""
    return f"{method.label}{seeds}{'' if method.finished else ', unfinished'}"


def _spread_title(labels: Sequence[str]) -> str | None:
    several = any(label.endswith(("seeds", "seeds, unfinished")) for label in labels)
    return "line: mean, shade: ± standard deviation over the seeds" if several else None


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _per_label_plot(collection: Collection) -> "Figure | None":
    """Heat map of the final accuracy on each label, a row per method and model."""
    if not collection.splits:
        return None
    split = collection.splits[0]
    names, rows = [], []
    for model in collection.models:
        for method in collection.methods:
            values = _per_label(method, model, split)
            if values:
                names.append(f"{model} · {method.label}")
                rows.append(values)
    if not rows:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    labels = max(map(len, rows))
    rows = [[*values, *[math.nan] * (labels - len(values))] for values in rows]
    width = 2.6 + 0.085 * max(map(len, names)) + min(0.52 * labels, 9)
    figure = Figure(figsize=(width, 1.3 + 0.36 * len(rows)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(rows, aspect="auto", cmap="cividis")
    if labels <= 20:
        _write_numbers(axis, rows)
    axis.set_xlabel("Label")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axis.set_yticks(range(len(names)), names)
    for y in range(1, len(names)):
        if names[y].split(" · ")[0] != names[y - 1].split(" · ")[0]:
            axis.axhline(y - 0.5, color="white", linewidth=4)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(
        f"Final {_split_name(split)} accuracy per label (%)", fontsize=11, fontweight="bold"
    )
    figure.colorbar(image, ax=axis, pad=0.02)
    return figure


def _per_label(method: Method, model: str, split: str) -> list[float]:
    """Final accuracies in %, mean over the seeds; NaN for a label without examples."""
    rounds = curve(method, model, split, "accuracy").rounds
    found = []
    for run, seed in method.members:
        record = run.records.get(Series(model, split, seed), {}).get(rounds[-1] if rounds else -1)
        values = (record or {}).get("per_label_accuracy")
        if isinstance(values, list):
            found.append([math.nan if value is None else 100 * value for value in values])
    if not found or len({len(values) for values in found}) > 1:
        return []
    return [sum(values) / len(values) for values in zip(*found, strict=True)]


def _write_numbers(axis: "Axes", rows: Sequence[Sequence[float]]) -> None:
    finite = [value for row in rows for value in row if math.isfinite(value)]
    middle = (min(finite) + max(finite)) / 2 if finite else 0.0
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            text = f"{value:.0f}" if math.isfinite(value) else "–"
            colour = "black" if value > middle or not math.isfinite(value) else "white"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)


# The HTML file

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #f5f6f8; margin: 0; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 0 0 .7rem; }
section { background: #fff; border: 1px solid #e1e4e8; border-radius: 8px; margin: 1.2rem 0;
  padding: 1.1rem 1.3rem; overflow-x: auto; }
p.quiet, .quiet { color: #5b6470; font-size: .88rem; margin: .4rem 0 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid #c9ced6; vertical-align: bottom; }
tr + tr td { border-top: 1px solid #eceef1; }
tbody tr.first td { border-top-color: #c9ced6; }
.number { text-align: right; white-space: nowrap; }
code, pre { font: .86rem/1.45 ui-monospace, monospace; }
pre { background: #f5f6f8; padding: .8rem; border-radius: 6px; overflow-x: auto; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
summary { cursor: pointer; }
ul { margin: .3rem 0 0; padding-left: 1.2rem; }
"""

PLOT_HEADINGS = {
    "accuracy.png": "Accuracy over the rounds",
    "accuracy_by_bytes.png": "Accuracy against bytes exchanged",
    "loss.png": "Loss over the rounds",
    "per_label_accuracy.png": "Accuracy per label",
}


def _html(collection: Collection, title: str, plots: Sequence[Path]) -> str:
    runs = [run for method in collection.methods for run in method.runs]
    sections = [
        _section("Results", _results_html(collection)),
        *(_section(PLOT_HEADINGS[path.name], _image(path)) for path in plots),
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


def _section(heading: str, body: str) -> str:
    return f"\n<section><h2>{escape(heading)}</h2>{body}</section>" if body else ""


def _results_html(collection: Collection) -> str:
    rows = result_rows(collection)
    several = any(one.seeds > 1 for one in _statistics(rows))
    headings = ["Method", "Model", *_number_headings(collection, several)]
    cells = [[row.method, row.model, *_number_cells(row, collection, several)] for row in rows]
    return f'{_table_html(headings, cells)}<p class="quiet">{escape(_caption(rows))}</p>'


def _per_client_html(collection: Collection) -> str:
    shown = {"accuracy_mean": "mean", "accuracy_p10": "10th percentile", "accuracy_min": "minimum"}
    cells = []
    for method in collection.methods:
        for model in collection.models:
            for split in collection.splits:
                values = _per_client(method, model, split, list(shown))
                if values:
                    numbers = [_percent(values.get(key)) for key in shown]
                    cells.append([method.label, model, _split_name(split), *numbers])
    headings = ["Method", "Model", "Split", *(f"Accuracy, %\n{name}" for name in shown.values())]
    return _table_html(headings, cells, texts=3) if cells else ""


def _per_client(
    method: Method, model: str, split: str, metrics: Sequence[str]
) -> dict[str, Statistic]:
    rounds = curve(method, model, split, "accuracy").rounds
    found = []
    for run, seed in method.members:
        record = run.records.get(Series(model, split, seed), {}).get(rounds[-1] if rounds else -1)
        if _mapping(record or {}, "per_client"):
            found.append(_mapping(record or {}, "per_client"))
    result = {}
    for metric in metrics:
        values = [value for one in found if (value := _number(one, metric)) is not None]
        if values:
            result[metric] = _statistic(values)
    return result


def _differences_html(collection: Collection) -> str:
    settings = [_settings(method.runs[0].config) for method in collection.methods]
    keys = _differing_keys(settings)
    if not keys:
        return ""
    headings = ["Setting", *(method.label for method in collection.methods)]
    cells = [[key, *(_setting(one, key) for one in settings)] for key in keys]
    return _table_html(headings, cells, texts=len(headings))


def _runs_html(collection: Collection) -> str:
    cells = []
    for method in collection.methods:
        for run in method.runs:
            seeds = sorted({series.seed for series in run.records})
            seconds = _number(run.summary, "seconds")
            state = "finished" if run.finished else "unfinished"
            cells.append(
                [
                    method.label,
                    str(run.config.get("name") or "–"),
                    str(run.folder),
                    f"{state}, {_progress(run)}",
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
    flat = [_flatten(run.environment) for run in runs if run.environment]
    cells = []
    for key in _distinct(key for one in flat for key in one):
        values = _distinct(_setting(one, key) for one in flat if key in one)
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
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _image(path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    alternative = escape(PLOT_HEADINGS[path.name])
    return f'<img alt="{alternative}" src="data:image/png;base64,{encoded}">'


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


# The command


def _default_output(paths: Sequence[Path]) -> Path:
    """The folder itself for one argument, else the deepest folder above all."""
    if len(paths) == 1:
        return paths[0]
    above = Path(os.path.commonpath([path.resolve() for path in paths]))
    here = Path.cwd()
    if above == Path(above.anchor):
        return Path()
    return above.relative_to(here) if above.is_relative_to(here) else above


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


if __name__ == "__main__":
    sys.exit(main())
