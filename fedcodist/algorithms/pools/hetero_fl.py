"""HeteroFL: clients of several capacities train nested parts of one network.

"HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients" (Diao,
Ding, Tarokh, 2021). https://arxiv.org/abs/2010.01264
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.hetero_fl_parts import masked_update, part_of_level
from fedcodist.algorithms.pools.levels import (
    HeteroFLLevel,
    Part,
    PartOf,
    algorithm_of_levels,
    check_levels,
    level_method,
    mean_and_holders,
    naming_level,
)
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import Downlink
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_several
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod
from fedcodist.core.model import Model
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant


class HeteroFLAdjustments(NamedTuple):
    """The paper's adjustments for clients' classes (masks) and levels' widths (scaling).

    Attributes:
      masked: whether logits of classes that a client does not have are set to zero in its training. The
        output layer's parameters of a class are then averaged over the clients that have this class.
      scaled: whether hidden layers' outputs are divided by the level's share of the layer's units. The
        layers must be Flax linen modules, as those of this library are. (The paper's networks scale only
        in training, before a normalisation that undoes it; here it is a part of the network.)
      wrapped: the levels' method -> the method that clients follow, such as
        `lambda method: private(method, clip=1.0, noise_multiplier=0.8)`, which needs masked=False. The
        clip must be constant, and the noise independent in every round. `compressed(method, ...)` may
        only have an uplink: the bytes of a downlink would be counted for the whole network.
    """

    masked: bool = True
    scaled: bool = True
    wrapped: Callable[[FederatedMethod], FederatedMethod] = lambda method: method


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
    """Clients of each level train the first units of every hidden layer of one network.

    So the parts of smaller levels lie within those of larger levels. For every parameter the server's
    pseudo-gradient is the unweighted mean over the clients that had it, and 0 if no client had it. With
    SGD of rate 1 a parameter becomes the mean of these clients' values, or does not change; moments of
    another optimizer may still change it. Without masks, one level with the whole network is FedAvg with
    equal weights. The levels' own networks are evaluated. Each client's level is fixed (the paper's
    "fix").

    Args:
      model: the whole network, a chain of dense or convolutional layers without mutable state, of
        parameters {layer: {'kernel': [..., inputs, outputs], 'bias': [outputs]}}. (The paper's batch
        normalisation, which needs statistics of all clients' examples after training, is not offered.)
      levels: name -> HeteroFLLevel.
      layers: the layers' names in their order; the last returns logits [batch, classes].
      columns: the federated data's columns, for counting bytes; masks need 'label'.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.
      adjustments: masks and scales.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(hetero_fl, locals())
    check_levels(model, levels, columns)
    check_several("layers", layers)
    check_masks(model, columns, training, adjustments)
    whole = fed_avg(model, training, server_optimizer, schedule, hyper)
    pools, parts = pools_of_levels(whole, levels, layers, training, adjustments)
    whole = adjustments.wrapped(whole)  # all levels have its server
    return algorithm_of_levels("hetero_fl", whole, pools, parts, columns, hyper, execution)


def check_masks(
    model: Model,
    columns: Mapping[str, Any],
    training: LocalTraining,
    adjustments: HeteroFLAdjustments,
) -> None:
    """Raises ValueError that names `adjustments.masked` if clients could not use masks."""
    if adjustments.masked and "label" not in columns:
        raise ValueError(
            f"adjustments.masked must be False for columns without 'label', got {sorted(columns)}."
        )
    if adjustments.masked and model.num_classes == 1:
        raise ValueError(
            "adjustments.masked must be False for a network of one logit, which has no class to mask: "
            "give it a second one."
        )
    if adjustments.masked and training.differentiate is not None:
        raise ValueError(
            "adjustments.masked must be False with training.differentiate: with masks, clients tell "
            "which classes they have."
        )


def pools_of_levels(
    whole: FederatedMethod,
    levels: Mapping[str, HeteroFLLevel],
    layers: Sequence[str],
    training: LocalTraining,
    adjustments: HeteroFLAdjustments,
    first_unit: Callable[[Any], Any] = lambda server: 0,
) -> tuple[dict[str, Pool], dict[str, PartOf]]:
    """Every level's clients, and which parameters of the whole network they have.

    Args:
      whole: the method of the whole network.
      levels, layers, training, adjustments: as in `hetero_fl`.
      first_unit: the server's state -> index of the unit at which the parts begin in every hidden layer.
    """
    pools, parts = {}, {}
    for level, settings in levels.items():
        with naming_level(level):
            part_at, network = part_of_level(
                whole.model, settings.model, layers, adjustments.scaled
            )
        part = _beginning_with(part_at, first_unit)
        update = masked_update(network, training, adjustments.masked)
        reduce = mean_and_holders(layers[-1] if adjustments.masked else None)
        method = adjustments.wrapped(level_method(whole, network, part, update, reduce))
        _check_privacy(method)
        _check_downlink(method)
        pools[level], parts[level] = Pool(method, settings.clients, settings.cohort_size), part
    return pools, parts


def _check_privacy(method: FederatedMethod) -> None:
    """Raises ValueError if a level's privacy has a state, since levels have one server together."""
    if method.privacy is not None and (method.privacy.is_adaptive or method.privacy.bands > 1):
        raise ValueError(
            "adjustments.wrapped must make methods private with a constant clip (adaptive=None) and "
            "with noise that is independent in every round."
        )


def _check_downlink(method: FederatedMethod) -> None:
    """Raises ValueError for a compressed downlink, whose bytes would be those of the whole network."""
    server = jax.eval_shape(lambda: method.init(jax.random.key(0)))
    is_downlink = lambda node: isinstance(node, Downlink)
    links = filter(is_downlink, jax.tree.leaves(server, is_leaf=is_downlink))
    if any(jax.tree.leaves(link.params) for link in links):
        raise ValueError(
            "adjustments.wrapped must compress the uplink only (downlink=None): the bytes of a downlink "
            "would be counted for the whole network."
        )


def _beginning_with(part_at: Callable[[Any], Part], first_unit: Callable[[Any], Any]) -> PartOf:
    return lambda server: part_at(first_unit(server))
