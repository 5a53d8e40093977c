"""FedProx: FedAvg with a proximal term that keeps clients near the model that they received.

"Federated Optimization in Heterogeneous Networks" (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, 2020).
https://arxiv.org/abs/1812.06127
"""

from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant

PyTree = Any


class FedProxHyper(NamedTuple):
    """Learning rates and mu, the weight of the proximal term; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    proximal_weight: Any = 0.01


def fed_prox(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedProxHyper = FedProxHyper(),
) -> FederatedMethod:
    """FedAvg with (mu / 2) ||w - w_received||^2 added to every client's loss.

    Its gradient mu (w - w_received) acts on parameters, not on batch statistics. mu = 0 is FedAvg.

    Args:
      model, training, server_optimizer, schedule: as in `fed_avg`.
      hyper: learning rates and the proximal weight mu, at least 0.

    Raises:
      ValueError: a negative or non-finite proximal weight.
    """
    check_arguments(fed_prox, locals())
    check_number("hyper.proximal_weight", hyper.proximal_weight, low=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedProxHyper,
    ) -> ClientResult:
        # The local problem is the client's loss + (mu / 2) ||w - w_received||^2.
        def towards_received(gradient: PyTree, params: PyTree) -> PyTree:
            pull = lambda g, w, received: g + hyper.proximal_weight * (w - received)
            return jax.tree.map(pull, gradient, params, message.params)

        trained = train_client(
            model,
            training,
            message,
            data,
            key,
            hyper.client_learning_rate,
            gradient_hook=towards_received,
        )
        return client_result(message, trained, weight=data.size, client_state=client_state)

    return averaging._replace(hyper=hyper, client_update=client_update, name="fed_prox")
