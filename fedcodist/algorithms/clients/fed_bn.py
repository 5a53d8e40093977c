"""FedBN: FedAvg whose normalisation layers, parameters and statistics, stay with each client.

"FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (Li, Jiang, Zhang, Kamp,
Dou, 2021). https://arxiv.org/abs/2102.07623
"""

from collections.abc import Callable

import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.partially_shared import partially_shared
from fedcodist.core.arguments import check_arguments
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen, choice_of
from fedcodist.core.schedules import Schedule, constant
from fedcodist.core.trees import named_leaves

NORMALISATION = "*[Nn]orm*"  # BatchNorm_0 and GroupNorm_1 of Flax, batch_norm of Haiku


def fed_bn(
    model: Model,
    training: LocalTraining = LocalTraining(),
    private: Chosen = NORMALISATION,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on all layers but the normalisation layers.

    Scales, shifts and batch statistics stay with each client. The released code does the same: it does
    not share layers with 'bn' in their names.

    Args:
      model: a network with normalisation layers.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.
      private: the normalisation layers: patterns of their own names, or a function of a leaf's path, as
        in `partially_shared`. A pattern does not choose a block of layers, so the dense layer of a block
        `ConvNorm_0` is shared. Networks in which normalisation layers have other names, such as
        `self.bn1` in NNX, need another pattern, such as 'bn*'.

    Raises:
      TypeError, ValueError: as `partially_shared`, so also for a network without normalisation layers.
    """
    check_arguments(fed_bn, locals())
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    is_private = _choice_of_layers(private, variable_shapes(model))
    return partially_shared(averaging, is_private)._replace(name="fed_bn")


def _choice_of_layers(chosen: Chosen, variables: Variables) -> Callable[[str], bool]:
    """`choice_of` whose patterns are matched with the names of single layers."""
    if callable(chosen):
        return chosen
    of_layers = (
        {_layer_and_array(path): leaf for path, leaf in named_leaves(tree).items()}
        for tree in variables
    )
    is_chosen = choice_of("private", chosen, Variables(*of_layers))
    return lambda path: is_chosen(_layer_and_array(path))


def _layer_and_array(path: str) -> str:
    """The last two names of a path. Haiku's moving averages belong to the layer above them."""
    names = [name for name in path.split("/") if name != "~" and not name.endswith("_ema")]
    return "/".join(names[-2:])
