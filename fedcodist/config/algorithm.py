"""Builds the algorithm that a config describes, by the kind of the method in `algorithm.name`."""

from collections.abc import Callable

from ml_collections import ConfigDict

from fedcodist.config.bind import accepted
from fedcodist.config.client_methods import check_not_text
from fedcodist.config.data import Data
from fedcodist.config.execution import check_plainly_executed, execution_of
from fedcodist.config.graph_methods import build_on_graph
from fedcodist.config.party_methods import build_of_parties
from fedcodist.config.pool_methods import build_of_pools
from fedcodist.config.registry import CLIENTS, GRAPH, PARTIES, POOLS, algorithm_entry, function_of
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.shape_checks import kind_of
from fedcodist.models.headed import NoHead

# FedAvg is a method of clients. As `algorithm.name` it stands for pools that do not teach each other.
_BUILDERS: dict[str, Callable[[ConfigDict, Data], FederatedAlgorithm]] = {
    CLIENTS: build_of_pools,
    POOLS: build_of_pools,
    PARTIES: build_of_parties,
    GRAPH: build_on_graph,
}


def build_algorithm(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Builds the algorithm that a config describes; examples are not read.

    Raises:
      ValueError, TypeError: names the setting and what is allowed.
    """
    execution_of(config)  # so that a mistake in `execution` is reported first
    entry = algorithm_entry(config)
    check_not_text("algorithm.name", entry, data)
    if entry.kind in (PARTIES, GRAPH):
        check_plainly_executed(config)
        if config.algorithm.get("validation") is not None:
            raise ValueError(
                f"algorithm.validation must be of methods with pools, got algorithm.name={entry.name}."
            )
        for setting in ("privacy", "example_privacy", "secure_sum", "compression"):
            if config.get("training", {}).get(setting) is not None:
                raise ValueError(
                    f"training.{setting} must be of methods with pools, got "
                    f"algorithm.name={entry.name}."
                )
    if entry.kind != PARTIES and config.algorithm.get("privacy") is not None:
        raise ValueError(
            f"algorithm.privacy must be of methods of parties, got algorithm.name={entry.name}."
        )
    if config.algorithm.get("compression") is not None:
        has_links = entry.kind == PARTIES and {"uplink", "downlink"} & accepted(function_of(entry))
        if not has_links:
            raise ValueError(
                "algorithm.compression must be of a method of parties with an argument uplink or "
                f"downlink, such as fed_kd_parties, got algorithm.name={entry.name}."
            )
    try:
        algorithm = _BUILDERS[entry.kind](config, data)
    except NoHead as error:
        group = "parties" if entry.kind == PARTIES else "algorithm"
        if config[group].get("embedding_width") is not None:
            raise
        raise ValueError(
            f"{group}.embedding_width must be set for algorithm.name={entry.name}, or networks of "
            f"one's own must be made by `headed`: {error}"
        ) from None
    if not isinstance(algorithm, FederatedAlgorithm):
        raise TypeError(
            f"algorithm.name {config.algorithm.name!r} must return an fc.FederatedAlgorithm, got "
            f"{kind_of(algorithm)}. A method of clients is named by training.method."
        )
    return algorithm
