r"""What is tuned for Table 1, at a tenth of its rounds and |P_H| = 4,700, in domain.

    python -m experiments.tune --config experiments/configs/cifar100_tuning.py:fed_avg \
        --study cifar100_fed_avg --storage runs/tuning.db --trials 16 \
        --output results/tuning/cifar100_fed_avg.json

Every method is meant to get 16 trials. FedAvg's search the learning rates of clients and servers. The
first eight of them count for all methods: PeriodicCodist and MergedCodist take their best rates and
search what they add, in eight more. The space is the paper's (appendix F), narrowed to what 16
trials can cover: bounds are around usual values, and both models share the settings of distillation.
The decay of the distillation learning rate is not searched. A study starts from untuned values.
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1

METHODS = cifar100_table1.METHODS


def get_config(method: str = "fed_avg") -> ConfigDict:
    """Returns one method's experiment and search space."""
    if method not in METHODS:
        raise ValueError(f"the config's argument is one of {METHODS}, got {method!r}.")
    run = f"{method},4700" + ("" if method == "fed_avg" else ",in_domain")
    config = cifar100_table1.get_config(run)
    config.name = "cifar100_tuning"
    config.run = method
    config.rounds = config.full_rounds = 150
    # Two codistillations, and rounds enough after the last one.
    config.algorithm.period = 60
    config.algorithm.alpha = 0.7
    for name, pool in config.pools.items():
        pool.teaching.update(learning_rate=1e-3, temperature=1.0, interpolation=0.05)
        if method == "fed_avg":
            pool.client_learning_rate = 0.05
            pool.server_learning_rate = {"small": 2e-3, "large": 1e-3}[name]
    if method == "fed_avg":
        space = [
            ("pools.*.client_learning_rate", 0.01, 0.1, "log"),
            ("pools.small.server_learning_rate", 5e-4, 1e-2, "log"),
            ("pools.large.server_learning_rate", 2e-4, 1e-2, "log"),
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
