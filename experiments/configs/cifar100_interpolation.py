r"""Ablation: lambda, the share of the student's own initial prediction in its target.

The codistillation paper tunes it between 0.001 and 0.5 and does not show its effect. A run is
"method,lambda"; both models get the same lambda. For PeriodicCodist no difference was found from 0 to
0.8 at full length, and none for MergedCodist with 0.5, with one seed (docs/results/codistillation.md).

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_interpolation.py \
        --workdir runs/cifar100_interpolation --config.seeds=3
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config import defaults
from fedcodist.config.registry import CODISTILLATION

INTERPOLATIONS = ("0", "0.05", "0.2", "0.5", "0.8")


def get_runs() -> list[str]:
    """Every lambda for both methods."""
    return [f"{method},{value}" for method in CODISTILLATION for value in INTERPOLATIONS]


def get_config(run: str = "periodic_codistillation,0.5") -> ConfigDict:
    """Returns one method with one lambda."""
    defaults.check_run(run, get_runs())
    method, interpolation = run.split(",")
    config = cifar100_table1.get_config(f"{method},4700,in_domain")
    config.name = "cifar100_interpolation"
    config.run = run
    for pool in config.pools.values():
        pool.teaching.interpolation = float(interpolation)
    return config
