"""FedBABU: FedAvg that trains only the body; the head keeps its initial values.

"FedBABU: Towards Enhanced Representation for Federated Image Classification" (Oh, Kim, Yun, 2022).
https://arxiv.org/abs/2106.06042
"""

from typing import Any

import jax
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.partially_shared import (
    IsPrivate,
    only_trains,
    partially_shared,
    private_part,
    with_private,
)
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import SHARED_MODEL, FederatedMethod
from fedcodist.core.model import Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen, choice_of
from fedcodist.core.schedules import Schedule, constant
from fedcodist.models.headed import HEAD

PyTree = Any


def fed_babu(
    model: Model,
    training: LocalTraining = LocalTraining(),
    private: Chosen = HEAD,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on the body (all layers but the head), with the initial head, which never changes.

    All clients have the server's initial head. They draw it from the server's seed, so it is never sent.
    Clients keep no state. The pool's model is the body with that head. It becomes personal after
    training, when a client fine-tunes head and body on its own examples. The evaluation of client splits
    does this and reports `<pool>_fine_tuned`. The paper fine-tunes the head alone as well as the whole
    (not verified).

    If a server distils, it distils only the body: the head keeps its initial values there too.

    Args:
      model: the network.
      training, server_optimizer, schedule, hyper: as in `fed_avg`. The released code's mean is uniform.
      private: the head, see `partially_shared`; by default that of `headed`.

    Raises:
      TypeError, ValueError: names the argument; as `partially_shared`.
    """
    check_arguments(fed_babu, locals())
    is_head = choice_of("private", private, variable_shapes(model))
    body_only = only_trains(training.optimizer, lambda path: not is_head(path))
    averaging = fed_avg(
        model, training._replace(optimizer=body_only), server_optimizer, schedule, hyper
    )
    sent_partly = partially_shared(with_fixed_part(averaging, is_head), private)

    # A client's state is always that before its first participation, so it draws the head again.
    nothing_kept = sent_partly.init_client_state

    def client_update(
        message: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: FedAvgHyper
    ) -> ClientResult:
        result = sent_partly.client_update(message, nothing_kept(), data, key, hyper)
        return result._replace(client_state=client_state)

    def gradient(
        message: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: FedAvgHyper
    ) -> PyTree:
        assert sent_partly.gradient is not None
        return sent_partly.gradient(message, nothing_kept(), data, key, hyper)

    def fine_tune(
        server: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: FedAvgHyper
    ) -> dict[str, Variables]:
        # Only fine-tuning trains the head too.
        rate = hyper.client_learning_rate
        start = sent_partly.variables(server)
        return {SHARED_MODEL: train_client(model, training, start, data, key, rate).variables}

    return sent_partly._replace(
        name="fed_babu",
        fine_tune=fine_tune,
        client_update=client_update,
        init_client_state=lambda: None,
        personal_models={},
        gradient=gradient,
    )


def with_fixed_part(method: FederatedMethod, is_fixed: IsPrivate) -> FederatedMethod:
    """The method with a fixed part of the model: neither aggregation nor distillation changes it."""

    def fixed(server: PyTree, new: Variables) -> Variables:
        return with_private(new, private_part(method.variables(server), is_fixed), is_fixed)

    def server_update(
        server: PyTree, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> PyTree:
        after = method.server_update(server, aggregate, round, hyper)
        return method.set_model(after, fixed(server, method.variables(after)), False)

    def set_model(server: PyTree, new: Variables, reset_optimizer: bool) -> PyTree:
        return method.set_model(server, fixed(server, new), reset_optimizer)

    def apply(variables: Variables, *arguments: Any, **named: Any) -> Any:
        part = jax.lax.stop_gradient(private_part(variables, is_fixed))
        return method.model.apply(with_private(variables, part, is_fixed), *arguments, **named)

    # A server that distils trains this model. Its students must learn with the head that they keep.
    return method._replace(
        model=method.model._replace(apply=apply), server_update=server_update, set_model=set_model
    )
