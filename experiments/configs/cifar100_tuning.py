r"""The tuner's studies for Table 1, with 4,700 examples of the large model, in domain.

    fedcodist tune experiments/configs/cifar100_tuning.py:merged_codistillation --trials 32 --at_once 8 \
        --processes 1 --study cifar100_merged_dropout --storage runs/tuning.db \
        --output results/tuning/cifar100_merged_dropout.json

PeriodicCodist and MergedCodist have a study each. It searches all settings that the method adds to
FedAvg, in trials of 400 rounds with the schedules scaled. A trial's value is the accuracy on held-out
clients, the mean of both models. The first trial has the settings that Table 1 had before. FedAvg's
rates have studies in cifar100_regularisation.py, one for each model, since its two models do not depend
on each other.

Ours were made on a GPU, with trials at once in bfloat16; docs/results/tuning.md has the commands. Table
1 is in float32.

The rule was fixed before the studies: Table 1 takes the best trial of each, for all of the method's
cells. The space is the paper's (appendix F), narrowed to about a factor of ten around usual values,
since there are 32 trials and not 1,024.
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config.registry import CODISTILLATION

ROUNDS = 400
# The best of earlier studies, for networks without dropout.
BEFORE = dict(learning_rate=1.3e-3, decay=0.1, temperature=0.36, interpolation=0.47)


def get_config(study: str = "merged_codistillation") -> ConfigDict:
    """Returns one study's experiment and search space."""
    if study not in CODISTILLATION:
        raise ValueError(f"the config's argument is one of {CODISTILLATION}, got {study!r}.")
    config = cifar100_table1.get_config(f"{study},4700,in_domain")
    config.name = "cifar100_tuning"
    config.run = study
    # As in 1,500 rounds there are seven codistillations, the last one about a fifteenth before the end.
    config.algorithm.period = round(config.algorithm.period * ROUNDS / config.rounds)
    config.rounds = config.full_rounds = ROUNDS
    config.algorithm.alpha = 0.86
    space = []
    for model in config.pools:
        config.pools[model].teaching.update(BEFORE)
        space += [
            (f"pools.{model}.teaching.learning_rate", 1e-4, 1e-2, "log"),
            (f"pools.{model}.teaching.decay", 0.01, 0.99, "log"),
            (f"pools.{model}.teaching.temperature", 0.3, 3.0, "log"),
            (f"pools.{model}.teaching.interpolation", 0.01, 0.5, "log"),
        ]
    if study == "merged_codistillation":
        space.append(("algorithm.alpha", 0.3, 0.95, "linear"))
    config.tuning = dict(space=tuple(space))
    return config
