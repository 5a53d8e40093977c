"""Ditto: FedAvg trains the global model, and each client trains a personal model near it.

"Ditto: Fair and Robust Federated Learning Through Personalization" (Li, Hu, Beirami, Smith, 2021).
https://arxiv.org/abs/2012.04221
"""

from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.algorithms.clients.first_state import with_first_state
from fedcodist.algorithms.clients.partially_shared import PERSONAL
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import MOST_EPOCHS, check_integer, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant

PyTree = Any


class DittoHyper(NamedTuple):
    """Learning rates and lambda, which keeps personal models near the global one; traced.

    Both models have the same `client_learning_rate`, as in algorithm 1 and in the released code.
    """

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    proximal_weight: Any = 1.0


def ditto(
    model: Model,
    training: LocalTraining = LocalTraining(),
    personal_epochs: int = 1,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: DittoHyper = DittoHyper(),
) -> FederatedMethod:
    """FedAvg whose clients also train a personal model v on F(v) + (lambda / 2) ||v - w||^2.

    w is the global model that the client received. v starts as the server's initial model, which clients
    draw from the server's seed. It is the client state and is evaluated as `personal`. The global model
    is FedAvg's for every lambda. With lambda = 0, v is trained by the client alone.

    The released code takes one step on v and one on w for each batch. Therefore both models visit the
    same batches here too, in the same order. The released code averages updates uniformly, and can
    choose each client's lambda on validation data. Here means are weighted by clients' examples, and all
    clients have the same lambda.

    Args:
      model: the network.
      training: of both models.
      personal_epochs: passes over a client's examples that train v.
      server_optimizer, schedule: as in `fed_avg`.
      hyper: learning rates, and lambda at least 0.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.
    """
    check_arguments(ditto, locals())
    check_integer("personal_epochs", personal_epochs, low=1, high=MOST_EPOCHS)
    check_number("hyper.proximal_weight", hyper.proximal_weight, low=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))
    of_personal = training._replace(epochs=personal_epochs)

    def client_update(
        message: Variables,
        client_state: Variables,
        data: ClientData,
        key: jax.Array,
        hyper: DittoHyper,
    ) -> ClientResult:
        rate = hyper.client_learning_rate
        # Algorithm 1: the client trains the global model from w^t; the difference will be sent.
        trained = train_client(model, training, message, data, key, rate)

        # v_k takes steps along the gradient of F_k(v_k), plus lambda (v_k - w^t) with the received w^t.
        def towards_global(gradient: PyTree, params: PyTree) -> PyTree:
            pull = lambda g, v, w: g + hyper.proximal_weight * (v - w)
            return jax.tree.map(pull, gradient, params, message.params)

        personal = train_client(
            model, of_personal, client_state, data, key, rate, gradient_hook=towards_global
        )
        trained = trained._replace(
            num_steps=trained.num_steps + personal.num_steps,
            num_examples=trained.num_examples + personal.num_examples,
        )
        result = client_result(message, trained, data.size, client_state=personal.variables)
        return result._replace(metrics=result.metrics | {"personal_loss": personal.loss})

    method = averaging._replace(
        name="ditto",
        hyper=hyper,
        client_update=client_update,
        personal_models={PERSONAL: PersonalModel(model, lambda server, client_state: client_state)},
    )
    return with_first_state(method, first=lambda initial: initial)
