r"""FedSDD's Table 10: from FedDF as it was published to FedSDD, one change after another.

A run is "step,alpha", with ResNet-20 on the first 90 % of CIFAR-10's training images; the others are
validation data. The paper's numbers are in experiments/studies/fed_sdd/paper_tables.csv. The steps are

    feddf          FedDF's own settings: Adam with a cosine decay and a bound on the gradient, T = 1,
                   early stopping, and the worst clients left out of the ensemble
    training       FedSDD's training of clients and server in place of FedDF's
    no_validation  without early stopping and dropping, so validation data are not used any more
    fed_sdd        the aggregated models are the ensemble, and the main one is distilled (K = 4, R = 1)

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table10.py \
        --workdir runs/fedsdd_table10
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

STEPS = ("feddf", "training", "no_validation", "fed_sdd")


def get_runs() -> list[str]:
    """Every cell of the table."""
    return [f"{step},{alpha}" for step in STEPS for alpha in ALPHAS]


def get_config(run: str = "feddf,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    step, alpha = run.split(",")
    method = "fed_sdd_r1" if step == "fed_sdd" else "fed_df"
    config = fedsdd_table2.get_config(f"{method},resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table10"
    config.run = run
    config.data.partition.validation = 0.1
    if step in ("feddf", "training"):
        with config.ignore_type():
            config.algorithm.validation = dict(
                split="validation", every=100, patience=1000, or_start=False, drop_worst=True
            )
    if step == "feddf":
        config.pools.main.client_learning_rate = 0.1
        config.algorithm.update(
            steps=10_000,
            batch_size=64,
            distillation_optimizer="adam",
            distillation_decay="cosine",
            distillation_clip=5.0,
            learning_rate=1e-3,
            temperature=1.0,
            scaled=False,
        )
    return config
