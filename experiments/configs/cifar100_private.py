r"""Methods under user-level differential privacy on CIFAR-100, at a size for two cores.

A run is a method and its epsilon at delta = 1e-5: 2, 8 or inf, which clips and adds no noise. The 31,500
training images are dealt to 3,150 clients with ten images each; noise is shared by as many clients as
a round has, so privacy needs many clients. Two fifths of the clients can also train the large network.

    python -m fedcodist.commands.compare --config experiments/configs/cifar100_private.py \
        --workdir runs/cifar100_private

The question is that of `digits_private`: does codistillation help more with noise than without? The stop
rule: every run once, three seeds, 100 rounds. Clip and rates are the best of four trials of FedAvg with
epsilon 8, by held-out accuracy of one seed. The other methods and budgets share them. PeriodicCodist was
run again, once, with a period of 30 rounds in place of 25, for the reason that `digits_private` gives.
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.configs import digits_private

CLIENTS = 3150
COHORTS = {"small": 250, "large": 100}
SERVER_LEARNING_RATES = {"small": 8e-3, "large": 3e-3}


def get_runs() -> list[str]:
    """Every method with every epsilon, as in digits_private."""
    return digits_private.get_runs()


def get_config(run: str = "periodic_codistillation,8") -> ConfigDict:
    """Returns one run: digits_private's, on other data, with other networks, cohorts and rates."""
    config = digits_private.get_config(run)
    config.name = "cifar100_private"
    config.rounds = config.full_rounds = 100
    with config.unlocked():
        config.data = dict(
            name="prepared",
            folder="data/cifar100",
            unlabelled_folder=config_dict.placeholder(str),
            num_unlabelled=5000,
            partition=dict(name="equal_dirichlet", num_clients=CLIENTS, concentration=0.3),
            crop=24,
            padding=0,
            augmentation="none",
            seed=0,
        )
    config.training.update(epochs=1, server_optimizer="adam", server_epsilon=1e-5)
    config.training.privacy.clip = 0.1
    for name, pool in config.pools.items():
        size = "small" if name == "main" else name  # FedSDD's only network
        pool.update(
            model=f"cnn_{size}",
            cohort_size=COHORTS[size],
            server_learning_rate=SERVER_LEARNING_RATES[size],
        )
    if "period" in config.algorithm:
        config.algorithm.period = 30  # so that ten rounds follow the last codistillation
    config.evaluation.update(every=25, checkpoint_every=25)
    return config
