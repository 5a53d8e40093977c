r"""FedSDD's Table 4: FedSDD over FedAvg, FedProx and SCAFFOLD, with 8 and with all 20 clients a round.

A run is "method,clients,alpha", with ResNet-20 on CIFAR-10 and, for FedSDD, R = 1. Runs of 8 clients
without "fed_sdd+" are in Table 2. The paper's numbers are in
experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table4.py \
        --workdir runs/fedsdd_table4
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS, LOCAL
from fedcodist.config import defaults

COMBINED = ("fed_sdd+fed_prox", "fed_sdd+scaffold")
METHODS = {"8": COMBINED, "20": (*LOCAL, "fed_sdd", *COMBINED)}


def get_runs() -> list[str]:
    """The cells that Table 2 does not have."""
    return [
        f"{method},{clients},{alpha}"
        for clients, methods in METHODS.items()
        for method in methods
        for alpha in ALPHAS
    ]


def get_config(run: str = "fed_sdd+scaffold,20,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, clients, alpha = run.split(",")
    name, _, local = method.partition("+")
    name = "fed_sdd_r1" if name == "fed_sdd" else name
    config = fedsdd_table2.get_config(f"{name},resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table4"
    config.run = run
    if local:
        config.training.method = local
    config.pools.main.cohort_size = int(clients)
    return config
