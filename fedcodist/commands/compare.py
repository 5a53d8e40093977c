r"""Runs methods on the same clients and prints one ranked table.

    fedcodist compare digits_methods --workdir runs/digits_methods --only "fed_*" --only scaffold
    fedcodist compare RUN [RUN ...]

The config has `get_runs()`, with a run per method. All runs share data, seeds and schedules, so
differences to the baseline are taken within each seed. The options are those of `fedcodist sweep`. The
same command continues a comparison that was stopped. Without a config, finished runs are compared: a RUN
is a run folder or a folder that contains some, and runs that differ only in their seed are one method.
Runs on other data than the baseline's, or on another split, are ranked without a difference to it.
The table is also written to `report/` in the folder of the runs, as ranking.md, as ranking.json and at
the top of report.html, which has curves of the metric. Notes under the table explain its numbers;
`fedcodist.report.flops` explains FLOPs.

If every party has a model, the mean accuracy of all parties is ranked, and costs are those of all
parties. Models with auxiliary heads have a second table row, for the last head. Training before the
first round is the same for all methods and is not counted. If clients also keep personal models, such as
FedKD's teachers, the mean accuracy of these is ranked, and that of the shared model is shown beside it.

    --metric NAME    the metric that ranks, such as f_score, auc or loss; accuracy by default. Losses,
                     distances and perplexities are ranked from the least
    --split NAME     the split on which it is measured, such as client_test, where each client is
                     evaluated on its own examples; the first of the final splits by default
    --model NAME     model to rank, repeatable; the baseline's, or all parties', by default
    --baseline NAME  the run to compare with; by default the first run of the config, or of run folders
                     the first method in the order of `fedcodist list methods`
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from fedcodist import report
from fedcodist.commands import sweep
from fedcodist.commands.evaluated_names import EvaluatedNames, evaluated_names
from fedcodist.config import command_line
from fedcodist.config.config_file import ConfigFileError, config_path, run_folder_name
from fedcodist.core import child_processes
from fedcodist.report.collection import Collection, collect, with_metric
from fedcodist.report.entries import (
    ALL_PARTIES,
    Entry,
    UnknownMetric,
    read_methods,
    read_run,
    unknown_metric,
)
from fedcodist.report.ranking import ranked, unknown_model
from fedcodist.report.ranking_table import for_terminal, ranking_table
from fedcodist.report.runs import final_of, load_run, mapping_of, read_object

_OF_FOLDERS = ("--metric", "--split", "--model", "--baseline")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or the status of the run that failed."""
    parser = command_line.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--metric", default="accuracy", help="what is ranked (default: accuracy)")
    parser.add_argument("--split", help="split on which it is taken (default: first final one)")
    parser.add_argument("--model", action="append", help="model to rank; repeatable")
    parser.add_argument("--baseline", help="run to compare with")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    settings, others = parser.parse_known_args(arguments)
    try:
        if settings.config is None:
            return _compare_folders(settings, others)
        runs = _chosen_runs(settings)
        if settings.workdir is None:
            raise ValueError("--workdir must be given with --config.")
        baseline = _checked_baseline(settings.baseline, runs)
        sweep.check_options(others, (*sweep.OPTIONS, *_OF_FOLDERS))
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    patterns = [f"--only={pattern}" for pattern in settings.only or ()]
    of_sweep = [f"--config={settings.config}", f"--workdir={settings.workdir}", *patterns, *others]
    if settings.list:
        return sweep.main([*of_sweep, "--list"])
    status = child_processes.until_interrupted(
        lambda: _check_names(settings, runs, baseline, others),
        "interrupted: nothing was trained yet.",
    )
    if status := status or sweep.main(of_sweep):
        return status
    folders = {run: settings.workdir / run_folder_name(run) for run in runs}
    entries: list[Entry] = []
    without: list[ValueError] = []
    try:
        for run, folder in folders.items():
            try:
                entries += read_run(run, load_run(folder), settings.metric, settings.split)
            except UnknownMetric as error:
                without.append(error)
        if without and baseline not in {entry.run for entry in entries}:
            raise without[0]
        collection = with_metric(collect(folders.values()), settings.metric)
        return _rank(settings, baseline, entries, without, collection, settings.workdir / "report")
    except ValueError as error:
        return command_line.refuse(error)


def _chosen_runs(settings: argparse.Namespace) -> list[str]:
    """The config's runs. Raises one of PARSE_ERRORS.

    Its message mentions run folders if the argument is not a config's name.
    """
    try:
        config_path(name := settings.config.split(":")[0])
    except ConfigFileError as error:
        if name.endswith(".py"):
            raise
        raise ValueError(f"{name!r} is no folder of runs, and {error}") from error
    return sweep.chosen_runs(settings.config, settings.only)


def _compare_folders(settings: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Compares runs that are there already; returns the exit status. Raises ValueError for a mistake."""
    names = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
    if unknown := [name for name in names if not name.startswith("--config.")]:
        nearest = command_line.nearest_name(unknown[0], _OF_FOLDERS)
        raise ValueError(f"{unknown[0]} is no option for folders of runs; did you mean {nearest}?")
    options = {"--workdir": settings.workdir, "--only": settings.only, "--list": settings.list}
    names += [name for name, value in options.items() if value]
    if names:
        raise ValueError(f"{names[0]} is an option of runs that --config describes.")
    if not arguments:
        raise ValueError("give --config and --workdir, or run folders that are to be compared.")
    folders = [Path(argument) for argument in arguments]
    collection = with_metric(collect(folders), settings.metric)
    entries, without = read_methods(collection.methods, settings.metric, settings.split)
    baseline = _checked_baseline(settings.baseline, [entry.run for entry in entries])
    output = report.default_output(folders) / "report"
    return _rank(settings, baseline, entries, without, collection, output)


def _checked_baseline(baseline: str | None, runs: Iterable[str]) -> str:
    """The run to compare with, by default the first. Raises ValueError that lists the runs."""
    names = list(dict.fromkeys(runs))
    if baseline not in (None, *names):
        raise ValueError(f"--baseline must be one of {names}, got {baseline!r}.")
    return baseline or names[0]


def _rank(
    settings: argparse.Namespace,
    baseline: str,
    entries: Sequence[Entry],
    without: Iterable[ValueError],
    collection: Collection,
    output: Path,
) -> int:
    """Prints the ranked table and writes the report; returns the exit status."""
    shown = ranked(entries, baseline, settings.model, settings.metric)
    for reason in without:
        print(f"note: left out: {reason}", file=sys.stderr)
    for run in dict.fromkeys(entry.run for entry in entries):
        if settings.model is None and run not in {entry.run for entry in shown}:
            models = ", ".join(dict.fromkeys(entry.model for entry in entries if entry.run == run))
            print(
                f"note: left out: {run}, whose models have other names than the baseline's: {models} "
                "(--model chooses models)",
                file=sys.stderr,
            )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 180)
    ranking = ranking_table(shown, baseline, entries, settings.metric)
    console.print(for_terminal(ranking))
    return report.show_report(collection, output, ranking=ranking)


def _check_names(
    settings: argparse.Namespace, runs: Sequence[str], baseline: str, others: Sequence[str]
) -> int:
    """Refuses a metric, split or model that runs will lack, before any training; returns the status.

    The baseline must have the metric and the split. Other runs without the metric get a note. A model
    may be one of any run.
    """

    def names_of(run: str) -> EvaluatedNames | None:
        of_finished = _names_in(settings.workdir / run_folder_name(run))
        return of_finished or evaluated_names(f"{settings.config}:{run}", others)

    names = names_of(baseline)
    if names is None:
        return 0
    if settings.split not in (None, *names.metrics):
        return command_line.refuse(
            ValueError(
                f"--split must be one of {list(names.metrics)} for {baseline}, got {settings.split!r}."
            )
        )
    splits = [settings.split] if settings.split else list(names.metrics)
    metrics = list(dict.fromkeys(name for split in splits for name in names.metrics[split]))
    metric = settings.metric
    if not any(name == metric or name.startswith(f"{metric}_head_") for name in metrics):
        return command_line.refuse(unknown_metric(metric, metrics, baseline))
    known, wanted = dict.fromkeys(names.models), settings.model or ()
    for run in (run for run in runs if run != baseline):
        if known.keys() >= set(wanted):
            return 0
        if (names := names_of(run)) is None:  # the run itself will say why
            return 0
        known |= dict.fromkeys(names.models)
    if unknown := [model for model in wanted if model not in known]:
        return command_line.refuse(unknown_model(unknown[0], list(known)))
    return 0


def _names_in(folder: Path) -> EvaluatedNames | None:
    """The names in a finished run's last metrics; None for another run."""
    try:
        models = final_of(read_object(folder / "summary.json"))
    except ValueError:
        return None
    metrics: dict[str, list[str]] = {}
    for model in models:
        for split, values in mapping_of(models, model).items():
            metrics[split] = list(dict.fromkeys([*metrics.get(split, ()), *values]))
    # Whether the run has parties does not matter: a run without them has no such model to rank.
    return EvaluatedNames(metrics, [*models, ALL_PARTIES]) if metrics else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
