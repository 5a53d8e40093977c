"""SCAFFOLD: control variates correct the client drift of local training.

"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (Karimireddy, Kale, Mohri, Reddi,
Stich, Suresh, 2020). https://arxiv.org/abs/1910.06378
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, client_result, fed_avg, uniform_weight
from fedcodist.core import batches, keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, shown
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import (
    LocalTraining,
    batch_size_for,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.padding_checks import check_filled_batches
from fedcodist.core.schedules import Schedule, constant

PyTree = Any


class ScaffoldServer(NamedTuple):
    """FedAvg's server, and the server's control variate c, which has the parameters' structure."""

    averaging: Any
    variate: PyTree

    def without_clients(self) -> "ScaffoldServer":
        """c is the mean of all clients' variates, and clients who have kept nothing have zeros."""
        return self._replace(variate=jax.tree.map(jnp.zeros_like, self.variate))


class ScaffoldMessage(NamedTuple):
    """What a client downloads: the model, and the server's control variate c."""

    params: PyTree
    mutable: PyTree
    variate: PyTree


def scaffold(
    model: Model,
    num_clients: int,
    training: LocalTraining = LocalTraining(),
    option: int = 2,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedAvgHyper = FedAvgHyper(),
) -> FederatedMethod:
    """FedAvg whose local gradients are corrected by c - c_i, the server's minus the client's variate.

    Clients take steps along g - c_i + c. Then c_i becomes, depending on `option`,

    1. the gradient over all of the client's examples at the received parameters, or
    2. c_i - c + (w_received - w_trained) / (steps x learning rate), the mean local gradient.

    The server averages updates uniformly. c changes by the sum of the changes of the cohort's variates,
    divided by the number of all clients. Batch statistics are averaged uniformly and have no variates.

    Args:
      model, training, server_optimizer, schedule, hyper: as in `fed_avg`.
      num_clients: N, all clients that may take part: the pool's size.
      option: 1 or 2.

    Raises:
      ValueError, TypeError: names the argument and what is allowed. Option 2 needs plain SGD.
    """
    check_arguments(scaffold, locals())
    if not isinstance(option, int) or isinstance(option, bool) or option not in (1, 2):
        raise ValueError(f"option must be 1 or 2, got {shown(option)}.")
    check_training("training", training)
    check_integer("num_clients", num_clients, low=1)
    if option == 1 and training.differentiate is not None:
        raise ValueError(
            "option must be 2 with training.differentiate: option 1 takes gradients without it."
        )
    if option == 2 and not _is_plain_sgd(training.optimizer):
        raise ValueError(
            "option 2 needs plain SGD as training.optimizer, whose steps are the learning rate times "
            "the gradient; with momentum, weight decay, clipping or Adam use option 1."
        )
    averaging = fed_avg(model, training, server_optimizer, schedule, hyper)
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)

    def init(key: jax.Array) -> ScaffoldServer:
        server = averaging.init(key)
        return ScaffoldServer(server, zeros(server.params))

    def broadcast(server: ScaffoldServer) -> ScaffoldMessage:
        received = averaging.variables(server.averaging)
        return ScaffoldMessage(received.params, received.mutable, server.variate)

    def client_update(
        message: ScaffoldMessage,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedAvgHyper,
    ) -> ClientResult:
        # Each local step goes along g - c_i + c.
        def corrected(gradient: PyTree, params: PyTree) -> PyTree:
            return jax.tree.map(
                lambda g, c_i, c: g - c_i + c, gradient, client_state, message.variate
            )

        received = Variables(message.params, message.mutable)
        rate = hyper.client_learning_rate
        trained = train_client(model, training, received, data, key, rate, gradient_hook=corrected)
        # Options I and II of the paper: the client's variate becomes the gradient at the received model,
        # or the mean local gradient.
        if option == 1:
            new_client_state = full_gradient(model, training, received, data, key)
        else:
            steps_times_rate = trained.num_steps * rate
            new_client_state = jax.tree.map(
                lambda c_i, c, before, after: jnp.where(
                    steps_times_rate > 0, c_i - c + (before - after) / steps_times_rate, c_i
                ).astype(c_i.dtype),
                client_state,
                message.variate,
                received.params,
                trained.variables.params,
            )
        # The client sends the changes of its model and of its variate.
        change = jax.tree.map(jnp.subtract, new_client_state, client_state)
        return client_result(
            message,
            trained,
            weight=uniform_weight(data),
            client_state=new_client_state,
            extra=change,
        )

    def server_update(
        server: ScaffoldServer, aggregate: Aggregate, round: jax.Array, hyper: FedAvgHyper
    ) -> ScaffoldServer:
        # c changes by the cohort's sum divided by N (all clients), the model by the cohort's mean.
        variate = jax.tree.map(
            lambda c, change: c + change / num_clients, server.variate, aggregate.extra
        )
        averaged = averaging.server_update(server.averaging, aggregate, round, hyper)
        return ScaffoldServer(averaged, variate)

    return averaging._replace(
        name="scaffold",
        num_clients=num_clients,
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        variables=lambda server: averaging.variables(server.averaging),
        set_model=lambda server, new, reset_optimizer: ScaffoldServer(
            averaging.set_model(server.averaging, new, reset_optimizer), server.variate
        ),
        init_client_state=lambda: zeros(variable_shapes(model).params),
        # c is the mean of all variates, so a client's own variate changes by what it sends.
        after_sending=lambda variate, change, sent: jax.tree.map(
            lambda c_i, whole, bounded: c_i - whole + bounded, variate, change, sent
        ),
    )


def full_gradient(
    model: Model,
    training: LocalTraining,
    variables: Variables,
    data: ClientData,
    key: jax.Array,
    train: bool = True,
) -> PyTree:
    """The gradient of the mean loss over all of a client's examples, batch by batch.

    With `train`, dropout is on and batch statistics are those of each batch, as in training; they are
    not kept.
    """
    size = batch_size_for(training.batch_size, data.capacity)

    def sum_of(outputs: Any, batch: Batch, mask: jax.Array) -> jax.Array:
        return jnp.sum(checked_loss(model.loss, outputs, batch) * mask)

    def loss(params: PyTree, batch: Batch, mask: jax.Array, key: jax.Array | None) -> jax.Array:
        received = Variables(params, variables.mutable)
        outputs, _ = model.apply(received, batch, train=train, mask=mask, key=key)
        if train:
            check_filled_batches(model.apply, received, batch, size, data, outputs, sum_of)
        return sum_of(outputs, batch, mask)

    def add(index: jax.Array, total: PyTree) -> PyTree:
        _, rows, is_real = batches.places(index, size, data.size)
        draw = keys.derive(key, "full_gradient", index)
        batch = batches.read(
            data.columns,
            data.start + rows,
            training.preprocess,
            keys.derive(draw, "input"),
            jnp.arange(size),
        )
        dropout = keys.derive(draw, "dropout") if train else None
        gradient = jax.grad(loss)(variables.params, batch, is_real.astype(jnp.float32), dropout)
        # Under vmap, smaller clients have batches of padding only, on which a network may return NaN.
        has_examples = index * size < data.size
        return jax.tree.map(lambda t, g: jnp.where(has_examples, t + g, t), total, gradient)

    total = jax.lax.fori_loop(
        0, -(-data.bound // size), add, jax.tree.map(jnp.zeros_like, variables.params)
    )
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(data.size, 1), total)


def _is_plain_sgd(factory: OptimizerFactory) -> bool:
    """Whether the first few steps are exactly the learning rate times the gradient.

    A schedule within the optimizer may change later steps. It is recognised by its state, which counts
    steps in an integer.
    """
    rate, draws = 0.5, np.random.default_rng(0)
    optimizer = factory(rate)
    params = {"w": np.full(5, 3.0, np.float32)}
    state = optimizer.init(params)
    if any(jnp.issubdtype(jnp.result_type(leaf), jnp.integer) for leaf in jax.tree.leaves(state)):
        return False
    for scale in (1.0, 1e6, 1e-3, 1.0):
        gradient = {"w": (scale * draws.normal(size=5)).astype(np.float32)}
        updates, state = optimizer.update(gradient, state, params)
        if not np.allclose(updates["w"], -rate * gradient["w"], rtol=1e-5, atol=0):
            return False
    return True
