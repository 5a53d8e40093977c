"""Federated Dropout: every client trains a random smaller part of the global network.

"Expanding the Reach of Federated Learning by Reducing Client Resource Requirements" (Caldas, Konecny,
McMahan, Talwalkar, 2018). https://arxiv.org/abs/1812.07210
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, client_result, fed_avg
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_several
from fedcodist.core.communication import tree_bytes
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables, check_stateless, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.core.shuffling import sample_without_replacement
from fedcodist.models.submodels import (
    Kept,
    Units,
    chain_units,
    check_chain,
    counts_of,
    gathered,
    places_of,
    scattered,
)

PyTree = Any


def fed_dropout(
    model: Model,
    submodel: Model,
    layers: Sequence[str] | Units,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg whose clients get a model with fewer units per hidden layer, drawn per client and round.

    Units are a dense layer's neurons, a convolution's filters, and an encoder's attention heads and
    inner neurons, but never its hidden width. All subsets of units are equally likely. The client's
    model is dense: dropped units are removed from a layer's outputs and from the next layer's inputs,
    and activations are not rescaled. The server puts updates back in their places. A parameter's update
    is the mean over the clients that had it, weighted by examples, and 0 if no client had it. With the
    default server optimizer, SGD with rate 1, a parameter becomes that mean or does not change; moments
    of Adam could still change it. If the smaller model is the whole network, this is FedAvg.

    A method that teaches with clients' models (FedDF) takes the whole network for a client's model: with
    the client's values where it trained, and elsewhere with those of the server.

    Only the smaller model is sent, both ways. Its units follow from a key that both sides know.

    Args:
      model: without mutable state. A chain of layers has the parameters
        {layer: {'kernel': [..., inputs, outputs], 'bias': [outputs]}}; after a convolution a dense
        layer's inputs are positions x filters.
      submodel: the same network with fewer units; in a chain, in all layers except the last.
      layers: for a chain, the layers' names in order. For another network, the units of its parameters'
        axes, such as `fedcodist.text.encoder_units.encoder_units`.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.

    Raises:
      ValueError: models that do not fit together, or that are not chains if names of layers are given.
    """
    check_arguments(fed_dropout, locals())
    check_stateless("model", model)
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    shapes, smaller = (variable_shapes(network).params for network in (model, submodel))
    if isinstance(layers, Mapping):
        units = layers
    else:
        check_several("layers", layers)
        check_chain(shapes, smaller, layers)
        units = chain_units(shapes, layers)
    counts = counts_of(shapes, smaller, units)

    def draw(key: jax.Array) -> Kept:
        return {
            group: jnp.sort(sample_without_replacement(keys.derive(key, "units", group), *count))
            for group, count in counts.items()
        }

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedAvgHyper,
    ) -> ClientResult:
        # The client trains only the units that are drawn for it in this round.
        places = places_of(draw(key), shapes, units)
        received = Variables(gathered(message.params, places), {})
        trained = train_client(submodel, training, received, data, key, hyper.client_learning_rate)
        result = client_result(received, trained, weight=data.size, client_state=client_state)
        # Updates return to the places of the units; `held` marks the parameters that the client had.
        held = jax.tree.map(jnp.ones_like, result.update)
        travels = tree_bytes(received.params)
        travelled = {
            "bytes_up": jnp.int32(travels + tree_bytes(result.weight)),
            "bytes_down": jnp.int32(travels),
        }
        return result._replace(
            update=scattered(result.update, places, shapes),
            extra=scattered(held, places, shapes),
            metrics=result.metrics | travelled,
        )

    return averaging._replace(
        client_update=client_update,
        reduce=mean_of_holders(),
        gradient=None,  # that of FedAvg is of the whole network
        name="fed_dropout",
    )


def mean_of_holders() -> Reduce:
    """The weighted mean of every parameter over the clients that had it; 0 where no client had it.

    A client's `extra` has the shape of its update: 1 for a parameter that it had and 0 elsewhere.
    """

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        weigh = lambda leaf: leaf * result.weight.astype(leaf.dtype)
        return (
            jax.tree.map(weigh, result.update),
            jax.tree.map(weigh, result.extra),
            result.weight,
        )

    def finalize(total: PyTree, message: PyTree, key: jax.Array) -> Aggregate:
        update, held, weight = total
        mean = jax.tree.map(lambda leaf, by: leaf / jnp.where(by > 0, by, 1), update, held)
        return Aggregate(mean, message.mutable, weight)

    return Reduce(prepare, finalize)
