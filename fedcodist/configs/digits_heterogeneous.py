r"""Clients with different networks, each judged on its own examples; scikit-learn's digits, no download.

The protocol of HtFLlib (https://arxiv.org/abs/2506.03954) at a size that takes seconds: 20 clients,
whose labels a Dirichlet distribution of concentration 0.1 decides; a quarter of each client's images are
its tests, measured after the last round as `client_test`; batches of 10, one epoch a round, SGD of rate
0.01. Client i has network i modulo 4: two networks of two convolutions, two of a dense layer, each with
embeddings of width 32 and a linear head. A run is a method's name. Nothing is trained before the first
round.

    fedcodist compare digits_heterogeneous
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults

# A method and its own settings. All others are the same for all of them.
METHODS: dict[str, dict] = {
    "local_only": dict(output_penalty=0.0),
    "fd": dict(weight=1.0, temperature=1.0),
    "fml": dict(own_weight=0.5, meme_weight=0.5, meme=0),  # whose network all share
    "lg_fed_avg": dict(weighted=True),
    "fed_proto": dict(weight=1.0, weighting="examples", predict_by="head"),
    "fed_tgp": dict(
        weight=10.0,
        server_learning_rate=0.01,
        server_training_epochs=100,
        server_training_batch_size=10,
        margin="largest",
        margin_threshold=100.0,
        predict_by="head",
    ),
    "fed_gh": dict(
        server_learning_rate=0.01,
        server_training_epochs=1,
        server_training_batch_size=10,
        predict_by="own_head",
    ),
    "fed_gen": dict(
        weighted=True,
        warm_up=0,
        generator_noise=32,
        generator_hidden=64,
        generator_steps=50,
        generator_batch_size=32,
        generator_learning_rate=1e-3,
        generated=None,  # as many embeddings as a batch has examples
        generated_weight=1.0,
        diversity_weight=1.0,
    ),
    "fed_mrl": dict(
        small=0,  # whose network the shared model has
        small_width=8,
        own_weight=1.0,
        shared_weight=1.0,
        weighted=True,
    ),
    "fed_l2g": dict(
        guided="embeddings",
        quiz_size=3,  # examples held out by a party
        warm_up=3,  # rounds
        weight=1.0,
        study_learning_rate=0.01,
        server_learning_rate=1.0,
    ),
}


def get_runs() -> list[str]:
    """Every method, local training alone first."""
    return list(METHODS)


def get_config(run: str = "fd") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("digits_heterogeneous", 200, run, seeds=3)
    config.data = dict(
        name="digits",
        partition=dict(name="dirichlet", num_clients=20, concentration=0.1),
        client_test_share=0.25,
        seed=0,
    )
    config.parties = dict(networks="digits_four", narrower=1, embedding_width=32)
    config.algorithm = algorithm(run)
    config.evaluation = defaults.evaluation(50, 100)
    config.execution = defaults.plain_execution(processes=1)
    return config


def algorithm(method: str, **differs: object) -> dict[str, object]:
    """`algorithm` of a method as HtFLlib trains: SGD whose rate stays, small batches, one epoch."""
    training = dict(optimizer="sgd", learning_rate=0.01, batch_size=10, epochs=1)
    return {"name": method, **training, **METHODS[method], **differs}
