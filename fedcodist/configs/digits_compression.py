r"""Accuracy against bytes on scikit-learn's handwritten digits, with four clients as in FedKD's paper.

    fedcodist compare digits_compression

A run is a method, or a method and the compressors of its uplink and downlink. All runs have the same
clients. As in that paper, FetchSGD sends about a quarter of FedAvg's bytes, and Federated Dropout 60 %.
FetchSGD's clients compute one gradient in a round, while those of other methods train locally. See
docs/compression.md.
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.configs import digits_methods

COMPRESSIONS = {
    "svd": dict(uplink="svd", downlink="svd"),
    "top_k": dict(uplink="top_k", downlink="top_k"),
    "quantisation": dict(uplink="quantisation", downlink="quantisation"),
    # The server sends one message to all, so a sketch, which can be summed, has no advantage there.
    "count_sketch": dict(uplink="count_sketch", downlink="top_k"),
}


def get_runs() -> list[str]:
    """FedAvg, the two baselines, FedAvg with each compression, and FedSDD with FedKD's."""
    compressions = [f"fed_avg,{name}" for name in COMPRESSIONS]
    return ["fed_avg", "fetch_sgd", "fed_dropout", *compressions, "fed_sdd,svd"]


def get_config(run: str = "fed_avg,svd") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    name, _, compression = run.partition(",")
    config = digits_methods.get_config("fed_sdd" if name == "fed_sdd" else "fed_avg")
    config.name = "digits_compression"
    config.run = run
    config.data.num_clients = config.pools.main.cohort_size = 4
    if name == "fed_sdd":
        config.algorithm.num_models = 2
    else:
        config.training.method = name
    # For 2,410 parameters: 720 floats up, 240 values with their indices down.
    if name == "fetch_sgd":
        config.training.fetch_sgd = dict(sketch_rows=3, sketch_columns=240, k=240, momentum=0.9)
        config.pools.main.server_learning_rate = 0.1
    if name == "fed_dropout":
        config.training.fed_dropout = dict(share=0.6)  # of the units of hidden layers
    if compression:
        config.training.compression = defaults.compression(
            **COMPRESSIONS[compression],
            share=0.1,  # top_k
            bits=8,  # quantisation
            rows=3,  # count_sketch
            columns=160,
            count=120,
        )
    return config
