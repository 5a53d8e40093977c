"""Per-FedAvg: FedAvg of a model that adapts to each client by one gradient step (as in MAML).

"Personalized Federated Learning: A Meta-Learning Approach" (Fallah, Mokhtari, Ozdaglar, 2020).
https://arxiv.org/abs/2002.07948
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
from fedcodist.algorithms.clients.scaffold import full_gradient
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import BatchLoss, LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.padding_checks import check_masked
from fedcodist.core.schedules import Schedule, constant

PyTree = Any

BATCHES = {"first_order": 2, "hessian_free": 3}  # variant -> batches of a step


class PerFedAvgHyper(NamedTuple):
    """Floats of Per-FedAvg; traced.

    Attributes:
      client_learning_rate: beta, of a client's steps.
      server_learning_rate: of the server's optimizer.
      adaptation_rate: alpha, of the step that adapts the model to a client.
      difference: delta, of the Hessian-free variant's two gradients.
    """

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    adaptation_rate: Any = 0.01
    difference: Any = 1e-3


def per_fed_avg(
    model: Model,
    training: LocalTraining = LocalTraining(),
    variant: str = "first_order",
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: PerFedAvgHyper = PerFedAvgHyper(),
) -> FederatedMethod:
    """FedAvg on the clients' losses after one step, F(w - alpha grad f(w)).

    A local step uses three batches D, D' and D''. With w' = w - alpha grad f(w; D) its gradient is

        (I - alpha hessian f(w; D'')) grad f(w'; D').

    'first_order' leaves the Hessian out. 'hessian_free' approximates the product with the Hessian: with
    g = grad f(w'; D') it is the difference of the gradients at w + delta g and w - delta g, divided by
    2 delta. Each batch of `training` is split into these batches, of nearly equal size: two without D'',
    else three.

    A client keeps the received model after one adaptation step on all its examples. This model is
    evaluated as `personal`; for clients who never took part, the server's model is. To evaluate the
    final model after adaptation, use the evaluation after local training.

    Args:
      model: the network.
      training: `batch_size` counts the examples of all batches of a step, at least two or three.
      variant: 'first_order' or 'hessian_free'.
      server_optimizer, schedule: as in `fed_avg`. Means over clients are unweighted.
      hyper: learning rates at least 0, delta above 0.

    Raises:
      TypeError, ValueError: names the argument and what is allowed.
    """
    check_arguments(per_fed_avg, locals())
    check_choice("variant", variant, BATCHES)
    check_integer("training.batch_size", training.batch_size, low=BATCHES[variant])
    check_number("hyper.adaptation_rate", hyper.adaptation_rate, low=0)
    check_number("hyper.difference", hyper.difference, above=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))

    def client_update(
        message: Variables,
        client_state: PersonalModelState,
        data: ClientData,
        key: jax.Array,
        hyper: PerFedAvgHyper,
    ) -> ClientResult:
        alpha, delta = hyper.adaptation_rate, hyper.difference
        along = lambda tree, scale, direction: jax.tree.map(
            lambda w, g: (w + scale * g).astype(w.dtype), tree, direction
        )

        def after_a_step(loss: BatchLoss) -> Callable[..., Any]:
            differentiate = jax.value_and_grad(loss, has_aux=True)

            def differentiated(
                w: PyTree, mutable: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
            ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
                count = BATCHES[variant]
                parts = parts_of(batch, mask, count)
                if mask.shape[0] % count:
                    why = f"per_fed_avg divides batches of {mask.shape[0]} into {count} parts"
                    check_masked(why, model.apply, Variables(w, mutable), parts[0][0])
                key_of = lambda index: keys.derive(key, "part", index)

                # Algorithm 1: the model w' after a step on D, and its gradient on D'.
                (_, mutable), slope = differentiate(w, mutable, *parts[0], key_of(0))
                adapted = along(w, -alpha, slope)
                (value, mutable), gradient = differentiate(adapted, mutable, *parts[1], key_of(1))
                if variant == "first_order":
                    return (value, mutable), gradient

                # The Hessian on D'' times that gradient, by the difference of two gradients.
                gradient_at = lambda scale: differentiate(
                    along(w, scale, gradient), mutable, *parts[2], key_of(2)
                )[1]
                above, below = gradient_at(delta), gradient_at(-delta)
                product = jax.tree.map(lambda a, b: (a - b) / (2 * delta), above, below)
                return (value, mutable), along(gradient, -alpha, product)

            return differentiated

        received = Variables(message.params, message.mutable)
        rate = hyper.client_learning_rate
        trained = train_client(
            model, training, received, data, key, rate, differentiate=after_a_step
        )

        # The client predicts with the received model after one step on all its examples.
        slope = full_gradient(model, training, received, data, keys.derive(key, "adapt"))
        next_state = with_personal_model(
            received._replace(params=along(received.params, -alpha, slope))
        )
        return client_result(message, trained, weight=uniform_weight(data), client_state=next_state)

    return averaging._replace(
        name="per_fed_avg",
        hyper=hyper,
        gradient=None,  # that of FedAvg lacks a part of the loss
        client_update=client_update,
        init_client_state=lambda: no_personal_model(model),
        personal_models={PERSONAL: personal_or_server_model(averaging)},
    )


def parts_of(batch: Batch, mask: jax.Array, count: int) -> list[tuple[Batch, jax.Array]]:
    """(batch, mask) of each of `count` parts of a batch, with nearly equal numbers of real examples.

    Real examples come first in a batch and are dealt to the parts in turn. If a batch has fewer than
    `count` real examples, empty parts are replaced by the first part. Every part has all of a column
    that is not of examples.
    """
    size = mask.shape[0]
    places = jnp.arange(-(-size // count) * count).reshape(-1, count).T  # [parts, rows]
    real = jnp.where(places < size, mask[jnp.minimum(places, size - 1)], 0)
    parts: list[tuple[Batch, jax.Array]] = []
    for index in range(count):
        chosen = jnp.where(jnp.any(real[index] > 0), index, 0)
        rows = jnp.minimum(places[chosen], size - 1)
        of_part = {
            name: column[rows] if column.shape[:1] == (size,) else column
            for name, column in batch.items()
        }
        parts.append((of_part, real[chosen]))
    return parts
