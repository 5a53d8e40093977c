r"""Every method that trains one network for all clients, on scikit-learn's handwritten digits.

A run is a method's name. All have the same clients, batch orders and steps, and all but Fed-ensemble
the same cohorts; what clients add to their loss and what the server does besides differs.

    python -m fedcodist.commands.sweep --config experiments/configs/digits_methods.py \
        --workdir runs/digits_methods
"""

from ml_collections import ConfigDict, config_dict

LOCAL = ("fed_avg", "fed_prox", "scaffold", "fed_gkd")
SERVER = ("fed_df", "fed_be", "fed_sdd")


def get_runs() -> list[str]:
    """Clients' methods, servers' methods, Fed-ensemble, and FedSDD over other clients' methods."""
    return [
        *LOCAL,
        *SERVER,
        "fed_ensemble",
        "fed_sdd,fed_prox",
        "fed_sdd,fed_gkd",
        "fed_sdd,scaffold",
    ]


def get_config(run: str = "fed_sdd") -> ConfigDict:
    """Returns one method's experiment."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    server, _, local = run.partition(",")
    if server in LOCAL:
        server, local = "fed_avg", server
    config = ConfigDict()
    config.name = "digits_methods"
    config.run = run
    config.rounds = config.full_rounds = 60
    config.seed = 0
    config.seeds = 3

    config.data = dict(
        name="digits",
        num_clients=20,
        concentration=0.1,
        division_per_seed=False,  # True: each seed's own, with one seed a run
        seed=0,
    )
    config.training = dict(
        method=local or "fed_avg",
        proximal_weight=0.01,  # fed_prox
        scaffold_option=2,
        fed_gkd=dict(models_kept=5, weight=0.1, temperature=1.0),
        client_optimizer="sgd",
        batch_size=10,
        epochs=2,
        server_optimizer="sgd",  # of rate 1: the mean of the clients' models
        server_epsilon=config_dict.placeholder(float),
        server_schedule="constant",
    )
    config.pools = dict(
        main=dict(
            model="digits_small",
            fraction=1.0,
            cohort_size=8,
            client_learning_rate=0.1,
            server_learning_rate=1.0,
        ),
    )
    config.nested_pools = True

    config.algorithm = dict(name=server)
    if server in SERVER:
        config.algorithm.update(
            steps=50,
            batch_size=64,
            distillation_optimizer="sgd",
            distillation_epsilon=config_dict.placeholder(float),
            distillation_momentum=config_dict.placeholder(float),  # of sgd
            direction="forward",  # KL(teacher || student)
            learning_rate=0.1,
            temperature=4.0,
            scaled=True,  # by the temperature squared
            mixup_beta=0.0,
            flip=False,
        )
    if server == "fed_sdd":
        config.algorithm.update(
            num_models=4,
            rounds_kept=2,
            distilled="main",  # or "all"
            warm_up=0,  # rounds
            cached=True,  # digits are not augmented
            group_sizes=config_dict.placeholder(tuple),
            measured=(),
        )
    if server == "fed_ensemble":
        config.algorithm.num_models = 4
    if server == "fed_be":
        config.algorithm.update(
            sampling="gaussian",  # or "dirichlet"
            samples=10,  # models around the clients'
            with_clients=True,  # among the teachers
            temperature=0.5,  # below 1 it sharpens the mean of probabilities
            average_from=25,  # steps before the first student that is averaged
            average_every=5,
        )
        del config.algorithm.scaled
    if server == "fed_df":
        with config.ignore_type():
            config.algorithm.validation = None
    config.evaluation = dict(
        every=5, batch_size=500, checkpoint_every=20, splits=("held_out",), final_splits=("test",)
    )
    config.execution = dict(
        processes=1,
        loop="scan",
        chunk_size=config_dict.placeholder(int),
        seeds_loop="map",
        stream=False,
        precision="float32",
        rematerialise=False,
    )
    return config
