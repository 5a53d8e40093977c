"""The demo: FedAvg, PeriodicCodist and MergedCodist on handwritten digits, then one table.

    fedcodist demo [--workdir runs/demo] [--rounds 200] [--seeds 3]

All three have the same clients, schedule, initial weights and local training. The data comes with
scikit-learn; nothing is downloaded. `python -m fedcodist.commands.demo` is the same.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcodist import report
from fedcodist.config.command_line import Parser
from fedcodist.config.registry import METHODS
from fedcodist.core import child_processes

CONFIG = "digits_codist"  # comes with the package


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the three methods and writes the report; returns the exit status."""
    parser = Parser(description="Codistillation on handwritten digits.")
    parser.add_argument("--workdir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    settings = parser.parse_args(arguments)
    return child_processes.until_interrupted(
        lambda: _run(settings), "interrupted: the same command goes on where it stopped."
    )


def _run(settings: argparse.Namespace) -> int:
    folders = [settings.workdir / method for method in METHODS]
    for method, folder in zip(METHODS, folders, strict=True):
        command = [sys.executable, "-m", "fedcodist.commands.run"]
        command += [f"--config={CONFIG}:{method}", f"--workdir={folder}"]
        command += [f"--config.rounds={settings.rounds}", f"--config.seeds={settings.seeds}"]
        status = child_processes.run(command).returncode
        if status:
            return status
    return report.main([*map(str, folders), "--output", str(settings.workdir)])


if __name__ == "__main__":
    sys.exit(main())
