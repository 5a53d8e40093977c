"""DepthFL (Kim et al., 2023): clients of several capacities train the first blocks of one network.

DepthFL: Depthwise Federated Learning for Heterogeneous Clients, Minjae Kim, Sangyoon Yu, Suhyun Kim,
Soo-Mook Moon. ICLR 2023, https://openreview.net/forum?id=pf8RIZTMU58
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import (
    client_result,
    fed_avg,
    learning_rates,
    uniform_weight,
)
from fedcodist.algorithms.pools.levels import (
    HeteroFLLevel,
    algorithm_of_levels,
    always,
    check_levels,
    level_method,
    mean_and_holders,
    naming_level,
    part_of_leaves,
)
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import (
    Batch,
    Model,
    Variables,
    in_float32,
    variable_shapes,
)
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.distillation.divergences import kl_divergence, softened_target

PyTree = Any


class DepthFLHyper(NamedTuple):
    """Learning rates, and the weight of the divergences between exits; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    distillation_weight: Any = 1.0


def depth_fl(
    model: Model,
    levels: Mapping[str, HeteroFLLevel],
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(),
    ramp_up: int = 0,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: DepthFLHyper = DepthFLHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Each level's clients train the first blocks of one network; its exits learn from each other.

    After every block there is an exit, a classifier. A client's loss is the sum of the label losses of
    its exits, plus for each exit the mean of KL(other || exit) over the client's other exits. The other
    exits get no gradient from this term. So deep blocks, which few clients have, learn what the shallow
    exits know.

    A parameter becomes the unweighted mean over the clients that had it, or does not change. A level's
    network is evaluated by the mean of its exits' logits. One level of one block is FedAvg with equal
    weights.

    The loss and the mean follow the authors' code in Flower's baselines, and are not verified in the
    paper. By default that code also adds FedDyn's regularisation, which is not offered. It also
    multiplies the divergences' weight by exp(-5 (1 - r / 300)^2) in the first 300 rounds r; for this use
    `ramp_up=300`.

    Args:
      model: the whole network, without mutable state; its outputs are `LayerOutputs` whose `hidden` are
        the exits' logits, as `with_exits` makes them.
      levels: name -> HeteroFLLevel; its model has the parameters of the whole network's first blocks.
      columns: the federated data's columns, for counting bytes.
      training, server_optimizer, schedule: as in `fed_avg`.
      ramp_up: rounds after which divergences have their full weight; 0: from the first round.
      hyper: learning rates, and the divergences' weight, at least 0.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
      TypeError: a network without exits.
    """
    check_arguments(depth_fl, locals())
    check_levels(model, levels, columns)
    check_integer("ramp_up", ramp_up, low=0)
    check_number("hyper.distillation_weight", hyper.distillation_weight, low=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))
    whole, shapes = averaging._replace(hyper=hyper), variable_shapes(model).params
    pools, parts = {}, {}
    for level, settings in levels.items():
        # A level has the first blocks of the whole network, and their exits.
        with naming_level(level):
            part = part_of_leaves(shapes, variable_shapes(settings.model).params)
        parts[level] = always(part)
        update = _client_update(settings.model, training)
        method = level_method(whole, settings.model, parts[level], update, mean_and_holders())
        pools[level] = Pool(method, settings.clients, settings.cohort_size)

    def of_round(hyper: DepthFLHyper, round: jax.Array) -> DepthFLHyper:
        weight = hyper.distillation_weight * ramp(round, ramp_up)
        return hyper._replace(distillation_weight=weight)

    return algorithm_of_levels("depth_fl", whole, pools, parts, columns, hyper, execution, of_round)


def ramp(round: jax.Array, rounds: int) -> jax.Array:
    """exp(-5 (1 - round / rounds)^2) before round `rounds`, and 1 from then on."""
    if not rounds:
        return jnp.ones(())
    return jnp.exp(-5 * (1 - jnp.minimum(round / rounds, 1)) ** 2)


def _client_update(network: Model, training: LocalTraining) -> Callable[..., Any]:
    """The `client_update` of a level's clients."""

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: DepthFLHyper,
    ) -> ClientResult:
        # Every exit learns the labels and the predictions of the other exits.
        def loss(outputs: Any, batch: Batch) -> jax.Array:
            exits = _exits(outputs)
            labels = sum(checked_loss(network.loss, logits, batch) for logits in exits)
            return labels + hyper.distillation_weight * mutual_divergence(exits)

        trained = train_client(
            network, training, message, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        return client_result(
            message, trained, weight=uniform_weight(data), client_state=client_state
        )

    return client_update


def mutual_divergence(exits: tuple[jax.Array, ...]) -> jax.Array:
    """The sum over exits of the mean of KL(other || exit) over other exits, [batch]; 0 for one exit.

    Args:
      exits: logits [batch, classes] of each; `other` gets no gradient.
    """
    divergence, total = kl_divergence("forward"), jnp.zeros(exits[0].shape[0], exits[0].dtype)
    targets = [softened_target(jax.lax.stop_gradient(logits), 1.0) for logits in exits]
    for index, logits in enumerate(exits):
        for other_index, target in enumerate(targets):
            if other_index != index:
                total = total + divergence(logits, target) / (len(exits) - 1)
    return total


def _exits(outputs: Any) -> tuple[jax.Array, ...]:
    """The exits' logits, of 16 bits as float32; raises TypeError for a network without exits."""
    if not isinstance(outputs, LayerOutputs) or not outputs.hidden:
        raise TypeError("DepthFL's networks must have exits, as `with_exits` makes them.")
    if any(getattr(logits, "shape", None) != outputs.logits.shape for logits in outputs.hidden):
        raise TypeError(
            "DepthFL's networks must return exits' logits [batch, classes] as `hidden`, got layers of "
            "another shape."
        )
    return tuple(map(in_float32, outputs.hidden))
