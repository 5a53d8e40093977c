"""FedGKD: FedAvg whose clients also learn from the mean of the last global models.

"Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID Data" (Yao et al.,
2021). https://arxiv.org/abs/2107.00051
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import (
    FedAvgServer,
    client_result,
    fed_avg,
    learning_rates,
)
from fedcodist.core.aggregation import Aggregate, ClientResult, as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.distillation.divergences import kl_divergence, softened, softened_target

PyTree = Any


class FedGKDServer(NamedTuple):
    """FedAvg's server and its last global models.

    Attributes:
      averaging: FedAvg's server, with the current model.
      earlier: the models before the current one, newest first; leaves [M - 1, ...]. From position
        num_trained - 1 on they are zeros or the initial model, which do not count.
      num_trained: int32, how many of these models clients have trained, the current one included.
    """

    averaging: FedAvgServer
    earlier: Variables
    num_trained: jax.Array

    def without_clients(self) -> "FedGKDServer":
        """The current model is the initial one of another run, and does not count."""
        return self._replace(num_trained=jnp.zeros_like(self.num_trained))


class FedGKDMessage(NamedTuple):
    """What a client downloads.

    Attributes:
      params, mutable: the current model.
      teacher: the mean of the last models; None if M = 1, when it is the current model.
      has_learned: 1, or 0 in the first round, when there is no trained model to teach.
    """

    params: PyTree
    mutable: PyTree
    teacher: Variables | None
    has_learned: jax.Array


class FedGKDHyper(NamedTuple):
    """Learning rates, lambda (the weight of the divergence) and T; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    distillation_weight: Any = 0.1
    temperature: Any = 1.0


def fed_gkd(
    model: Model,
    training: LocalTraining = LocalTraining(),
    models_kept: int = 5,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedGKDHyper = FedGKDHyper(),
) -> FederatedMethod:
    """FedAvg with lambda T^2 KL(teacher || client) of tempered outputs added to every client's loss.

    The teacher is the mean of the parameters of the last M global models, including the current one but
    not the initial one. So in the first round there is no teacher. The teacher predicts a client's own
    examples in evaluation mode. lambda = 0 is FedAvg. With M = 1 the teacher is the received model. Else
    clients download two models, of which a compressor compresses only the current one.

    Args:
      model, training, server_optimizer, schedule: as in `fed_avg`. Outputs are logits.
      models_kept: M.
      hyper: learning rates, lambda at least 0 and T above 0.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
      TypeError: a language model, which returns no logits.
    """
    check_arguments(fed_gkd, locals())
    check_integer("models_kept", models_kept, low=1)
    check_number("hyper.distillation_weight", hyper.distillation_weight, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))
    divergence = kl_divergence("forward")

    def init(key: jax.Array) -> FedGKDServer:
        server = averaging.init(key)
        room = lambda leaf: jnp.zeros((models_kept - 1, *leaf.shape), leaf.dtype)
        return FedGKDServer(
            server, jax.tree.map(room, averaging.variables(server)), jnp.zeros((), jnp.int32)
        )

    def broadcast(server: FedGKDServer) -> FedGKDMessage:
        current = averaging.variables(server.averaging)
        teacher = None
        if models_kept > 1:
            teacher = mean_of_last(current, server.earlier, server.num_trained)
        return FedGKDMessage(*current, teacher, (server.num_trained > 0).astype(jnp.float32))

    def client_update(
        message: FedGKDMessage,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedGKDHyper,
    ) -> ClientResult:
        # The teacher is the mean of the last M global models, the received one among them.
        received = Variables(message.params, message.mutable)
        teacher = received if message.teacher is None else message.teacher
        softly = softened(divergence, hyper.temperature, scaled=True)

        # The loss of the labels, plus lambda T^2 KL(teacher || client), on the client's own examples.
        def loss(outputs: Any, batch: Batch) -> jax.Array:
            answers = checked_logits(model.apply(teacher, batch)[0])
            target = softened_target(answers, hyper.temperature)
            towards_teacher = message.has_learned * softly(checked_logits(outputs), target)
            return (
                checked_loss(model.loss, outputs, batch)
                + hyper.distillation_weight * towards_teacher
            )

        trained = train_client(
            model, training, received, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        return client_result(message, trained, weight=data.size, client_state=client_state)

    def server_update(
        server: FedGKDServer, aggregate: Aggregate, round: jax.Array, hyper: FedGKDHyper
    ) -> FedGKDServer:
        # The current model joins the earlier ones in place of the oldest. Clients' models are averaged.
        current = averaging.variables(server.averaging)
        # A round without clients has trained no model.
        is_trained = aggregate.weight > 0
        push = lambda new, old: jnp.where(
            is_trained, jnp.concatenate([new[None], old])[: models_kept - 1], old
        )
        earlier = jax.tree.map(push, current, server.earlier)
        averaged = averaging.server_update(server.averaging, aggregate, round, hyper)
        num_trained = jnp.minimum(server.num_trained + is_trained, models_kept)
        return FedGKDServer(averaged, earlier, num_trained)

    def variables(server: FedGKDServer) -> Variables:
        return averaging.variables(server.averaging)

    def set_model(server: FedGKDServer, new: Variables, reset_optimizer: bool) -> FedGKDServer:
        averaged = averaging.set_model(server.averaging, new, reset_optimizer)
        return server._replace(averaging=averaged)

    return averaging._replace(
        name="fed_gkd",
        hyper=hyper,
        gradient=None,  # that of FedAvg lacks a part of the loss
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        variables=variables,
        set_model=set_model,
    )


def mean_of_last(current: Variables, earlier: Variables, num_trained: jax.Array) -> Variables:
    """The mean of the current model and of those earlier models that clients have trained.

    Args:
      current: the newest model.
      earlier: the models before it, newest first; leaves [kept, ...].
      num_trained: how many models to average, including the current; with 0 or 1 it is the current.
    """
    before = jnp.maximum(num_trained - 1, 0)

    def mean(new: jax.Array, old: jax.Array) -> jax.Array:
        counts = jnp.arange(old.shape[0]).reshape(-1, *(1,) * new.ndim) < before
        total = new + jnp.sum(jnp.where(counts, old, 0), axis=0)
        return as_stored(total / (1 + before), new)

    return jax.tree.map(mean, current, earlier)
