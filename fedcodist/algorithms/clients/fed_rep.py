"""FedRep: each client first fits its private head to the shared body, and then trains the body.

"Exploiting Shared Representations for Personalized Federated Learning" (Collins, Hassani, Mokhtari,
Shakkottai, 2021). https://arxiv.org/abs/2102.07078
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, client_result, fed_avg
from fedcodist.algorithms.clients.partially_shared import only_trains, partially_shared
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import MOST_EPOCHS, check_integer
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen, choice_of
from fedcodist.core.schedules import Schedule, constant
from fedcodist.models.headed import HEAD

PyTree = Any


def fed_rep(
    model: Model,
    training: LocalTraining = LocalTraining(),
    private: Chosen = HEAD,
    head_epochs: int = 10,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on the body (the representation); a client trains its head before the body, not with it.

    In a round a client makes `head_epochs` passes that change only its head, then `training.epochs`
    passes that change only the body. Both have the same learning rate and fresh optimizers. The server's
    mean is weighted by clients' examples, as in the released code. Algorithm 1 averages uniformly (not
    verified), which is the same if all clients have equally many examples. Batch statistics are updated
    in both phases.

    Args:
      model: the network.
      training: of the body; also of the head, except for the epochs. The released code has 10 epochs of
        the head and 1 of the body, and SGD with momentum 0.5.
      private: the head, see `partially_shared`; by default that of `headed`.
      head_epochs: passes over a client's examples that train the head.
      server_optimizer, schedule, hyper: as in `fed_avg`.

    Raises:
      TypeError, ValueError: names the argument; as `partially_shared`.
    """
    check_arguments(fed_rep, locals())
    check_integer("head_epochs", head_epochs, low=1, high=MOST_EPOCHS)
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    is_head = choice_of("private", private, variable_shapes(model))
    optimizer = training.optimizer
    of_head = training._replace(optimizer=only_trains(optimizer, is_head), epochs=head_epochs)
    of_body = training._replace(optimizer=only_trains(optimizer, lambda path: not is_head(path)))

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedAvgHyper,
    ) -> ClientResult:
        rate = hyper.client_learning_rate
        # Algorithm 1, client update: local steps on the head, with the received body fixed.
        fitted = train_client(model, of_head, message, data, keys.derive(key, "head"), rate)

        # Then steps on the body, with the new head fixed.
        trained = train_client(model, of_body, fitted.variables, data, key, rate)
        num_steps = fitted.num_steps + trained.num_steps
        loss = fitted.loss * fitted.num_steps + trained.loss * trained.num_steps
        trained = trained._replace(
            num_steps=num_steps,
            loss=loss / jnp.maximum(num_steps, 1),
            num_examples=fitted.num_examples + trained.num_examples,
        )
        return client_result(message, trained, weight=data.size, client_state=client_state)

    alternating = averaging._replace(client_update=client_update)
    return partially_shared(alternating, private)._replace(name="fed_rep")
