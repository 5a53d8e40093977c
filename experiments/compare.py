r"""Runs methods on the same clients and prints one ranked table.

    python -m experiments.compare --config experiments/configs/digits_methods.py \
        --workdir runs/digits_methods --only "fed_*" --only scaffold

The config has `get_runs()`, a run per method; all of them share data, seeds and schedules, so that
differences to the baseline are taken within each seed. Options are experiments.sweep's, and the same
command continues. Below the table lies an HTML report with curves and accuracy against bytes.

    --model NAME     model to rank, repeatable; the baseline's where not given
    --baseline RUN   the run to compare with; the first that is compared where not given
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from experiments import command, report, sweep


class Entry(NamedTuple):
    """One model of one run.

    Attributes:
      run, model: their names.
      accuracies: in %, one per seed, after the last round.
      megabytes: that all clients together sent and received in the run, per seed; None for what is
        no pool's model, such as an ensemble.
      examples: that all clients together trained on, per seed; None likewise.
      seconds: of the whole run, all seeds.
    """

    run: str
    model: str
    accuracies: tuple[float, ...]
    megabytes: float | None
    examples: float | None
    seconds: float


class Difference(NamedTuple):
    """Mean over the seeds of the difference to the baseline, and its 95 % interval's half."""

    mean: float
    half_width: float | None


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or the status of what failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--model", action="append", help="model to rank; repeatable")
    parser.add_argument("--baseline", help="run to compare with")
    settings, others = parser.parse_known_args(arguments)
    chosen = [f"--only={pattern}" for pattern in settings.only or ()]
    given = [f"--config={settings.config}", f"--workdir={settings.workdir}", *chosen]
    try:
        runs = sweep.chosen_runs(settings.config, settings.only)
        baseline = settings.baseline or runs[0]
        if baseline not in runs:
            raise ValueError(f"--baseline must be one of {runs}, got {baseline!r}.")
    except command.PARSE_ERRORS as error:
        return command.refuse(error)
    if status := sweep.main([*given, *others]):
        return status
    try:
        entries = [
            entry
            for run in runs
            for entry in read_run(run, settings.workdir / sweep.run_folder_name(run))
        ]
        shown = ranked(entries, baseline, settings.model)
    except ValueError as error:
        return command.refuse(error)
    Console().print(table(shown, baseline, entries))
    folders = [str(settings.workdir / sweep.run_folder_name(run)) for run in runs]
    return report.main([*folders, "--output", str(settings.workdir / "report")])


def read_run(run: str, folder: Path) -> list[Entry]:
    """Every model of a finished run, on the split that is looked at last.

    Raises:
      ValueError: one line; the run has no summary.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no finished run: {error}") from error
    participations = {
        name: config["pools"].get(name, {}).get("cohort_size", 0) * summary["rounds"]
        for name in summary["models"]
    }
    shared = len(config["pools"]) == 1  # several models may divide one pool's cohort among them
    if shared:
        participations = dict.fromkeys(
            summary["models"],
            next(iter(config["pools"].values()))["cohort_size"] * summary["rounds"],
        )
    examples = _examples(folder / "metrics.jsonl")
    final_splits = config["evaluation"]["final_splits"] or config["evaluation"]["splits"]
    entries = []
    for model, splits in summary["final"].items():
        accuracies = splits.get(final_splits[0], {}).get("accuracy")
        if accuracies is None:
            continue
        sent = summary["models"].get(model)
        megabytes = worked = None
        if sent is not None:
            each = sent["bytes_up_per_participation"] + sent["bytes_down_per_participation"]
            megabytes = each * participations[model] / 1e6
            if model in examples:
                worked = examples[model] * participations[model]
        entries.append(
            Entry(
                run,
                model,
                tuple(100 * share for share in accuracies),
                megabytes,
                worked,
                summary["seconds"],
            )
        )
    return entries


def ranked(entries: Sequence[Entry], baseline: str, models: Sequence[str] | None) -> list[Entry]:
    """The entries of the wanted models, the most accurate first.

    Raises:
      ValueError: one line; no run has such a model.
    """
    known = list(dict.fromkeys(entry.model for entry in entries))
    wanted = models or [entry.model for entry in entries if entry.run == baseline]
    for model in wanted:
        if model not in known:
            raise ValueError(f"--model must be one of {known}, got {model!r}.")
    shown = [entry for entry in entries if entry.model in wanted]
    return sorted(shown, key=lambda entry: -statistics.fmean(entry.accuracies))


def difference(entry: Entry, entries: Sequence[Entry], baseline: str) -> Difference | None:
    """To the baseline's model of the same name, or its only one, within seeds; None without one.

    The interval is Student's t over the seeds' differences; with one seed there is none.
    """
    own = [other for other in entries if other.run == baseline]
    same = [other for other in own if other.model == entry.model] or own
    if len(same) != 1 or same[0] == entry:
        return None
    pairs = zip(entry.accuracies, same[0].accuracies, strict=True)
    differences = [a - b for a, b in pairs]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, None)
    # SciPy comes with JAX; it is slow to import.
    from scipy.stats import t

    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, float(t.ppf(0.975, len(differences) - 1)) * spread)


def table(shown: Sequence[Entry], baseline: str, entries: Sequence[Entry]) -> Table:
    """The ranking for people."""
    seeds = len(shown[0].accuracies) if shown else 0
    drawn = Table(title=f"accuracy in %, {seeds} seed{'' if seeds == 1 else 's'}")
    drawn.add_column("method")
    drawn.add_column("model")
    for heading in ("accuracy", f"to {baseline}", "client examples", "MB", "seconds"):
        drawn.add_column(heading, justify="right")
    for entry in shown:
        found = difference(entry, entries, baseline)
        drawn.add_row(
            entry.run,
            entry.model,
            _spread(entry.accuracies),
            "" if found is None else _signed(found),
            "" if entry.examples is None else f"{entry.examples:,.0f}",
            "" if entry.megabytes is None else f"{entry.megabytes:,.1f}",
            f"{entry.seconds:,.0f}",
        )
    return drawn


def _examples(path: Path) -> Mapping[str, float]:
    """Pool -> examples that a client trains on in one participation, mean over all rounds and seeds."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if "client_examples" in record:
            rounds = found.setdefault(record["model"], [])
            rounds.append((record["round"], record["client_examples"]))
    means = {}
    for pool, values in found.items():
        before, weighted = 0, 0.0
        by_round: dict[int, list[float]] = {}
        for round, value in values:
            by_round.setdefault(round, []).append(value)
        for round, own in sorted(by_round.items()):
            weighted += (round - before) * statistics.fmean(own)
            before = round
        means[pool] = weighted / before
    return means


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"


def _signed(found: Difference) -> str:
    mean = f"{found.mean:+.2f}"
    return mean if found.half_width is None else f"{mean} ± {found.half_width:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
