"""APFL: each client predicts with a mixture of its own model and the global one, and learns the share.

"Adaptive Personalized Federated Learning" (Deng, Kamani, Mahdavi, 2020).
https://arxiv.org/abs/2003.13461
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.algorithms.clients.first_state import with_first_state
from fedcodist.algorithms.clients.partially_shared import PERSONAL
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.joint_model import joint_model, joint_optimizer
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant

PyTree = Any
GLOBAL, MIXED, ALPHA = "global", "mixed", "alpha"


class APFLHyper(NamedTuple):
    """Learning rates and the mixture; traced.

    Attributes:
      client_learning_rate: of w and v.
      server_learning_rate: of the server's optimizer.
      alpha: the initial share of v in a client's mixture.
      alpha_learning_rate: of the shares; with 0 they do not change. The released code uses
        `client_learning_rate`.
    """

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    alpha: Any = 0.5
    alpha_learning_rate: Any = 0.05


class APFLState(NamedTuple):
    """The client state.

    Attributes:
      own: v; its mutable state comes from the mixture's forward passes.
      share: alpha, v's share of the mixture, in [0, 1]; float32.
      has_started: bool; false before the first participation, when the share is `hyper.alpha`.
    """

    own: Variables
    share: jax.Array
    has_started: jax.Array


def apfl(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: APFLHyper = APFLHyper(),
) -> FederatedMethod:
    """FedAvg whose clients also have a model v and predict with alpha v + (1 - alpha) w.

    On each batch w takes FedAvg's step. v takes a step along the gradient of the mixture's loss with
    respect to v, which is alpha times the gradient with respect to the mixture. In the first step of a
    round alpha takes a step too, and is clipped to [0, 1]. Its gradient is the inner product of v - w
    and the gradient with respect to the mixture. v starts as the server's initial model, which clients
    draw from the server's seed. v and alpha are the client state. `personal` is the mixture of v and the
    server's model; for clients who never took part it is the server's model. alpha = 0 in all rounds is
    FedAvg, and alpha = 1 is local training alone.

    All gradients are computed at the models before the step. In the released code (FedTorch) w's step
    comes first, outputs are mixed in place of parameters, and alpha's gradient is computed from those of
    v and w, with 0.02 alpha added. The paper mixes parameters, as here.

    Args:
      model: the network.
      training: of both models, on the same batches.
      server_optimizer, schedule: as in `fed_avg`. Means are weighted by clients' examples.
      hyper: learning rates, and alpha from 0 to 1.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.
    """
    check_arguments(apfl, locals())
    check_number("hyper.alpha", hyper.alpha, low=0, high=1)
    check_number("hyper.alpha_learning_rate", hyper.alpha_learning_rate, low=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))
    both_training = training._replace(optimizer=_with_share(training.optimizer))

    def client_update(
        message: Variables,
        client_state: APFLState,
        data: ClientData,
        key: jax.Array,
        hyper: APFLHyper,
    ) -> ClientResult:
        # The local model w starts as the received model; v and alpha are the client state.
        share = jnp.where(client_state.has_started, client_state.share, hyper.alpha)
        share = share.astype(client_state.share.dtype)
        start = Variables(
            {GLOBAL: message.params, MIXED: client_state.own.params, ALPHA: share},
            {GLOBAL: message.mutable, MIXED: client_state.own.mutable},
        )

        # On each batch w and v take a step along the gradient of f(w) + f(alpha v + (1 - alpha) w), with
        # no gradient through the mixture's w. In the round's first step alpha takes a step too.
        rates: Any = (hyper.client_learning_rate, hyper.alpha_learning_rate)
        trained = train_client(_both(model), both_training, start, data, key, rates)
        params, mutable = trained.variables

        # w is sent; v and alpha stay.
        own = Variables(params[MIXED], mutable[MIXED])
        state = APFLState(own, params[ALPHA], jnp.ones((), bool))
        trained = trained._replace(variables=Variables(params[GLOBAL], mutable[GLOBAL]))
        result = client_result(message, trained, data.size, client_state=state)
        return result._replace(metrics=result.metrics | {"alpha": params[ALPHA]})

    def first(initial: Variables) -> APFLState:
        return APFLState(initial, jnp.zeros((), jnp.float32), jnp.zeros((), bool))

    def personal(server: PyTree, client_state: APFLState) -> Variables:
        received, (own, share, has_started) = averaging.variables(server), client_state
        mixed = lambda: Variables(mixture(share, own.params, received.params), own.mutable)
        return jax.lax.cond(has_started, mixed, lambda: received)

    method = averaging._replace(
        name="apfl",
        hyper=hyper,
        gradient=None,  # that of FedAvg lacks a part of the loss
        client_update=client_update,
        personal_models={PERSONAL: PersonalModel(model, personal)},
    )
    return with_first_state(method, first)


def mixture(share: jax.Array, own: PyTree, received: PyTree) -> PyTree:
    """alpha v + (1 - alpha) w."""
    return jax.tree.map(lambda v, w: (share * v + (1 - share) * w).astype(w.dtype), own, received)


def _both(model: Model) -> Model:
    """A joint model of w and of the mixture, in which w is constant. Its loss is the sum of both."""

    def loss(outputs: dict[str, Any], batch: Batch) -> jax.Array:
        loss_of = lambda name: checked_loss(model.loss, outputs[name], batch)
        return loss_of(GLOBAL) + loss_of(MIXED)

    # With this key, dropout in w is the same as in FedAvg.
    pair = joint_model({GLOBAL: model, MIXED: model}, loss, keeps_key=GLOBAL)

    def apply(variables: Variables, batch: Batch, **arguments: Any) -> tuple[Any, PyTree]:
        params = variables.params
        constant_w = jax.lax.stop_gradient(params[GLOBAL])
        mixed = mixture(params[ALPHA], params[MIXED], constant_w)
        whole = Variables({GLOBAL: params[GLOBAL], MIXED: mixed}, variables.mutable)
        return pair.apply(whole, batch, **arguments)

    return pair._replace(apply=apply)


def _with_share(factory: OptimizerFactory) -> OptimizerFactory:
    """(clients' rate, alpha's) -> optimizer of both models, and of alpha in a round's first step."""

    def create(rates: tuple[Any, Any]) -> optax.GradientTransformation:
        of_model = factory(rates[0])
        optimizers = {GLOBAL: of_model, MIXED: of_model, ALPHA: _first_step(rates[1])}
        return joint_optimizer(optimizers)

    return create


def _first_step(rate: Any) -> optax.GradientTransformation:
    """One step of gradient descent, clipped to [0, 1], and none after it."""

    def update(
        gradient: PyTree, count: jax.Array, params: PyTree = None
    ) -> tuple[PyTree, jax.Array]:
        new = jax.tree.map(lambda a, g: jnp.clip(a - rate * g, 0, 1), params, gradient)
        change = jax.tree.map(lambda a, b: jnp.where(count == 0, b - a, 0), params, new)
        return change, count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
