r"""FedSDD's Table 9: 14 and 20 of the 20 clients in every round.

A run is "method,clients,alpha", with ResNet-20 on CIFAR-10 and R = 1; `fed_sdd_k7` has seven models, two
clients for each. Runs of 8 clients are in Table 2, and FedAvg and four models with 20 clients in Table
4. The paper's numbers are in experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table9.py \
        --workdir runs/fedsdd_table9
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

METHODS = {
    "14": ("fed_avg", "fed_df", "fed_sdd_k4", "fed_sdd_k7"),
    "20": ("fed_df", "fed_sdd_k10"),
}


def get_runs() -> list[str]:
    """The cells that Tables 2 and 4 do not have."""
    return [
        f"{method},{clients},{alpha}"
        for clients, methods in METHODS.items()
        for method in methods
        for alpha in ALPHAS
    ]


def get_config(run: str = "fed_sdd_k7,14,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, clients, alpha = run.split(",")
    name, _, models = method.partition("_k")
    name = "fed_sdd_r1" if name == "fed_sdd" else name
    config = fedsdd_table2.get_config(f"{name},resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table9"
    config.run = run
    config.pools.main.cohort_size = int(clients)
    if models:
        config.algorithm.num_models = int(models)
    return config
