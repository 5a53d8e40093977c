r"""The tuner's studies for Table 1, with 4,700 examples of the large model, in domain.

    python -m fedcodist.tuning.tune --config experiments/configs/cifar100_tuning.py:fed_avg \
        --study cifar100_fed_avg --storage runs/tuning.db --trials 6 \
        --output results/tuning/cifar100_fed_avg.json

The first study, "large_model", searches the learning rates of FedAvg of the large model alone, for all
methods, in twelve trials of 300 rounds. (The paper has one client learning rate for both models. Ours
has one for each, since the large model needs a much smaller one.) Then every method has a study of six
trials of 200 rounds. "fed_avg" searches the rates of both models, which all methods use; its start was
kept, see docs/results/tuning.md. PeriodicCodist and MergedCodist search the settings that they add.

The search space is the paper's (appendix F), narrowed to what so few trials can cover: bounds are around
usual values, and both models share the settings of distillation. The decay of the distillation learning
rate is not searched.
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config.registry import METHODS

STUDIES = ("large_model", *METHODS)


def get_config(study: str = "fed_avg") -> ConfigDict:
    """Returns one study's experiment and search space."""
    if study not in STUDIES:
        raise ValueError(f"the config's argument is one of {STUDIES}, got {study!r}.")
    method = "fed_avg" if study == "large_model" else study
    run = f"{method},4700" + ("" if method == "fed_avg" else ",in_domain")
    config = cifar100_table1.get_config(run)
    config.name = "cifar100_tuning"
    config.run = study
    config.rounds = config.full_rounds = 300 if study == "large_model" else 200
    config.algorithm.period = 60  # three codistillations, the last twenty rounds before the end
    if study == "large_model":
        del config.pools.small
        config.pools.large.update(client_learning_rate=0.003, server_learning_rate=1.3e-3)
        space = [
            ("pools.large.client_learning_rate", 5e-4, 0.1, "log"),
            ("pools.large.server_learning_rate", 3e-4, 3e-2, "log"),
        ]
    elif study == "fed_avg":
        space = [
            ("pools.small.client_learning_rate", 0.003, 0.1, "log"),
            ("pools.large.client_learning_rate", 5e-4, 0.1, "log"),
            ("pools.small.server_learning_rate", 5e-4, 1e-2, "log"),
            ("pools.large.server_learning_rate", 3e-4, 1e-2, "log"),
        ]
    else:
        space = [
            ("pools.*.teaching.learning_rate", 1e-4, 1e-2, "log"),
            ("pools.*.teaching.temperature", 0.3, 3.0, "log"),
            ("pools.*.teaching.interpolation", 0.01, 0.5, "log"),
        ]
        if method == "merged_codistillation":
            space.append(("algorithm.alpha", 0.3, 0.95, "linear"))
    config.tuning = dict(space=tuple(space))
    return config
