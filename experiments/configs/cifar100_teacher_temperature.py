r"""Ablation: the temperature of the large model as a teacher.

Table 1's temperature was chosen in short trials, which end before the large model is overconfident on
its few images. A run is "method,temperature". As a teacher, the small model keeps Table 1's temperature.
Results are in docs/results/codistillation.md.

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_teacher_temperature.py \
        --workdir runs/cifar100_teacher_temperature
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config import defaults
from fedcodist.config.registry import CODISTILLATION

TEMPERATURES = ("1", "2", "4")


def get_runs() -> list[str]:
    """Every temperature for both methods."""
    return [f"{method},{value}" for method in CODISTILLATION for value in TEMPERATURES]


def get_config(run: str = "periodic_codistillation,2") -> ConfigDict:
    """Returns one method with one temperature."""
    defaults.check_run(run, get_runs())
    method, temperature = run.split(",")
    config = cifar100_table1.get_config(f"{method},4700,in_domain")
    config.name = "cifar100_teacher_temperature"
    config.run = run
    config.pools.large.teaching.temperature = float(temperature)
    return config
