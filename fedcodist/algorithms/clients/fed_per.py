"""FedPer: FedAvg whose last layers stay with each client and are trained together with the shared ones.

"Federated Learning with Personalization Layers" (Arivazhagan, Aggarwal, Singh, Choudhary, 2019).
https://arxiv.org/abs/1912.00818
"""

import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.partially_shared import partially_shared
from fedcodist.core.arguments import check_arguments
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen
from fedcodist.core.schedules import Schedule, constant
from fedcodist.models.headed import HEAD


def fed_per(
    model: Model,
    training: LocalTraining = LocalTraining(),
    private: Chosen = HEAD,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on the base layers; the personalisation layers stay with each client.

    A client trains both jointly for its epochs. The server's mean is weighted by clients' examples. All
    personalisation layers start from the server's initial values. In the paper each client draws its own
    (not verified). The reimplementation in FedRep's released code does not do so either.

    Args:
      model: the network.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.
      private: the personalisation layers, see `partially_shared`; by default the head of `headed`.

    Raises:
      TypeError, ValueError: as `partially_shared`.
    """
    check_arguments(fed_per, locals())
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    return partially_shared(averaging, private)._replace(name="fed_per")
