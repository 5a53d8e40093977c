"""Domain x model x method: accuracy and perplexity of runs on text, and continuations by their models.

    python -m fedcodist.report.tables_domains RUN_FOLDERS [--split test] [--samples 3]

The codistillation paper's table 2, from folders of finished runs or folders that contain them. If rounds
around codistillations were evaluated, a second table follows the paper's figure 3: the change of
held-out accuracy since the round before a codistillation, right after it and some rounds later.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcodist.config.command_line import Parser
from fedcodist.config.data_text import TEXT, TEXT_MODELS, TextData, load_text, text_model
from fedcodist.config.registry import METHOD_NAMES, method_of
from fedcodist.core.metric_kinds import decimal
from fedcodist.report.runs import Run, Series, find_run_folders, load_run
from fedcodist.report.spread import plus_minus
from fedcodist.run.export import load_model
from fedcodist.text.next_token import continuations


class Cell(NamedTuple):
    """One model on one domain after the last round.

    Attributes:
      accuracy: mean over seeds.
      perplexity: exp(mean loss per token) over seeds.
      deviation: of the accuracy over seeds; None for one seed.
    """

    accuracy: float
    perplexity: float
    deviation: float | None


class Change(NamedTuple):
    """Change of accuracy since the round before a codistillation, per seed, mean over codistillations.

    Attributes:
      at_once: right after the codistillation's round.
      later: `rounds` rounds later.
      rounds: number of rounds until `later`.
    """

    at_once: list[float]
    later: list[float]
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and continuations; returns 0, or 2 for a mistake."""
    parser = Parser(prog="python -m fedcodist.report.tables_domains", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or above")
    parser.add_argument("--split", default="test", help="test (default) or held_out")
    parser.add_argument("--samples", type=int, default=3, help="beginnings to continue per domain")
    options = parser.parse_args(arguments)
    if options.samples < 0:
        parser.error(f"--samples must be at least 0, got {options.samples}.")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    try:
        notes: list[str] = []
        runs = [finished_run(folder) for folder in find_run_folders(options.runs, notes)]
        for note in notes:
            print(f"domains: {note}", file=sys.stderr)
        if not runs:
            return 2
        ranks = {name: rank for rank, name in enumerate(METHOD_NAMES)}
        runs.sort(key=lambda run: ranks.get(method_of(run.config), len(ranks)))
        names = names_of(runs)
        cells_of = {name: cells(run, options.split) for name, run in zip(names, runs, strict=True)}
        console.print(domain_table(cells_of, options.split))
        named_runs = zip(names, runs, strict=True)
        if changed := {name: change for name, run in named_runs if (change := changes(run))}:
            console.print(change_table(changed))
        if options.samples:
            for lines in samples(runs, names, options.split, options.samples):
                console.print(lines, markup=False, highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        print(f"domains: {error}", file=sys.stderr)
        return 2
    return 0


def finished_run(folder: Path) -> Run:
    """Reads a run. Raises ValueError unless it is finished and on text."""
    run = load_run(folder)
    if run.config.get("data", {}).get("name") != TEXT:
        raise ValueError(f"{folder} is no run on prepared text")
    if not run.finished:
        raise ValueError(f"{folder} is not finished")
    return run


def names_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run: of the method, the text if a config has several, and the folder if needed."""

    def name_of(run: Run) -> str:
        name = METHOD_NAMES.get(method_of(run.config), method_of(run.config))
        text = run.config.get("run", "").partition(",")[2]
        return f"{name}, {text}" if text else name

    names = [name_of(run) for run in runs]
    folders = [run.folder.name for run in runs]
    of_folder = lambda folder: str(folder) if folders.count(folder.name) > 1 else folder.name
    return [
        f"{name} ({of_folder(run.folder)})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def cells(run: Run, split: str) -> dict[tuple[str, str], Cell]:
    """(model, split) -> results after the last round, for a split and its domains.

    Raises:
      ValueError: the run has no such split.
    """
    rounds = run.summary.get("rounds", run.config["rounds"])
    at_end: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for series, records in run.records.items():
        if is_part(series, split) and rounds in records and "accuracy" in records[rounds]:
            at_end.setdefault((series.model, series.split), []).append(records[rounds])
    if not at_end:
        raise ValueError(f"{run.folder} has no evaluation of split {split!r} in round {rounds}")
    return {key: _cell(records) for key, records in at_end.items()}


def is_part(series: Series, split: str) -> bool:
    """Whether a series is of a split or one of its domains."""
    return series.split == split or series.split.startswith(f"{split}_")


def domain_table(cells_of: Mapping[str, Mapping[tuple[str, str], Cell]], split: str) -> Table:
    """A row per method and model, a column per domain: accuracy in %, perplexity."""
    every = dict.fromkeys(part for of_method in cells_of.values() for _, part in of_method)
    splits = sorted(every, key=lambda part: part == split)  # the mixed set last
    table = Table(title=Text(f"accuracy in vocabulary (%) and perplexity, {split}"))
    table.add_column("method", overflow="fold")
    table.add_column("model", overflow="fold")
    for part in splits:
        table.add_column(
            Text(part.removeprefix(f"{split}_") if part != split else "mixed"), justify="right"
        )
    for method, of_method in cells_of.items():
        for model in dict.fromkeys(model for model, _ in of_method):
            named = (Text(method), Text(model))
            table.add_row(*named, *(_shown(of_method.get((model, part))) for part in splits))
        table.add_section()
    return table


def changes(run: Run) -> dict[tuple[str, str], Change]:
    """(model, split) -> change of accuracy by codistillations, or in the same rounds without them.

    Empty where the rounds `evaluation.around` a codistillation were not evaluated.
    """
    around = run.config["evaluation"].get("around")
    if not around or not around["before"] or not around["after"]:
        return {}
    changes_of: dict[tuple[str, str], Change] = {}
    for series, records in run.records.items():
        accuracy = {
            round: _number(line["accuracy"])
            for round, line in records.items()
            if "accuracy" in line
        }
        if change := mean_change(accuracy, run.config["algorithm"]["period"], around["after"]):
            of_series = changes_of.setdefault(
                (series.model, series.split), Change([], [], around["after"])
            )
            of_series.at_once.append(change[0])
            of_series.later.append(change[1])
    return changes_of


def mean_change(
    accuracy: Mapping[int, float], period: int, later: int
) -> tuple[float, float] | None:
    """Mean change of an accuracy over the multiples of the period: (right after, `later` rounds after).

    Changes are relative to the round before the multiple. Multiples without all three rounds are left
    out; None where no multiple is left.
    """
    points = [
        [accuracy[round] for round in (middle - 1, middle, middle + later)]
        for middle in range(period, max(accuracy, default=0) + 1, period)
        if {middle - 1, middle, middle + later} <= set(accuracy)
    ]
    if not points:
        return None
    before, at_once, after = np.mean(points, axis=0)
    return float(at_once - before), float(after - before)


def change_table(changes_of: Mapping[str, Mapping[tuple[str, str], Change]]) -> Table:
    """A row per method and model, a column per split: points of accuracy right after and later."""
    splits = sorted(
        {part for of_method in changes_of.values() for _, part in of_method}, reverse=True
    )
    later = ", ".join(
        sorted({str(c.rounds) for of_method in changes_of.values() for c in of_method.values()})
    )
    title = "points of accuracy since the round before a codistillation"
    table = Table(title=f"{title}: right after it, {later} rounds later")
    table.add_column("method", overflow="fold")
    table.add_column("model", overflow="fold")
    for part in splits:
        table.add_column(Text(part), justify="right")
    for method, of_method in changes_of.items():
        for model in dict.fromkeys(model for model, _ in of_method):
            named = (Text(method), Text(model))
            table.add_row(*named, *(_shown_change(of_method.get((model, part))) for part in splits))
        table.add_section()
    return table


def samples(
    runs: Sequence[Run],
    names: Sequence[str],
    split: str,
    count: int,
    words: int = 3,
    length: int = 12,
) -> Iterator[str]:
    """Yields text: the beginning of a sentence of a domain, and how every model continues it.

    Beginnings are the first `words` words of sentences at equal distances in the split. Models write the
    most probable tokens. Runs with another vocabulary than the first run's are left out, and so are
    networks of one's own.
    """
    first = runs[0].config
    data = _text_of(first)
    rows, prompts = [], []
    for domain in data.text.domains:
        tokens = data.splits[f"{split}_{domain}"].columns["tokens"]
        is_long = (tokens[:, : words + 2] >= 3).sum(axis=1) > words
        long = tokens[is_long & (tokens[:, : words + 1] < data.text.vocabulary.unknown).all(axis=1)]
        picked = long[[len(long) * index // count for index in range(count)]] if len(long) else long
        rows += [(domain, row) for row in picked]
        prompts += [row[: words + 1] for row in picked]
    if not prompts:
        return
    written = []
    for name, run in zip(names, runs, strict=True):
        text = data.text if run.config["data"] == first["data"] else _text_of(run.config).text
        if text.vocabulary != data.text.vocabulary:
            continue
        for pool, settings in run.config["pools"].items():
            if settings["model"] not in TEXT_MODELS:
                continue
            path = run.folder / f"{pool}_seed{run.config['seed']}.safetensors"
            model, variables = text_model(settings["model"], text), load_model(path)
            write = jax.jit(
                lambda variables, prompts, model=model: continuations(
                    model, variables, prompts, length
                )
            )
            tokens = np.asarray(write(variables, np.stack(prompts).astype(np.int32)))
            written.append((f"{name}, {pool}", tokens[:, words + 1 :]))
    if not written:
        return
    decode = lambda tokens: " ".join(data.text.vocabulary.decode(tokens))
    width = max(len(name) for name, _ in written)
    for index, (domain, row) in enumerate(rows):
        lines = [f"[{domain}] {decode(row[: words + 1])} ..."]
        lines.append(f"  {'written':<{width}}  {decode(row[words + 1 :])}")
        lines += [f"  {name:<{width}}  {decode(tokens[index])}" for name, tokens in written]
        yield "\n".join(lines)


def _text_of(config: Mapping[str, Any]) -> TextData:
    return load_text(ConfigDict(dict(config["data"])))


def _cell(records: Sequence[Mapping[str, Any]]) -> Cell:
    accuracies = [_number(record["accuracy"]) for record in records]
    loss = float(np.mean([_number(record["loss"]) for record in records]))
    deviation = float(np.std(accuracies, ddof=1)) if len(records) > 1 else None
    # The perplexity of a loss of 710 nats is beyond all floats.
    perplexity = math.exp(loss) if not loss > 700 else math.inf
    return Cell(float(np.mean(accuracies)), perplexity, deviation)


def _number(value: float | None) -> float:
    """A number; null is undefined."""
    return math.nan if value is None else value


def _shown_change(change: Change | None) -> str:
    if change is None:
        return "-"
    return "\n".join(map(_points_of_seeds, (change.at_once, change.later)))


def _points_of_seeds(shares: Sequence[float]) -> str:
    if not np.isfinite(shares).all():
        return "-"
    deviation = float(100 * np.std(shares, ddof=1)) if len(shares) > 1 else None
    return plus_minus(float(100 * np.mean(shares)), deviation, is_difference=True)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    accuracy = decimal(math.nan)
    if math.isfinite(cell.accuracy):
        deviation = None if cell.deviation is None else 100 * cell.deviation
        accuracy = plus_minus(100 * cell.accuracy, deviation)
    perplexity = f"{cell.perplexity:,.0f}" if math.isfinite(cell.perplexity) else "-"
    return f"{accuracy} / {perplexity}"


if __name__ == "__main__":
    sys.exit(main())
