"""One round of the codistillation paper's small CNN alone, which cold_start.py runs as a command."""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1


def get_config() -> ConfigDict:
    """Table 1's FedAvg without its large model."""
    config = cifar100_table1.get_config("fed_avg,4700")
    del config.pools.large
    config.name = "small_cnn"
    config.rounds = 1
    return config
