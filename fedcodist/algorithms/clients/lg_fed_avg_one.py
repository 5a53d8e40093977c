"""LG-FedAvg for clients with the same network: representations stay private, the head is shared.

"Think Locally, Act Globally: Federated Learning with Local and Global Representations" (Liang, Liu,
Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, 2020). https://arxiv.org/abs/2001.01523
"""

import jax
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.partially_shared import partially_shared
from fedcodist.core.arguments import check_arguments
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen, choice_of, flags
from fedcodist.core.schedules import Schedule, constant
from fedcodist.models.headed import HEAD


def lg_fed_avg_one(
    model: Model,
    training: LocalTraining = LocalTraining(),
    shared: Chosen = HEAD,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on the head; all layers below it stay with each client.

    A client trains both jointly for its epochs, and the server averages the heads. In the paper clients
    may have different networks below the head; `lg_fed_avg` is for such parties. The released code
    starts from a model trained by FedAvg; here all clients start from the server's initial values. For
    new devices it also predicts with an ensemble of all clients, which is not offered here.

    Args:
      model: the network.
      training, server_optimizer, schedule, hyper: as in `fed_avg`.
      shared: the part that is sent: patterns, or a function of a leaf's path, as in `partially_shared`;
        by default the head of `headed`.

    Raises:
      TypeError, ValueError: names the argument, as `partially_shared`.
    """
    check_arguments(lg_fed_avg_one, locals())
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    shapes = variable_shapes(model)
    is_shared = choice_of("shared", shared, shapes)
    chosen = jax.tree.leaves(flags(shapes.params, is_shared))
    if not any(chosen):
        raise ValueError("shared must choose parameters, it chooses none of the model's.")
    if all(chosen):
        raise ValueError("shared must leave out parameters, it chooses all of the model's.")
    method = partially_shared(averaging, lambda path: not is_shared(path))
    return method._replace(name="lg_fed_avg_one")
