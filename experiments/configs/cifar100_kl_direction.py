r"""Ablation: the direction of the Kullback-Leibler divergence between student and target.

The codistillation paper names the divergence, but not its direction. A run is "method,direction". With
neither method a difference was found at full length, with one seed (docs/results/codistillation.md).

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_kl_direction.py \
        --workdir runs/cifar100_kl_direction --config.seeds=3
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config import defaults
from fedcodist.config.registry import CODISTILLATION

DIRECTIONS = ("forward", "reverse")  # KL(target || student), KL(student || target)


def get_runs() -> list[str]:
    """Both directions for both methods."""
    return [f"{method},{direction}" for method in CODISTILLATION for direction in DIRECTIONS]


def get_config(run: str = "periodic_codistillation,reverse") -> ConfigDict:
    """Returns one method with one direction."""
    defaults.check_run(run, get_runs())
    method, direction = run.split(",")
    config = cifar100_table1.get_config(f"{method},4700,in_domain")
    config.name = "cifar100_kl_direction"
    config.run = run
    config.algorithm.direction = direction
    return config
