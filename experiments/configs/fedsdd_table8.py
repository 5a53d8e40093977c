r"""FedSDD's Table 8: the number of global models.

A run is "models,alpha", with ResNet-20 on CIFAR-10 and R = 1; four models are Table 2's "fed_sdd_r1".
With three models, eight clients are divided into groups of 3, 3 and 2, and the main model has three of
them ("one more"; the sizes are our choice). The paper's numbers are in
experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table8.py \
        --workdir runs/fedsdd_table8
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

MODELS = ("2", "3")


def get_runs() -> list[str]:
    """The rows that Table 2 does not have."""
    return [f"{models},{alpha}" for models in MODELS for alpha in ALPHAS]


def get_config(run: str = "2,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    models, alpha = run.split(",")
    config = fedsdd_table2.get_config(f"fed_sdd_r1,resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table8"
    config.run = run
    config.algorithm.num_models = int(models)
    return config
