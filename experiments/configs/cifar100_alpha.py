r"""Ablation: MergedCodist's alpha, the share of the clients' pseudo-gradient, fixed and scheduled.

The codistillation paper tunes alpha and does not show its effect. With alpha = 1 the method is FedAvg,
and its distillation has no effect. A run is "alpha" or "alpha,schedule". At full length, with one seed,
alpha = 0.9 is 2.6 and 0.6 points worse than the tuned 0.946, for the small and the large model, 0.7 is
14 and 7 points worse, and 0.5 is 22 and 14 points worse. From 0.5 to 1 they are 13 and 9 points worse,
and from 0.9 to 0 they forget what clients taught, and end at 4 % (docs/results/codistillation.md).

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_alpha.py \
        --workdir runs/cifar100_alpha --config.seeds=3
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config import defaults

RUNS = (
    "0.1",
    "0.3",
    "0.5",
    "0.7",
    "0.9",
    "1.0",
    "0.5,linear_to_one",  # distillation fades out
    "0.9,linear_to_zero",  # distillation takes over
)


def get_runs() -> list[str]:
    """Every alpha, then the schedules."""
    return list(RUNS)


def get_config(run: str = "0.5") -> ConfigDict:
    """Returns one setting of alpha."""
    defaults.check_run(run, get_runs())
    alpha, _, schedule = run.partition(",")
    config = cifar100_table1.get_config("merged_codistillation,4700,in_domain")
    config.name = "cifar100_alpha"
    config.run = run
    config.algorithm.alpha = float(alpha)
    config.algorithm.alpha_schedule = schedule or "constant"
    return config
