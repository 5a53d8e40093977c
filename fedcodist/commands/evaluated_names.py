"""Names of the metrics, splits and models that a run will have, known before any training.

This is a separate program, since a process that starts runs must not occupy the accelerator itself.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.core import child_processes
from fedcodist.report.entries import ALL_PARTIES
from fedcodist.run.client_metrics import OVER_CLIENTS


class EvaluatedNames(NamedTuple):
    """What a run evaluates.

    Attributes:
      metrics: split -> names of its metrics, in the order of the run's models.
      models: names of the models in results.
    """

    metrics: dict[str, list[str]]
    models: list[str]


def evaluated_names(config: str, others: Sequence[str]) -> EvaluatedNames | None:
    """The names of a run; None for a config that fails (the run reports it).

    Args:
      config: value of the launcher's --config.
      others: other arguments of the launcher; its settings are used.
    """
    settings = [argument for argument in others if re.match(r"--config\.[^=]+=", argument)]
    process = child_processes.run(
        [
            sys.executable,
            "-m",
            "fedcodist.commands.evaluated_names",
            f"--config={config}",
            *settings,
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if process.returncode:
        return None
    return EvaluatedNames(*json.loads(process.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> int:
    """Prints the names as JSON; returns the exit status."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        command_line.parse(arguments, values, required=("config",))
        names = _of_run(values.config)
    except Exception as error:
        return command_line.refuse(error)
    print(json.dumps(names))
    return 0


def _of_run(config: ConfigDict) -> EvaluatedNames:
    from fedcodist.config.experiment import build_experiment
    from fedcodist.core.method import all_client_models

    execution = config.get("execution", {})
    if execution.get("chunk_size", 1) is None:
        # Names do not depend on it, and rounds would be compiled to choose it.
        execution.chunk_size = 1
    experiment = build_experiment(config)
    algorithm = experiment.algorithm
    personal = {
        name: one for pool in algorithm.personal_models.values() for name, one in pool.items()
    }
    models = [predictor.model for predictor in algorithm.predictors.values()]
    models += [one.model for one in personal.values()]
    metrics = list(dict.fromkeys(["loss", *(name for model in models for name in model.metrics)]))
    # Splits of clients' own examples have more, see `client_metrics`.
    over_clients = [name + end for name in metrics if name != "loss" for end in OVER_CLIENTS]
    metrics_of_splits = {
        **dict.fromkeys((*experiment.splits, *experiment.final_splits), metrics),
        **dict.fromkeys(
            (*experiment.client_splits, *experiment.final_client_splits), metrics + over_clients
        ),
    }
    names = [
        member for name, one in algorithm.predictors.items() for member in one.members or (name,)
    ]
    names += personal
    if experiment.client_splits or experiment.final_client_splits:
        names += [n for models in all_client_models(algorithm).values() for n in models.predictors]
    if "parties" in config:
        names.append(ALL_PARTIES)
    return EvaluatedNames(metrics_of_splits, list(dict.fromkeys(names)))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
