r"""Runs methods on the same clients and prints one ranked table.

    fedcodist compare digits_methods --workdir runs/digits_methods --only "fed_*" --only scaffold

The config has `get_runs()`, with a run per method. All runs share data, seeds and schedules, so
differences to the baseline are taken within each seed. The options are those of
`fedcodist sweep`, and the same command continues what was stopped. Costs are those of one seed,
except the seconds; `fedcodist.report.flops` explains FLOPs. An HTML report with curves is written too.

Where every party has a model, the mean accuracy of all parties is ranked, and costs are those of all
parties. Models with auxiliary heads have a second row, for the last head. Training before the first
round is the same for all methods and is not counted. Where clients also keep personal models, as
FedKD's teachers, the mean accuracy of these is ranked; that of the shared model is shown beside it.

    --metric NAME    the metric that ranks, such as f_score, auc or loss; accuracy by default. Losses,
                     distances and perplexities are ranked from the least
    --model NAME     model to rank, repeatable; the baseline's, or all parties', by default
    --baseline RUN   the run to compare with; by default the first one
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedcodist import report
from fedcodist.commands import sweep
from fedcodist.commands.metric_names import metric_names
from fedcodist.config import command_line
from fedcodist.core import child_processes
from fedcodist.report.comparison import UnknownMetric, ranked, read_run, table, unknown_metric


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or the status of the run that failed."""
    parser = command_line.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--metric", default="accuracy", help="what is ranked (default: accuracy)")
    parser.add_argument("--model", action="append", help="model to rank; repeatable")
    parser.add_argument("--baseline", help="run to compare with")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    settings, others = parser.parse_known_args(arguments)
    chosen = [f"--only={pattern}" for pattern in settings.only or ()]
    given = [f"--config={settings.config}", f"--workdir={settings.workdir}", *chosen]
    try:
        runs = sweep.chosen_runs(settings.config, settings.only)
        baseline = settings.baseline or runs[0]
        if baseline not in runs:
            raise ValueError(f"--baseline must be one of {runs}, got {baseline!r}.")
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    if settings.list:
        return sweep.main([*given, *others, "--list"])
    status = child_processes.until_interrupted(
        lambda: _check_metric(settings, baseline, others), "interrupted: nothing was trained yet."
    )
    if status := status or sweep.main([*given, *others]):
        return status
    try:
        entries, without = [], []
        for run in runs:
            try:
                folder = settings.workdir / sweep.run_folder_name(run)
                entries += read_run(run, folder, settings.metric)
            except UnknownMetric as error:
                without.append(error)
        if without and baseline not in {entry.run for entry in entries}:
            raise without[0]
        for reason in without:
            print(f"note: left out: {reason}", file=sys.stderr)
        shown = ranked(entries, baseline, settings.model, settings.metric)
    except ValueError as error:
        return command_line.refuse(error)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 180)
    console.print(table(shown, baseline, entries, settings.metric))
    folders = [str(settings.workdir / sweep.run_folder_name(run)) for run in runs]
    return report.main([*folders, "--output", str(settings.workdir / "report")])


def _check_metric(settings: argparse.Namespace, baseline: str, others: Sequence[str]) -> int:
    """Refuses a metric that the baseline will not have, before any training; returns the exit status.

    A finished baseline's folder has the names of its metrics. Other runs without the metric get a note.
    """
    if (settings.workdir / sweep.run_folder_name(baseline) / "summary.json").exists():
        return 0
    names, metric = metric_names(f"{settings.config}:{baseline}", others), settings.metric
    if names is None or any(n == metric or n.startswith(f"{metric}_head_") for n in names):
        return 0
    return command_line.refuse(unknown_metric(metric, names, baseline))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
