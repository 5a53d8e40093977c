r"""Methods under user-level differential privacy on CIFAR-100, at a size for two cores.

A run is a method and its epsilon at delta = 1e-5: 2, 8 or inf, which clips and adds no noise. The 31,500
training images are dealt to 3,150 clients with ten images each; noise is shared by as many clients as
a round has, so privacy needs many clients. Two fifths of the clients can also train the large network.

    python -m fedcodist.commands.compare --config experiments/configs/cifar100_private.py \
        --workdir runs/cifar100_private

The question is that of `digits_private`: does codistillation help more with noise than without? The stop
rule: every run once, three seeds, 100 rounds. Clip and rates are the best of four trials of FedAvg with
epsilon 8, by held-out accuracy of one seed. The other methods and budgets share them.
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults
from fedcodist.configs import digits_private

CLIENTS = 3150
SERVER_LEARNING_RATES = {"small": 8e-3, "large": 3e-3}


def get_runs() -> list[str]:
    """Every method with every epsilon, as in digits_private."""
    return digits_private.get_runs()


def get_config(run: str = "periodic_codistillation,8") -> ConfigDict:
    """Returns one run."""
    defaults.check_run(run, get_runs())
    method, epsilon = run.split(",")
    config = defaults.experiment("cifar100_private", 100, run, seeds=3)
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
    config.training = defaults.training(
        method="fed_avg", batch_size=10, server_optimizer="adam", server_epsilon=1e-5
    )
    budget = dict(noise_multiplier=0.0) if epsilon == "inf" else dict(epsilon=float(epsilon))
    config.training.privacy = defaults.privacy(clip=0.1, delta=1e-5, **budget)
    if method == "fed_sdd":
        config.pools = defaults.one_pool("cnn_small", 250, 0.1)
        config.pools.main.server_learning_rate = SERVER_LEARNING_RATES["small"]
        config.algorithm = defaults.distillation(
            method, num_models=2, rounds_kept=2, steps=16, cached=True
        )
        config.training.privacy.sampling = "fixed"  # FedSDD divides cohorts of one size
    else:
        small, large = (
            defaults.codistilled_pool(
                f"cnn_{name}",
                fraction=fraction,
                cohort_size=cohort_size,
                server_learning_rate=SERVER_LEARNING_RATES[name],
            )
            for name, fraction, cohort_size in (("small", 1.0, 250), ("large", 0.4, 100))
        )
        config.pools = dict(small=small, large=large)
        steps = 100 if method == "periodic_codistillation" else 16
        config.algorithm = defaults.codistillation(method, period=25, steps=steps)
    config.nested_pools = True  # large clients serve the small model too, and pay for it
    config.evaluation = defaults.evaluation(25, 25)
    config.execution = defaults.execution(processes=1)
    return config
