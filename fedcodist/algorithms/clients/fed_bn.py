"""FedBN: FedAvg whose normalisation layers, parameters and statistics, stay with each client.

"FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (Li, Jiang, Zhang, Kamp,
Dou, 2021). https://arxiv.org/abs/2102.07623
"""

import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.partially_shared import partially_shared
from fedcodist.core.arguments import check_arguments
from fedcodist.core.local_training import LocalTraining, OptimizerFactory
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model
from fedcodist.core.parts import Chosen
from fedcodist.core.schedules import Schedule, constant

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
      private: the normalisation layers, see `partially_shared`. Networks in which they have other
        names, such as `self.bn1` in NNX, need another pattern, such as 'bn*'.

    Raises:
      TypeError, ValueError: as `partially_shared`, so also for a network without normalisation layers.
    """
    check_arguments(fed_bn, locals())
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    return partially_shared(averaging, private)._replace(name="fed_bn")
