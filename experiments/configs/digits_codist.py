r"""Codistillation of a small and a large network on scikit-learn's handwritten digits.

The paper's method at a size that runs in seconds: 60 clients with unequal shares of labels, a third of
them able to train the large model; 359 unlabelled images on the server. Settings that the paper gives
for CIFAR-100 are in comments where these differ.

    python -m experiments.main --config experiments/configs/digits_codist.py:merged_codistillation \
        --workdir runs/digits
"""

from ml_collections import ConfigDict, config_dict


def get_runs() -> list[str]:
    """Codistillation, and what it is compared with."""
    return ["fed_avg", "hetero_fl", "periodic_codistillation", "merged_codistillation"]


def get_config(run: str = "merged_codistillation") -> ConfigDict:
    """Returns one algorithm's experiment."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    config = ConfigDict()
    config.name = "digits_codist"
    config.run = run
    config.rounds = config.full_rounds = 200  # paper: 1,500
    config.seed = 0
    config.seeds = 1

    config.data = dict(
        name="digits",
        num_clients=60,
        concentration=0.3,  # Dirichlet over labels
        seed=0,
    )
    config.training = dict(
        method="fed_avg",  # of clients: or "fed_prox", "fed_gkd", "scaffold", not for hetero_fl
        proximal_weight=0.01,  # fed_prox
        fed_gkd=dict(models_kept=5, weight=0.1, temperature=1.0),
        scaffold_option=2,
        client_optimizer="sgd",
        batch_size=10,  # paper: 20
        epochs=1,
        server_optimizer="adam",
        server_epsilon=1e-5,
        server_schedule="linear_decay",
    )
    config.pools = dict(
        small=dict(
            model="digits_small",
            fraction=1.0,  # of all clients
            cohort_size=10,  # paper: 20
            client_learning_rate=0.1,
            server_learning_rate=0.01,
            alpha=config_dict.placeholder(float),  # in place of algorithm.alpha
            teaching=dict(
                learning_rate=1e-3,
                decay=0.1,
                interpolation=0.05,
                self_teacher_temperature=1.0,
                temperature=1.0,
                weight=1.0,
            ),
        ),
        large=dict(
            model="digits_large",
            fraction=1 / 3,  # paper: 0.10, 0.15, 0.20
            cohort_size=10,
            client_learning_rate=0.1,
            server_learning_rate=0.01,
            alpha=config_dict.placeholder(float),
            teaching=dict(
                learning_rate=1e-3,
                decay=0.1,
                interpolation=0.05,
                self_teacher_temperature=1.0,
                temperature=1.0,
                weight=1.0,
            ),
        ),
    )
    config.nested_pools = True  # large clients serve the small model too

    config.algorithm = dict(
        name=run,
        alpha=0.7,  # merged
        alpha_schedule="constant",  # or "linear_to_one", "linear_to_zero"
        skip_at_alpha_one=False,
        period=30,  # periodic; paper: 200
        steps={"periodic_codistillation": 100}.get(run, 16),  # paper: 200 and 32
        batch_size=64,
        distillation_optimizer="adam",
        distillation_epsilon=1e-5,
        direction="forward",
        mixup_beta=2.0,
        flip=False,  # the paper flips images; a flipped digit is another shape
    )
    if run == "hetero_fl":
        # Small clients have a part of the large model, as large as the small one: 2,778 parameters.
        config.pools.small.update(model="digits_large", share=0.25, fraction=2 / 3)
        config.pools.large.share = 1.0
        config.nested_pools = False  # a client has one level
        config.training.update(server_optimizer="sgd", server_schedule="constant")
        for pool in config.pools.values():
            pool.server_learning_rate = 1.0  # the mean of the clients' numbers
        config.algorithm.update(masked=True, scaled=True)
    config.evaluation = dict(
        every=5,
        batch_size=500,
        checkpoint_every=20,
        splits=("held_out", "train"),
        final_splits=("test",),  # looked at after the last round only
    )
    config.execution = dict(
        processes=1,  # networks this small gain nothing from a second one
        loop="scan",
        chunk_size=config_dict.placeholder(int),  # with loop="vmap" what fits, if not set
        seeds_loop="map",
        stream=False,
        precision="float32",  # or "bfloat16"
        rematerialise=False,
    )
    return config
