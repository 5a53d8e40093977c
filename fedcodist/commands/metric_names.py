"""Names of the metrics that a run will have, known before any training.

This is a separate program, since a process that starts runs must not occupy the accelerator itself.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.core import child_processes


def metric_names(config: str, others: Sequence[str]) -> list[str] | None:
    """The names in the order of the run's models; None for a config that fails (the run reports it).

    Args:
      config: value of the launcher's --config.
      others: other arguments of the launcher; its settings are used.
    """
    settings = [argument for argument in others if re.match(r"--config\.[^=]+=", argument)]
    process = child_processes.run(
        [sys.executable, "-m", "fedcodist.commands.metric_names", f"--config={config}", *settings],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return None if process.returncode else json.loads(process.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    """Prints the names as JSON; returns the exit status."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        command_line.parse(arguments, values, required=("config",))
        names = _of_models(values.config)
    except Exception as error:
        return command_line.refuse(error)
    print(json.dumps(names))
    return 0


def _of_models(config: ConfigDict) -> list[str]:
    from fedcodist.config.algorithm import build_algorithm
    from fedcodist.config.data import load_data
    from fedcodist.config.division import divided
    from fedcodist.config.metrics import with_metrics

    config = divided(config)
    algorithm = build_algorithm(config, load_data(config.data))
    algorithm = with_metrics(algorithm, config.get("metrics", {}))
    models = [predictor.model for predictor in algorithm.predictors.values()]
    models += [
        personal.model for pool in algorithm.personal_models.values() for personal in pool.values()
    ]
    return list(dict.fromkeys(["loss", *(name for model in models for name in model.metrics)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
