"""FedRolex (Alam et al., 2022): clients train parts of one network; the parts roll in every round.

FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, Samiul Alam, Luyang
Liu, Ming Yan, Mi Zhang. https://arxiv.org/abs/2212.01548
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, FedAvgServer, fed_avg
from fedcodist.algorithms.pools.hetero_fl import (
    HeteroFLAdjustments,
    check_masks,
    pools_of_levels,
)
from fedcodist.algorithms.pools.levels import HeteroFLLevel, algorithm_of_levels, check_levels
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_several
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod, single_model
from fedcodist.core.model import Model
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant

WHOLE = "global_model"  # the whole network's name in tables


class FedRolexAdjustments(NamedTuple):
    """How far windows move, and HeteroFL's adjustments.

    Attributes:
      masked, scaled: as in `HeteroFLAdjustments`.
      units_per_round: by how many units the windows move in a round, at least 0.
    """

    masked: bool = True
    scaled: bool = True
    units_per_round: int = 1


class FedRolexServer(NamedTuple):
    """FedAvg's server of the whole network, and the first unit of the windows, int32."""

    averaging: FedAvgServer
    window: jax.Array

    def without_clients(self) -> "FedRolexServer":
        """In the first round of another run, windows begin with the first unit."""
        return self._replace(window=jnp.zeros_like(self.window))


def fed_rolex(
    model: Model,
    levels: Mapping[str, HeteroFLLevel],
    layers: Sequence[str],
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(),
    adjustments: FedRolexAdjustments = FedRolexAdjustments(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """HeteroFL whose levels have a window of units, which moves by one unit in every round.

    In round j a level's part of a hidden layer of K units begins with unit j mod K; the last unit is
    followed by the first. So all parts of the network are trained equally often, even if no level has
    the whole network. With `units_per_round=0` windows do not move, which is HeteroFL.

    The whole network is evaluated as `global_model`, and each level by its window of the next round.
    Clients have equal weights. The released code moves in the other direction, from the last units to
    the first. It also weights biases and the output layer by how often a parameter has been trained
    before, which is not offered. Masks and scales are HeteroFL's, as in the released code.

    Args:
      model, levels, layers, columns, training: as in `hetero_fl`.
      adjustments: how far windows move, masks and scales.
      server_optimizer, schedule, hyper, execution: as in `hetero_fl`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_rolex, locals())
    of_parts = HeteroFLAdjustments(adjustments.masked, adjustments.scaled)
    check_levels(model, levels, columns)
    check_several("layers", layers)
    check_masks(model, columns, training, of_parts)
    check_integer("adjustments.units_per_round", adjustments.units_per_round, low=0, high=2**16)
    if WHOLE in levels:
        raise ValueError(f"levels must have other names than {WHOLE!r}, the whole network's.")
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    rolling = _with_window(averaging, adjustments.units_per_round)
    pools, parts = pools_of_levels(
        rolling, levels, layers, training, of_parts, first_unit=lambda server: server.window
    )
    algorithm = algorithm_of_levels("fed_rolex", rolling, pools, parts, columns, hyper, execution)
    predictors = {WHOLE: single_model(model, rolling.variables), **algorithm.predictors}
    return algorithm._replace(predictors=predictors)


def _with_window(averaging: FederatedMethod, units_per_round: int) -> FederatedMethod:
    """FedAvg of the whole network, whose server state also holds the windows' first unit."""

    def server_update(
        server: FedRolexServer, aggregate: Aggregate, round: jax.Array, hyper: FedAvgHyper
    ) -> FedRolexServer:
        averaged = averaging.server_update(server.averaging, aggregate, round, hyper)
        # The windows of the next round begin further on.
        return FedRolexServer(averaged, server.window + units_per_round)

    return averaging._replace(
        init=lambda key: FedRolexServer(averaging.init(key), jnp.zeros((), jnp.int32)),
        server_update=server_update,
        variables=lambda server: averaging.variables(server.averaging),
    )
