r"""Clients with different networks, each evaluated on its own examples; digits, no download.

This is the protocol of HtFLlib (https://arxiv.org/abs/2506.03954) at a small size. The labels of 20
clients follow a Dirichlet distribution of concentration 0.1. A quarter of each client's images are its
test examples, evaluated after the last round as `client_test`. Batches have 10 images, a round has one
epoch, and SGD has the rate 0.01. Client i has network i modulo 4: two networks have two convolutions,
two have a dense layer, and each has embeddings of width 32 and a linear head. A run is a method's name.
Nothing is trained before the first round.

    fedcodist compare digits_heterogeneous

A run of three seeds takes one to four minutes. Training alone reaches 92.5 % of all test examples,
and no method is better by an interval above zero (docs/results/heterogeneous.md).
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults

# Each method's own settings. All other settings are the same for all methods.
METHODS: dict[str, dict] = {
    "local_only": dict(output_penalty=0.0),
    "fd": dict(weight=1.0, temperature=1.0),
    "fml": dict(own_weight=0.5, meme_weight=0.5, meme=0),  # the meme has party 0's network
    "fed_kd_parties": dict(
        student=0,  # the student has party 0's network
        student_learning_rate=0.01,
        output_weight=1.0,
        hidden_weight=1.0,
        detach_normaliser=True,  # otherwise labels may be unlearned: see MutualLosses
        compression=dict(uplink="svd", downlink="svd", start=0.95, end=0.98),
    ),
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
        generator_optimizer="adam",  # runs before 2026-11-29 had the parties' SGD
        generator_steps=50,
        generator_batch_size=32,
        generator_learning_rate=1e-3,
        generated=None,  # as many embeddings as a batch has examples
        generated_weight=1.0,
        diversity_weight=1.0,
    ),
    "fed_mrl": dict(
        small=0,  # the shared model has party 0's network
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


def algorithm(method: str) -> dict[str, object]:
    """`algorithm` of a method as HtFLlib trains: SGD of a constant rate, small batches, one epoch."""
    training = dict(optimizer="sgd", learning_rate=0.01, batch_size=10, epochs=1)
    return {"name": method, **training, **METHODS[method]}
