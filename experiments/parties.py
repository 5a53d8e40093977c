"""From a config's `parties` and `algorithm` to a method of parties who each own a model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.data import Data, choice
from fedcodist.algorithms.fed_md import FedMDHyper, fed_md
from fedcodist.algorithms.parties import Group
from fedcodist.checks import check_integer, check_number
from fedcodist.client_training import LocalTraining, OptimizerFactory, Preprocess
from fedcodist.federated_algorithm import FederatedAlgorithm
from fedcodist.for_each_client import Execution
from fedcodist.model import from_flax_linen
from fedcodist.models.fed_md import (
    TABLE_1,
    TABLE_2,
    FedMDNetwork,
    FullyConnected,
    Shape,
    narrower,
    output_penalty,
)
from fedcodist.run_folder import PHASES

# Party i has network i. A single width is a fully connected network, the paper's weak party.
NETWORKS: dict[str, Sequence[Shape]] = {
    "table_1": TABLE_1,
    "table_2": TABLE_2,
    "digits": 2 * (Shape((8, 16), 0.1), Shape((64,), 0.0), Shape((32,), 0.0)),
}


def build_fed_md(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """FedMD's collaboration as a config describes it. (`experiments.phases` is what comes before.)"""
    settings = config.algorithm
    public = public_of(data)
    for rate in ("learning_rate", "output_penalty"):
        check_number(f"algorithm.{rate}", settings[rate], low=0)
    name = "fed_md"
    if config.phases.stopping == "test_data":
        name += f", {PHASES} stopped on test data"
    return fed_md(
        party_groups(config, data),
        public.train.columns["label"],
        public.num_classes,
        digest=digest_training(config, public.preprocess),
        revisit=revisit_training(config, data.preprocess),
        alignment_size=settings.alignment_size,
        weights=settings.weights,
        exchanged=settings.exchanged,
        gradient_hook=output_penalty(settings.output_penalty),
        inference_batch_size=config.evaluation.batch_size,
        hyper=FedMDHyper(
            settings.learning_rate, settings.learning_rate, temperature=settings.temperature
        ),
        execution=Execution(config.execution.loop, config.execution.chunk_size),
        name=name,
    )


PARTY_METHODS: dict[str, Callable[[ConfigDict, Data], FederatedAlgorithm]] = {
    "fed_md": build_fed_md
}


def public_of(data: Data) -> Any:
    """The data's public part, or one line that tells which data have one."""
    if data.public is None:
        raise ValueError(
            "data.name must be 'digits_public_private' or 'cifar_public_private' for methods of "
            "parties, which need public examples."
        )
    return data.public


def party_groups(config: ConfigDict, data: Data) -> dict[str, Group]:
    """Who has which network: architecture -> its parties."""
    shapes, count = party_shapes(config), data.splits["train"].num_clients
    if len(shapes) != count:
        raise ValueError(
            f"parties.networks must be {count}, one per party (data.num_parties), got {len(shapes)}."
        )
    example = jnp.zeros((1, *data.splits["train"].columns["image"].shape[1:]))
    groups = {}
    for shape in dict.fromkeys(shapes):
        model = from_flax_linen(_network(shape, public_of(data).num_classes), example)
        clients = [party for party, own in enumerate(shapes) if own == shape]
        groups[_name(shape)] = Group(model, np.array(clients))
    return groups


def party_shapes(config: ConfigDict) -> tuple[Shape, ...]:
    """Every party's network, in their order."""
    networks, divisor = config.parties.networks, config.parties.narrower
    check_integer("parties.narrower", divisor, low=1)
    if isinstance(networks, str):
        return narrower(choice("parties.networks", networks, NETWORKS), divisor)
    return narrower([Shape(tuple(widths), dropout) for widths, dropout in networks], divisor)


def digest_training(config: ConfigDict, preprocess: Preprocess) -> LocalTraining:
    """How parties learn the consensus."""
    settings = config.algorithm
    return LocalTraining(
        adam(settings), settings.digest_batch_size, settings.digest_epochs, preprocess
    )


def revisit_training(config: ConfigDict, preprocess: Preprocess) -> LocalTraining:
    """How parties go back to their private examples."""
    settings = config.algorithm
    return LocalTraining(
        adam(settings), settings.revisit_batch_size, settings.revisit_epochs, preprocess
    )


def adam(settings: ConfigDict) -> OptimizerFactory:
    """Adam with the config's epsilon."""
    check_number("algorithm.epsilon", settings.epsilon, above=0)
    return functools.partial(optax.adam, eps=settings.epsilon)


def _network(shape: Shape, classes: int) -> Any:
    if len(shape.widths) == 1:
        return FullyConnected(shape.widths[0], classes)
    return FedMDNetwork(shape.widths, shape.dropout, classes)


def _name(shape: Shape) -> str:
    if len(shape.widths) == 1:
        return f"dense_{shape.widths[0]}"
    return f"conv_{'_'.join(map(str, shape.widths))}_dropout_{round(100 * shape.dropout)}"
