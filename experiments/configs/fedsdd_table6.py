r"""FedSDD's Table 6: which models are distilled, and from which round on.

A run is "distilled,alpha", with ResNet-20 on CIFAR-10, K = 4 and R = 1. `basic` distills all models from
the same ensemble; `warm_up_20` and `warm_up_40` do so after these rounds. The run without distillation
is Table 5's "4,1". FedSDD itself, which distills the main model only, is Table 2's "fed_sdd_r1". The
table has rows of ensembles too, and the paper does not say which weights they are of. Here `ensemble`
has the aggregates before distillation (`buffer_ensemble` in fedcodist/algorithms/pools/fed_sdd.py). The
paper's numbers are in experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table6.py \
        --workdir runs/fedsdd_table6
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

WARM_UP = {"basic": 0, "warm_up_20": 20, "warm_up_40": 40}  # rounds


def get_runs() -> list[str]:
    """The rows that Tables 2 and 5 do not have."""
    return [f"{distilled},{alpha}" for distilled in WARM_UP for alpha in ALPHAS]


def get_config(run: str = "basic,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    distilled, alpha = run.split(",")
    config = fedsdd_table2.get_config(f"fed_sdd_r1,resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table6"
    config.run = run
    config.algorithm.update(distilled="all", warm_up=WARM_UP[distilled])
    return config
