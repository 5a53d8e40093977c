"""HeteroFL (Diao et al., 2021): clients of several capacities train nested parts of one network.

https://arxiv.org/abs/2010.01264
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import (
    FedAvgHyper,
    Schedule,
    client_result,
    constant,
    fed_avg,
)
from fedcodist.algorithms.pools.hetero_fl_parts import part_of_level
from fedcodist.algorithms.pools.pool import Pool, assemble, check_pools
from fedcodist.algorithms.pools.pool_rounds import train_pools
from fedcodist.core import batches, keys
from fedcodist.core.aggregation import Aggregate, Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_columns, check_several
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.local_training import LocalTraining, OptimizerFactory, train_client
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod
from fedcodist.core.model import Model, Variables, check_stateless, variable_shapes
from fedcodist.models.submodels import gathered, scattered

PyTree = Any


class HeteroFLLevel(NamedTuple):
    """Clients of one complexity level.

    Attributes:
      model: the network with fewer units in its hidden layers, or as many.
      clients: int [level], the clients' indices in the federated data. Levels may overlap.
      cohort_size: clients drawn per round, without replacement, independently of other levels.
    """

    model: Model
    clients: np.ndarray
    cohort_size: int


class HeteroFLAdjustments(NamedTuple):
    """What the paper does beside averaging nested parts, for clients' classes and levels' widths.

    Attributes:
      masked: whether logits of classes that a client does not have are zero in its training, and the
        output layer's columns and biases of a class are averaged over the clients that have it.
      scaled: whether hidden layers' outputs are divided by the share of units that the level has of
        them. Layers must be modules of Flax linen, which all of ours are. (The paper's networks do so in
        training alone, before a normalisation that undoes it; here it is a part of the network.)
    """

    masked: bool = True
    scaled: bool = True


def hetero_fl(
    model: Model,
    levels: Mapping[str, HeteroFLLevel],
    layers: Sequence[str],
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(),
    adjustments: HeteroFLAdjustments = HeteroFLAdjustments(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """One network of which every level of clients trains the first units of each hidden layer.

    So smaller levels' parts lie within larger ones'. The server's pseudo-gradient is, for every
    parameter, the mean over the clients that had it, each counting the same, and 0 where no client had.
    With SGD of rate 1 a parameter becomes their mean, or stays; moments of another optimizer may move it
    on. Without masks, one level with the whole network is FedAvg with equal weights. What is evaluated
    are the levels' own networks. A client's level is fixed ("fix" in the paper).

    Args:
      model: the whole network, a chain of dense or convolutional layers without mutable state, of
        parameters {layer: {'kernel': [..., inputs, outputs], 'bias': [outputs]}}. (The paper's batch
        normalisation, which needs statistics of all clients' examples after training, is not offered.)
      levels: name -> HeteroFLLevel.
      layers: the layers' names in their order; the last returns logits [batch, classes].
      columns: the federated data's columns, for counting bytes; 'label' is read by masks.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.
      adjustments: masks and scales.
      execution: how clients are executed.

    Raises:
      ValueError: one line that names the argument and what is allowed.
    """
    check_arguments(hetero_fl, locals())
    check_stateless("model", model)
    check_several("layers", layers)
    check_columns("columns", columns)
    if not levels:
        raise ValueError("levels must hold at least one level, got none.")
    if adjustments.masked and "label" not in columns:
        raise ValueError(
            f"adjustments.masked must be False for columns without 'label', got {sorted(columns)}."
        )
    whole = fed_avg(model, training, server_optimizer, schedule, hyper)
    shapes = variable_shapes(model).params
    places, pools, start = {}, {}, "whole"
    for level, settings in levels.items():
        try:
            places[level], part = part_of_level(model, settings.model, layers, adjustments.scaled)
        except ValueError as error:
            raise ValueError(f"levels[{level!r}]: {error}") from None
        method = _method(whole, part, places[level], layers[-1], training, adjustments.masked)
        pools[level] = Pool(method, settings.clients, settings.cohort_size)
        if variable_shapes(part).params == shapes:
            start = level  # so it starts as a pool of this name would in another algorithm
    pools = check_pools(pools, "levels")
    same = lambda value: dict.fromkeys(pools, value)

    def round_(state, client_states, round, hyper):
        # Every level's clients train the first units of each layer of the one network.
        trained = train_pools(pools, same(state), client_states, round, same(hyper), execution)
        # Each parameter moves by the mean over the clients that had it; others keep the old value.
        update = mean_of_owners(trained.aggregates, places, shapes)
        weight = jnp.sum(jnp.stack([aggregate.weight for aggregate in trained.aggregates.values()]))
        state = whole.server_update(state, Aggregate(update, {}, weight), round.index, hyper)
        return state, trained.client_states, trained.metrics

    algorithm = assemble(
        "hetero_fl", pools, columns, hyper, round_, servers=same, hyper_of_methods=same
    )
    return algorithm._replace(init=lambda key: whole.init(keys.derive(key, "init", start)))


def mean_of_owners(
    aggregates: Mapping[str, Aggregate], places: Mapping[str, PyTree], shapes: PyTree
) -> PyTree:
    """The mean of every parameter of the whole over the clients that had it; 0 where none had.

    Args:
      aggregates: level -> the mean over its clients, and as `extra` how many of them had each parameter,
        of a shape that broadcasts to the parameter's.
      places: level -> where its parameters are in the whole.
      shapes: of the whole.
    """
    total = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    owners = total
    for level, aggregate in aggregates.items():
        held = jax.tree.map(
            lambda leaf, by: jnp.broadcast_to(by, leaf.shape),
            aggregate.pseudo_gradient,
            aggregate.extra,
        )
        of_level = jax.tree.map(jnp.multiply, aggregate.pseudo_gradient, held)
        add = lambda tree, part, level=level: jax.tree.map(
            jnp.add, tree, scattered(part, places[level], shapes)
        )
        total, owners = add(total, of_level), add(owners, held)
    return jax.tree.map(lambda leaf, by: leaf / jnp.where(by > 0, by, 1), total, owners)


def classes_of(data: ClientData, classes: int) -> jax.Array:
    """Which classes a client has examples of, float [classes] of 0 and 1."""
    _, rows, is_real = batches.places(0, data.capacity, data.size)
    labels = class_labels(data.columns["label"][data.start + rows], classes)
    return jnp.zeros(classes).at[labels].max(is_real.astype(jnp.float32))


def _method(
    whole: FederatedMethod,
    part: Model,
    places: PyTree,
    last: str,
    training: LocalTraining,
    masked: bool,
) -> FederatedMethod:
    """What a level's clients do; its server is the whole's.

    Args:
      whole: FedAvg of the whole network.
      part: the level's network.
      places: where its parameters are in the whole.
      last: name of the output layer.
      training: as in `hetero_fl`.
      masked: as in `HeteroFLAdjustments`.
    """
    variables = lambda server: Variables(gathered(server.params, places), {})

    def client_update(message, client_state, data, key, hyper):
        classes, loss = None, None
        if masked:
            # Masked cross-entropy: logits of classes that the client does not have are 0.
            classes = classes_of(data, part.num_classes)
            loss = lambda outputs, batch: part.loss(jnp.where(classes > 0, outputs, 0), batch)
        trained = train_client(
            part, training, message, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        return client_result(message, trained, weight=1.0, client_state=client_state, extra=classes)

    return whole._replace(
        model=part,
        broadcast=variables,
        client_update=client_update,
        reduce=_mean_and_owners(last),
        variables=variables,
    )


def _mean_and_owners(last: str) -> Reduce:
    """The mean of every parameter over a level's clients that had it, and how many these are.

    A client has all of its network's parameters. Where it says which classes it has (`extra`), it has of
    the output layer theirs alone.
    """

    def prepare(result, key):
        held = jax.tree.map(lambda leaf: result.weight.astype(leaf.dtype), result.update)
        if result.extra is not None:
            held |= {last: jax.tree.map(lambda leaf: leaf * result.extra, held[last])}
        return jax.tree.map(jnp.multiply, result.update, held), held, result.weight

    def finalize(total, message, key):
        update, held, weight = total
        mean = jax.tree.map(lambda leaf, by: leaf / jnp.where(by > 0, by, 1), update, held)
        return Aggregate(mean, message.mutable, weight, held)

    return Reduce(prepare, finalize)
