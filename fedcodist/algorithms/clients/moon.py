"""MOON (Li et al., 2021): FedAvg with a contrastive loss between embeddings of models.

Model-Contrastive Federated Learning, Qinbin Li, Bingsheng He, Dawn Song.
https://arxiv.org/abs/2103.16257
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Batch, Model, Variables, in_float32, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.models.headed import embedding_of

_SHORTEST = 1e-8  # lower bound of the lengths that divide, as in PyTorch's cosine similarity


class MoonHyper(NamedTuple):
    """Learning rates, mu (the weight of the contrast) and tau; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    contrast_weight: Any = 1.0
    temperature: Any = 0.5


class MoonClient(NamedTuple):
    """The client state.

    Attributes:
      previous: the client's model after its last participation; zeros before the first.
      has_started: bool, whether the client has taken part.
    """

    previous: Variables
    has_started: jax.Array


def moon(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: MoonHyper = MoonHyper(),
) -> FederatedMethod:
    """FedAvg with mu times a contrastive loss of embeddings added to every client's loss.

    It pulls an example's embedding towards the received model's embedding. It pushes it away from the
    embedding by the client's model of its last participation. Similarity is the cosine, and both other
    models are in evaluation mode. mu = 0 is FedAvg.

    In its first participation a client has no previous model, and the contrastive loss is left out. The
    released code leaves it out only in the first round, so a client that joins later is contrasted with
    an untrained network. What the paper does is not verified. The paper's projection head, two dense
    layers before the output layer, is a part of the network here.

    Args:
      model: its outputs are `LayerOutputs`, whose last hidden output is the embedding [batch, width].
        `headed` makes such models, and `with_layers` makes them from any Flax linen module.
      training, server_optimizer, schedule: as in `fed_avg`.
      hyper: learning rates, mu at least 0 and tau above 0.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
      TypeError: a model that returns no embedding.
    """
    check_arguments(moon, locals())
    check_number("hyper.contrast_weight", hyper.contrast_weight, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))

    def client_update(
        message: Variables,
        client_state: MoonClient,
        data: ClientData,
        key: jax.Array,
        hyper: MoonHyper,
    ) -> ClientResult:
        received = Variables(message.params, message.mutable)
        # Before the first participation `previous` is zeros, of which a network may make NaN.
        previous = jax.tree.map(
            lambda before, now: jnp.where(client_state.has_started, before, now),
            client_state.previous,
            received,
        )

        # Algorithm 1, PartyLocalTraining: embeddings of every batch by three models, the client's, the
        # received and the client's previous one. The loss is that of the labels + mu times the contrast.
        def loss(outputs: Any, batch: Batch) -> jax.Array:
            of_received = _embedding(model.apply(received, batch)[0])
            of_previous = _embedding(model.apply(previous, batch)[0])
            apart = contrast(_embedding(outputs), of_received, of_previous, hyper.temperature)
            weight = hyper.contrast_weight * client_state.has_started
            return checked_loss(model.loss, outputs, batch) + weight * apart

        trained = train_client(
            model, training, received, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        # The trained model is the previous model in the client's next participation.
        next_state = MoonClient(trained.variables, jnp.ones_like(client_state.has_started))
        return client_result(message, trained, weight=data.size, client_state=next_state)

    def init_client_state() -> MoonClient:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variable_shapes(model))
        return MoonClient(zeros, jnp.zeros((), bool))

    return averaging._replace(
        name="moon",
        hyper=hyper,
        gradient=None,  # that of FedAvg lacks a part of the loss
        client_update=client_update,
        init_client_state=init_client_state,
    )


def contrast(
    embedding: jax.Array, received: jax.Array, previous: jax.Array, temperature: Any
) -> jax.Array:
    """-log(exp(s_received / tau) / (exp(s_received / tau) + exp(s_previous / tau))), [batch].

    Args:
      embedding, received, previous: [batch, width]; s_received and s_previous are the cosines of the
        first with the other two.
      temperature: tau.
    """
    embedding, received, previous = map(in_float32, (embedding, received, previous))
    nearer_to_previous = _cosine(embedding, previous) - _cosine(embedding, received)
    return jax.nn.softplus(nearer_to_previous / temperature)


def _embedding(outputs: Any) -> jax.Array:
    """The head's inputs [batch, width]; raises TypeError if the network does not return them."""
    if not isinstance(outputs, LayerOutputs) or not outputs.hidden:
        raise TypeError(
            "MOON's model must return an embedding beside its logits, as networks made by `headed` and "
            "`with_layers` do; it returns none."
        )
    embedding = embedding_of(outputs)
    if getattr(embedding, "ndim", 0) != 2:
        raise TypeError(
            "MOON's model must return an embedding [batch, width], got "
            f"{getattr(embedding, 'shape', type(embedding).__name__)}."
        )
    return embedding


def _cosine(left: jax.Array, right: jax.Array) -> jax.Array:
    """Cosine per example; 0 where an embedding is 0, which can happen after a ReLU."""
    squared = lambda rows: jnp.sum(rows**2, axis=-1)
    length = lambda rows: jnp.sqrt(jnp.maximum(squared(rows), _SHORTEST**2))
    return jnp.sum(left * right, axis=-1) / (length(left) * length(right))
