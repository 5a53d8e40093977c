r"""Codistillation of a small and a large network on scikit-learn's handwritten digits.

The paper's method at a size that runs in seconds. There are 60 clients with unequal shares of labels,
and a third of them can train the large model. The server has 359 unlabelled images. Comments have the
paper's settings for CIFAR-100 where they differ.

    fedcodist run digits_codist:merged_codistillation
    fedcodist compare digits_codist

`fedcodist demo` runs FedAvg and both codistillations with three seeds: one to two minutes on two cores.
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults


def get_runs() -> list[str]:
    """Both codistillations, and the methods that they are compared with."""
    return [
        "fed_avg",
        "hetero_fl",
        "fed_sdd_pools",
        "periodic_codistillation",
        "merged_codistillation",
    ]


def get_config(run: str = "merged_codistillation") -> ConfigDict:
    """Returns one algorithm's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("digits_codist", 200, run)  # paper: 1,500 rounds
    config.data = dict(name="digits", num_clients=60, concentration=0.3, seed=0)  # Dirichlet's
    config.training = defaults.adaptive_training(
        method="fed_avg",  # of clients: or "fed_prox", "fed_gkd", "scaffold", not for hetero_fl
        proximal_weight=0.01,  # fed_prox
        fed_gkd=dict(models_kept=5, weight=0.1, temperature=1.0),
        scaffold_option=2,
        batch_size=10,  # paper: 20
    )
    small, large = (
        defaults.codistilled_pool(f"digits_{name}", fraction=fraction, cohort_size=10)  # paper: 20
        for name, fraction in (("small", 1.0), ("large", 1 / 3))  # paper: 0.10, 0.15, 0.20
    )
    config.pools = dict(small=small, large=large)
    config.nested_pools = True  # large clients serve the small model too
    steps = 100 if run == "periodic_codistillation" else 16  # paper: 200 and 32
    config.algorithm = defaults.codistillation(run, period=30, steps=steps)  # paper: period 200
    if run == "fed_sdd_pools":
        # The same clients train two small and two large models, and all of them teach one of each.
        for pool in config.pools.values():
            del pool.teaching, pool.alpha
        config.algorithm = defaults.distillation(
            run, num_models=2, rounds_kept=2, steps=16, cached=True
        )
    if run == "hetero_fl":
        # Small clients train a part of the large model with 2,778 parameters, about as many as the small
        # model has.
        config.pools.small.update(model="digits_large", share=0.25, fraction=2 / 3)
        config.pools.large.share = 1.0
        config.nested_pools = False  # a client has one level
        config.training.update(server_optimizer="sgd", server_schedule="constant")
        for pool in config.pools.values():
            pool.server_learning_rate = 1.0  # the mean of the clients' parameters
        config.algorithm.update(masked=True, scaled=True)
    config.evaluation = defaults.evaluation(5, 20, splits=("held_out", "train"))
    # Networks this small gain nothing from a second process.
    config.execution = defaults.execution(processes=1)
    return config
