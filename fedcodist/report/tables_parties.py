"""What parties gain from collaboration: accuracy before and after it, and the bound, of a run folder.

    python -m fedcodist.report.tables_parties runs/digits_fed_md [--plot figure_2.png]

"Before" is the end of private training. The bound is training on all parties' examples
(`fedcodist.config.phases`).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.config.command_line import Parser
from fedcodist.core.extras import check_installed
from fedcodist.core.metric_kinds import decimal
from fedcodist.report.plot_parties import PartyCurve, parties_plot
from fedcodist.report.runs import read_lines, read_object
from fedcodist.run.folder_check import PHASES

# phases.stopping -> how the training before the rounds, and that of the bound, ended.
STOPPING = {
    "fixed": "Every phase has all its epochs: nothing looks at test data.",
    "held_out": "Public training stops on held-out public examples, the other phases have all their "
    "epochs: nothing looks at test data.",
    "test_data": "Phases stop on **test data**, as in the released code: accuracies are too good.",
    None: "How phases were stopped is not recorded.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of a run; returns the exit status."""
    parser = Parser(description="Baseline, collaboration and bound, by party.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--plot", type=Path, help="file for a plot by round, figure 2 of the paper")
    options = parser.parse_args(arguments)
    workdir = options.workdir
    try:
        if options.plot is not None:
            check_installed("--plot", "matplotlib", "plot")
        print(table(results(workdir)))
        print(stopped(workdir))
        figure = plot(workdir) if options.plot is not None else None
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, KeyError, ValueError) as error:
        why = str(error).removesuffix(".")
        print(f"{workdir} holds no finished run of parties: {why}.", file=sys.stderr)
        return 2
    if figure is not None:
        try:
            figure.savefig(options.plot, dpi=120)
        except (OSError, ValueError) as error:
            why = str(error).removesuffix(".")
            print(f"error: --plot {options.plot} cannot be written: {why}.", file=sys.stderr)
            return 2
    return 0


def results(workdir: str | Path, split: str = "test") -> dict[str, dict[str, list[float]]]:
    """party -> 'baseline', 'collaboration' and, if it was run, 'centralised' -> accuracy per seed.

    Undefined values, such as the accuracy on no examples, are NaN. Models that were not evaluated on the
    split are left out, such as the parties on their own examples.

    Raises:
      ValueError: a phase is unfinished, or has no model that was evaluated on the split.
    """
    folders = {
        "baseline": Path(workdir) / PHASES / "private",
        "collaboration": Path(workdir),
        "centralised": Path(workdir) / PHASES / "centralised",
    }
    accuracies: dict[str, dict[str, list[float]]] = {}
    for column, folder in folders.items():
        path = folder / "summary.json"
        if column == "centralised" and not path.exists():
            continue
        final = read_object(path)["final"]
        shares_of = {
            party: splits[split]["accuracy"] for party, splits in final.items() if split in splits
        }
        if not shares_of:
            raise ValueError(f"no model in {path} was evaluated on {split!r}.")
        for party, shares in shares_of.items():
            accuracies.setdefault(party, {})[column] = [
                math.nan if share is None else share for share in shares
            ]
    return accuracies


def curves(workdir: str | Path) -> dict[str, PartyCurve]:
    """party -> mean accuracy over seeds in per cent, by round of the collaboration, on `followed`."""
    split = followed(workdir)
    by_party: dict[str, dict[int, list[float]]] = {}
    for _, record in read_lines(Path(workdir) / "metrics.jsonl"):
        if record["split"] == split:
            rounds = by_party.setdefault(record["model"], {})
            share = record["accuracy"]
            rounds.setdefault(record["round"], []).append(
                math.nan if share is None else 100 * share
            )
    return {
        party: PartyCurve(tuple(rounds), tuple(float(np.mean(v)) for v in rounds.values()))
        for party, rounds in by_party.items()
    }


def followed(workdir: str | Path) -> str:
    """The split on which a run was evaluated between rounds, or else after the last one."""
    evaluation = read_object(Path(workdir) / "config.json").get("evaluation", {})
    return (evaluation.get("splits") or evaluation.get("final_splits") or ("test",))[0]


def plot(workdir: str | Path) -> Any:
    """The paper's figure 2 for a run: accuracy of parties by round, with baseline and bound."""
    parties = results(workdir, followed(workdir))
    parties = {name: columns for name, columns in parties.items() if "baseline" in columns}
    mean = lambda column: 100 * float(np.mean([columns[column] for columns in parties.values()]))
    has_bound = "centralised" in next(iter(parties.values()))
    figure = parties_plot(
        curves(workdir), mean("baseline"), mean("centralised") if has_bound else None
    )
    shown = followed(workdir).replace("_", " ").capitalize()
    figure.axes[0].set_ylabel(f"{shown} accuracy (%)")
    return figure


def table(parties: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Mean test accuracy over seeds in per cent: a line per party, and a line with their mean.

    Models that belong to no party, such as DS-FL's server, were not trained before the rounds and have
    no line.
    """
    parties = {name: phases for name, phases in parties.items() if "baseline" in phases}
    columns = list(next(iter(parties.values())))
    means = {
        party: [100 * float(np.mean(accuracies[c])) for c in columns]
        for party, accuracies in parties.items()
    }
    means["mean"] = np.mean(list(means.values()), axis=0).tolist()
    width = max(map(len, means))
    lines = [" " * width + "".join(f"{column:>15}" for column in columns)]
    lines += [
        f"{party:<{width}}" + "".join(f"{decimal(value):>15}" for value in values)
        for party, values in means.items()
    ]
    return "\n".join(lines)


def stopped(workdir: str | Path) -> str:
    """A sentence on how the phases of a run were stopped, by its config."""
    config = read_object(Path(workdir) / "config.json")
    return STOPPING[config["phases"]["stopping"]].replace("**", "")


if __name__ == "__main__":
    sys.exit(main())
