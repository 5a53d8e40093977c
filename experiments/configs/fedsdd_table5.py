r"""FedSDD's Table 5: ensembles without any distillation.

A run is "models,rounds_kept,alpha", with ResNet-20 on CIFAR-10. With one model, `main` is FedAvg's model
and `clients` the ensemble of the clients' models. `gaussian` and `dirichlet` are ensembles of the
clients' models, their average and ten models sampled around them. With four models, `ensemble` has all
aggregated models of the rounds kept. The paper's numbers are in
experiments/studies/fed_sdd/paper_tables.csv.

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table5.py \
        --workdir runs/fedsdd_table5
"""

from ml_collections import ConfigDict

from experiments.configs import fedsdd_table2
from experiments.configs.fedsdd_table2 import ALPHAS
from fedcodist.config import defaults

ROUNDS_KEPT = ("1", "2", "4")


def get_runs() -> list[str]:
    """One model, and four models with each number of rounds kept."""
    models = ["1,1", *(f"4,{kept}" for kept in ROUNDS_KEPT)]
    return [f"{each},{alpha}" for each in models for alpha in ALPHAS]


def get_config(run: str = "4,4,0.1") -> ConfigDict:
    """Returns one run; see `get_runs`."""
    defaults.check_run(run, get_runs())
    models, rounds_kept, alpha = run.split(",")
    config = fedsdd_table2.get_config(f"fed_sdd_r1,resnet20,cifar10,{alpha}")
    config.name = "fedsdd_table5"
    config.run = run
    config.algorithm.update(
        num_models=int(models),
        rounds_kept=int(rounds_kept),
        steps=0,
        measured=("clients", "gaussian", "dirichlet") if models == "1" else ("clients",),
    )
    return config
