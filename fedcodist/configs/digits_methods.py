r"""Every method that trains one network for all clients, on scikit-learn's handwritten digits.

A run is a method's name. All methods have the same clients, batch orders and steps, and all but
Fed-ensemble the same cohorts. They differ in the clients' losses and in what the server does. Fed-ET's
server has its own network, which is larger than the clients'.

    fedcodist compare digits_methods

docs/papers.md has the command that ranks FedSDD's main model and ensemble.
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults

LOCAL = ("fed_avg", "fed_prox", "scaffold", "fed_gkd", "fed_ntd", "moon")
SERVER = ("fed_df", "fed_be", "fed_sdd", "fed_et")


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
    defaults.check_run(run, get_runs())
    server, _, local = run.partition(",")
    if server in LOCAL:
        server, local = "fed_avg", server
    config = defaults.experiment("digits_methods", 60, run, seeds=3)

    config.data = dict(
        name="digits",
        num_clients=20,
        concentration=0.1,
        division_per_seed=False,  # True: each seed has its own division, with one seed in a run
        seed=0,
    )
    config.training = defaults.training(
        method=local or "fed_avg",
        proximal_weight=0.01,  # fed_prox
        scaffold_option=2,
        fed_gkd=dict(models_kept=5, weight=0.1, temperature=1.0),
        fed_ntd=dict(not_true_weight=1.0, temperature=1.0),
        moon=dict(layer="Dense_0", contrast_weight=1.0, temperature=0.5),
        batch_size=10,
        epochs=2,
    )
    config.pools = defaults.one_pool("digits_small", 8, 0.1)
    config.nested_pools = True

    config.algorithm = dict(name=server)
    if server in SERVER:
        config.algorithm = defaults.distillation(server)
        config.algorithm.distillation_momentum = config_dict.placeholder(float)  # of sgd
    if server == "fed_sdd":
        config.algorithm.update(rounds_kept=2, cached=True)  # digits are not augmented
    if server == "fed_ensemble":
        config.algorithm.num_models = 4
    if server == "fed_be":
        config.algorithm.update(
            sampling="gaussian",  # or "dirichlet"
            samples=10,  # models drawn around the clients' models
            with_clients=True,  # whether the clients' models are teachers too
            temperature=0.5,  # below 1 it sharpens the mean of probabilities
            average_from=25,  # steps before the first student that is averaged
            average_every=5,
        )
        del config.algorithm.scaled
    if server == "fed_et":
        config.algorithm.update(
            server_model="digits_large",  # clients never have it
            embedding_width=32,  # of all networks, so that one head fits all
            diversity=0.05,
            steps=128,
            learning_rate=0.02,
        )
        del config.algorithm.scaled, config.algorithm.temperature
    if server == "fed_df":
        with config.ignore_type():
            config.algorithm.validation = None
    config.evaluation = defaults.evaluation(5, 20)
    config.execution = defaults.execution(processes=1)
    return config
