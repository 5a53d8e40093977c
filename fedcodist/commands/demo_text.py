"""The demo on text: FedAvg, PeriodicCodist and MergedCodist with disjoint pools of two domains.

    python -m fedcodist.commands.demo_text [--workdir runs/demo_text] [--rounds 40] [--seeds 1]

The text is the Python standard library's. Its docstrings and comments train the small model, its code
the large one, and the models teach each other on unlabelled text of both. Nothing is downloaded. The
demo prints the codistillation paper's table 2 in this setting, and a continuation by each model.
"""

import argparse
import sys
from pathlib import Path

from fedcodist.commands.prepare import python_source
from fedcodist.config.command_line import Parser
from fedcodist.config.registry import METHODS
from fedcodist.core import child_processes
from fedcodist.report import tables_domains

CONFIG = "python_source_codist"  # comes with the package
# Smaller than the experiment, so that it takes minutes.
SETTINGS = {
    "training.batch_size": 10,
    "pools.small.cohort_size": 10,
    "pools.large.cohort_size": 10,
    "algorithm.batch_size": 32,
    "algorithm.period": 12,
    "evaluation.every": 20,
    "evaluation.around.before": 0,
    "evaluation.around.after": 0,
    "evaluation.checkpoint_every": 20,
}
STEPS = {"fed_avg": 0, "periodic_codistillation": 50, "merged_codistillation": 8}


def main() -> int:
    """Prepares the text, runs the three methods and prints the table; returns the exit status."""
    parser = Parser(description="Codistillation across domains of text.")
    parser.add_argument("--workdir", type=Path, default=Path("runs/demo_text"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    return child_processes.until_interrupted(
        lambda: _run(arguments), "interrupted: the same command goes on where it stopped."
    )


def _run(arguments: argparse.Namespace) -> int:
    text = arguments.workdir / "text"
    status = python_source.main([f"--output={text}", "--vocabulary=2000", "--max-examples=60"])
    if status:
        return status
    folders = []
    for method in METHODS:
        folders.append(arguments.workdir / method)
        settings = SETTINGS | {"rounds": arguments.rounds, "seeds": arguments.seeds}
        settings |= {"data.folder": text, "algorithm.steps": STEPS[method]}
        command = [sys.executable, "-m", "fedcodist.commands.run"]
        command += [f"--config={CONFIG}:{method}", f"--workdir={folders[-1]}"]
        command += [f"--config.{name}={value}" for name, value in settings.items()]
        status = child_processes.run(command).returncode
        if status:
            return status
    return tables_domains.main([*map(str, folders), "--samples=3"])


if __name__ == "__main__":
    sys.exit(main())
