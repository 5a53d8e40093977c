"""pFedMe: each client fits a personal model near the global model, which moves towards these models.

"Personalized Federated Learning with Moreau Envelopes" (T Dinh, Tran, Nguyen, 2020).
https://arxiv.org/abs/2006.08848
"""

from collections.abc import Callable
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
from fedcodist.algorithms.clients.partially_shared import PERSONAL
from fedcodist.algorithms.clients.personal_model_state import (
    PersonalModelState,
    no_personal_model,
    personal_or_server_model,
    with_personal_model,
)
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import BatchLoss, LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant

PyTree = Any

MODEL, THETA = "model", "theta"


class PFedMeHyper(NamedTuple):
    """Floats of pFedMe; traced. Defaults are the released code's.

    Attributes:
      client_learning_rate: eta, of the local model w, which moves by eta lambda (theta - w) in a step.
      server_learning_rate: beta; the server's model moves by beta (clients' mean - model).
      personal_learning_rate: of theta.
      proximal_weight: lambda.
    """

    client_learning_rate: Any = 0.005
    server_learning_rate: Any = 1.0
    personal_learning_rate: Any = 0.09
    proximal_weight: Any = 15.0


def p_fed_me(
    model: Model,
    training: LocalTraining = LocalTraining(),
    personal_steps: int = 5,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: PFedMeHyper = PFedMeHyper(),
) -> FederatedMethod:
    """FedAvg on the clients' Moreau envelopes min over theta of F(theta) + (lambda / 2) ||theta - w||^2.

    On each batch theta takes K steps of gradient descent on that objective. Then w takes one step along
    the envelope's gradient lambda (w - theta). In each round theta starts at the received model and
    continues from batch to batch. The client keeps the last theta, which is evaluated as `personal`. For
    clients who never took part the server's model is evaluated. Means over clients are unweighted.

    In algorithm 1 all clients train in every round, and the server averages some of them (not verified).
    The released code does the same, weighted by examples. Here only the cohort trains. The released code
    adds 0.001 theta to theta's gradient; the paper does not (not verified).

    Args:
      model: the network.
      training: of w; its steps are algorithm 1's R local rounds. `optimizer` is plain SGD in the paper.
      personal_steps: K.
      server_optimizer, schedule: as in `fed_avg`; the paper's server is SGD with rate beta.
      hyper: learning rates, and lambda at least 0.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.
    """
    check_arguments(p_fed_me, locals())
    check_integer("personal_steps", personal_steps, low=1)
    check_number("hyper.personal_learning_rate", hyper.personal_learning_rate, low=0)
    check_number("hyper.proximal_weight", hyper.proximal_weight, low=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))

    def client_update(
        message: Variables,
        client_state: PersonalModelState,
        data: ClientData,
        key: jax.Array,
        hyper: PFedMeHyper,
    ) -> ClientResult:
        def envelope(loss: BatchLoss) -> Callable[..., Any]:
            differentiate = jax.value_and_grad(loss, has_aux=True)

            def differentiated(
                w: PyTree, mutable: PyTree, *batch: Any
            ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
                # Algorithm 1: theta nearly minimises l(theta; D) + (lambda / 2) ||theta - w||^2.
                def descend(
                    _: Any, now: tuple[PyTree, PyTree, jax.Array]
                ) -> tuple[PyTree, PyTree, jax.Array]:
                    theta, of_model, _ = now
                    (value, of_model), slope = differentiate(theta, of_model, *batch)
                    moved = lambda t, g, w: (
                        t - hyper.personal_learning_rate * (g + hyper.proximal_weight * (t - w))
                    ).astype(t.dtype)
                    return jax.tree.map(moved, theta, slope, w), of_model, value.astype(jnp.float32)

                start = (mutable[THETA], mutable[MODEL], jnp.zeros((), jnp.float32))
                theta, of_model, value = jax.lax.fori_loop(0, personal_steps, descend, start)

                # w_{r+1} = w_r - eta lambda (w_r - theta).
                gradient = jax.tree.map(lambda w, t: hyper.proximal_weight * (w - t), w, theta)
                return (value, {MODEL: of_model, THETA: theta}), gradient

            return differentiated

        # The local model and theta start at the received model.
        start = Variables(message.params, {MODEL: message.mutable, THETA: message.params})
        rate = hyper.client_learning_rate
        trained = train_client(model, training, start, data, key, rate, differentiate=envelope)

        # w_R is sent; theta becomes the client state.
        (w, mutable), theta = trained.variables, trained.variables.mutable[THETA]
        trained = trained._replace(variables=Variables(w, mutable[MODEL]))
        next_state = with_personal_model(Variables(theta, mutable[MODEL]))
        return client_result(message, trained, weight=uniform_weight(data), client_state=next_state)

    return averaging._replace(
        name="p_fed_me",
        hyper=hyper,
        gradient=None,  # that of FedAvg lacks a part of the loss
        client_update=client_update,
        init_client_state=lambda: no_personal_model(model),
        personal_models={PERSONAL: personal_or_server_model(averaging)},
    )
