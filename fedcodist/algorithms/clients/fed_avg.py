"""FedAvg: clients train locally and the server averages their models; FedOpt: with a server optimizer.

"Communication-Efficient Learning of Deep Networks from Decentralized Data" (McMahan, Moore, Ramage,
Hampson, Aguera y Arcas, 2017). https://arxiv.org/abs/1602.05629
"Adaptive Federated Optimization" (Reddi et al., 2021). https://arxiv.org/abs/2003.00295
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core.aggregation import Aggregate, ClientResult, weighted_mean
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_function, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import (
    LocalTraining,
    TrainedClient,
    check_training,
    gradient_of_a_batch,
    train_client,
)
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory, lasting_state
from fedcodist.core.schedules import Schedule, constant

PyTree = Any


class FedAvgHyper(NamedTuple):
    """Learning rates, traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0


class FedAvgServer(NamedTuple):
    """The global model and the server optimizer's state."""

    params: PyTree
    mutable: PyTree
    optimizer_state: PyTree


def fed_avg(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg as a method: clients train locally, and the weighted mean of their models is the new model.

    The pseudo-gradient is the example-weighted mean of (received - trained) parameters. The default
    server optimizer, SGD with learning rate 1, applies all of it, as McMahan et al. do. With another
    server optimizer and learning rate this is FedOpt; `fed_opt` uses Adam.

    Args:
      model: the network.
      training: local optimizer (learning rate -> optax optimizer), batch size, epochs, preprocessing.
      server_optimizer: learning rate -> any optax optimizer. An optimizer other than SGD needs a
        suitable `hyper.server_learning_rate`: 1 does not suit Adam.
      schedule: (server learning rate, round from 0) -> learning rate of that round. It is not part of
        the optimizer's state, so resetting the moments does not reset the schedule.
      hyper: learning rates.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.

    >>> import flax.linen as nn
    >>> from fedcodist.core.from_linen import from_flax_linen
    >>> method = fed_avg(from_flax_linen(nn.Dense(10), jnp.zeros((1, 64))))
    >>> server = method.init(jax.random.key(0))
    """
    check_arguments(fed_avg, locals())
    check_training("training", training)
    check_factory("server_optimizer", server_optimizer)
    check_function("schedule", schedule, ("learning rate", "round"), "learning rate")
    for name, rate in hyper._asdict().items():
        check_number(f"hyper.{name}", rate, low=0)
    start = functools.partial(lasting_state, "server_optimizer", server_optimizer)

    def init(key: jax.Array) -> FedAvgServer:
        params, mutable = model.init(key)
        return FedAvgServer(params, mutable, start(params))

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedAvgHyper,
    ) -> ClientResult:
        # McMahan et al., algorithm 1, ClientUpdate: epochs of mini-batch SGD from the received model.
        trained = train_client(model, training, message, data, key, hyper.client_learning_rate)
        return client_result(message, trained, weight=data.size, client_state=client_state)

    def gradient(
        message: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> PyTree:
        received = Variables(message.params, message.mutable)
        return gradient_of_a_batch(model, training, received, data, key)

    def server_update(
        server: FedAvgServer, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> FedAvgServer:
        # McMahan et al.: the new model is the mean of the clients' models. Reddi et al.: the model minus
        # that mean is the gradient of a step of the server optimizer.
        optimizer = server_optimizer(schedule(hyper.server_learning_rate, round))
        updates, optimizer_state = optimizer.update(
            aggregate.pseudo_gradient, server.optimizer_state, server.params
        )
        params = optax.apply_updates(server.params, updates)
        return FedAvgServer(params, aggregate.mutable, optimizer_state)

    def set_model(server: FedAvgServer, new: Variables, reset_optimizer: bool) -> FedAvgServer:
        optimizer_state = start(new.params) if reset_optimizer else server.optimizer_state
        return FedAvgServer(new.params, new.mutable, optimizer_state)

    return FederatedMethod(
        name="fed_avg",
        model=model,
        hyper=hyper,
        init=init,
        broadcast=lambda server: Variables(server.params, server.mutable),
        client_update=client_update,
        reduce=weighted_mean(),
        server_update=server_update,
        variables=lambda server: Variables(server.params, server.mutable),
        set_model=set_model,
        gradient=gradient,
    )


def fed_opt(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = lambda rate: optax.adam(rate, eps=1e-5),
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(server_learning_rate=0.01),
) -> FederatedMethod:
    """FedOpt (Reddi et al., 2021): `fed_avg` whose server takes steps of Adam, or of another optimizer.

    Arguments and errors are `fed_avg`'s. The server's learning rate has to be tuned together with the
    clients'.
    """
    return fed_avg(model, training, server_optimizer, schedule, hyper)


def learning_rates(hyper: Any) -> FedAvgHyper:
    """FedAvg's hyper-parameters, of a method that has them among others."""
    return FedAvgHyper(hyper.client_learning_rate, hyper.server_learning_rate)


def client_result(
    message: Any, trained: TrainedClient, weight: Any, client_state: PyTree, extra: PyTree = None
) -> ClientResult:
    """A client's result after local training; its update is (received - trained) parameters."""
    return ClientResult(
        update=jax.tree.map(jnp.subtract, message.params, trained.variables.params),
        mutable=trained.variables.mutable,
        weight=jnp.asarray(weight, jnp.float32),
        client_state=client_state,
        metrics={
            "loss": trained.loss,
            "num_steps": trained.num_steps,
            "examples": trained.num_examples,
        },
        extra=extra,
    )


def uniform_weight(data: ClientData) -> jax.Array:
    """A client's weight in a uniform mean: 1, and 0 without examples, since it did not train."""
    return jnp.minimum(data.size, 1).astype(jnp.float32)
