r"""FedSDD's Table 7: the same work in fewer, longer rounds, or in more, shorter ones.

A run is "method,rounds,alpha", with ResNet-20 on CIFAR-10 and, for FedSDD, R = 1. Rounds times local
epochs, and rounds times distillation steps, are the same in all runs. Those of 100 rounds are in Table
2. The paper's numbers are in experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table7.py \
        --workdir runs/fedsdd_table7
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

METHODS = ("fed_avg", "fed_df", "fed_sdd_r1")
EPOCHS = {"25": 160, "400": 10}
STEPS = {"25": 20_000, "400": 1250}


def get_runs() -> list[str]:
    """The rows that Table 2 does not have."""
    return [
        f"{method},{rounds},{alpha}" for rounds in EPOCHS for method in METHODS for alpha in ALPHAS
    ]


def get_config(run: str = "fed_sdd_r1,400,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, rounds, alpha = run.split(",")
    config = fedsdd_table2.get_config(f"{method},resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table7"
    config.run = run
    config.rounds = config.full_rounds = int(rounds)
    config.training.epochs = EPOCHS[rounds]
    if method != "fed_avg":
        config.algorithm.steps = STEPS[rounds]
    config.evaluation.every = config.evaluation.checkpoint_every = max(1, int(rounds) // 10)
    return config
