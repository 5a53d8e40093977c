"""Makes a part of the network private to each client, in methods whose clients send whole models.

FedPer, FedRep, FedBN, FedBABU and LG-FedAvg differ mainly in which part is private. See the modules
`fed_per`, `fed_rep`, `fed_bn`, `fed_babu` and `lg_fed_avg_one`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.first_state import with_first_state
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.inputs import ClientData
from fedcodist.core.method import FederatedMethod, PersonalModel, after_sending_within
from fedcodist.core.model import Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.parts import Chosen, choice_of, flags, joined, part, rest

PyTree = Any
IsPrivate = Callable[[str], bool]  # path of a leaf -> whether it stays with the client
PERSONAL = "personal"  # the name under which a client's whole network is evaluated


class PartialMessage(NamedTuple):
    """What a client downloads.

    Attributes:
      params, mutable: the shared part of the model.
      besides: the rest of the method's message, with only the shared part of the models in it.
    """

    params: PyTree
    mutable: PyTree
    besides: Any


class PartialState(NamedTuple):
    """The client state: that of the method, and the private part of the client's network."""

    inner: PyTree
    private: Variables


def partially_shared(method: FederatedMethod, private: Chosen) -> FederatedMethod:
    """The method with a private part of the network, which stays with each client and is never sent.

    A client trains the whole network, the received shared part and its private part. It sends back the
    shared part, which the server aggregates as the method does. Private parts start from the server's
    initial values, which clients draw from the server's seed (8 bytes).

    The server's model has a private part too, which no client has trained: the initial values, or those
    after distillation at the server. So the model to evaluate is `<pool>_personal`: a client's private
    part with the server's shared part. Private parts are client states. If data are streamed they are on
    the host, for the clients met so far.

    Args:
      method: a client method in which everything shaped like the parameters is a model, such as
        `fed_avg` or `fed_gkd`. Compress afterwards: `compressed(partially_shared(...), ...)`.
      private: the private part: patterns of layers' names, such as 'head' or '*Norm*', or a function of
        a leaf's path; see `fedcodist.core.parts.choice_of`. It selects parameters and mutable state.

    Raises:
      TypeError, ValueError: names the argument, if patterns match nothing or everything, or if the
        method exchanges anything else than models, or already has a model named `personal`.

    >>> import flax.linen as nn
    >>> from fedcodist.algorithms.clients.fed_avg import fed_avg
    >>> from fedcodist.core.from_linen import from_flax_linen
    >>> network = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(10)])
    >>> method = fed_avg(from_flax_linen(network, jnp.zeros((1, 64))))
    >>> method = partially_shared(method, private='layers_2')
    >>> message = method.broadcast(method.init(jax.random.key(0)))
    >>> sorted(name for name, layer in message.params.items() if layer['bias'] is not None)
    ['layers_0']
    """
    check_arguments(partially_shared, locals())
    shapes = variable_shapes(method.model)
    is_private = choice_of("private", private, shapes)
    if all(jax.tree.leaves(flags(shapes.params, is_private))):
        raise ValueError("private must leave parameters to share, it chooses all of the model's.")
    check_exchanged(method, shapes)

    def first(initial: Variables) -> PartialState:
        inner = jax.tree.map(jnp.asarray, method.init_client_state())
        return PartialState(inner, private_part(initial, is_private))

    def personal(server: PyTree, client_state: PartialState) -> Variables:
        return with_private(method.variables(server), client_state.private, is_private)

    def of_inner(model: PersonalModel) -> PersonalModel:
        read = lambda server, client_state: model.variables(server, client_state.inner)
        return model._replace(variables=read)

    of_method = {name: of_inner(model) for name, model in method.personal_models.items()}
    models = {PERSONAL: PersonalModel(method.model, personal)} | of_method
    sent_partly = _sent_partly(method, is_private, shapes)
    return with_first_state(sent_partly._replace(personal_models=models), first)


def _sent_partly(
    method: FederatedMethod, is_private: IsPrivate, shapes: Variables
) -> FederatedMethod:
    """The method whose clients have a PartialState and send the shared part."""

    def broadcast(server: PyTree) -> PartialMessage:
        message = method.broadcast(server)
        shared = rest(message.params, is_private), rest(message.mutable, is_private)
        besides = on_models(message, lambda model: shared_part(model, is_private))
        return PartialMessage(*shared, besides._replace(params=None, mutable=None))

    def received(message: PartialMessage, private: Variables) -> PyTree:
        """The method's own message, in which all models have the client's private part."""
        complete = lambda model: Variables(*map(joined, model, private))
        params, mutable = complete(Variables(message.params, message.mutable))
        return on_models(message.besides, complete)._replace(params=params, mutable=mutable)

    def client_update(
        message: PartialMessage,
        client_state: PartialState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> ClientResult:
        # The network is the received shared part with the private part from the client state.
        private = client_state.private
        whole = received(message, private)
        result = method.client_update(whole, client_state.inner, data, key, hyper)

        # The trained private part becomes the client state.
        trained = jax.tree.map(jnp.subtract, private.params, part(result.update, is_private))
        private = Variables(trained, part(result.mutable, is_private))

        # The shared part is sent.
        return result._replace(
            update=rest(result.update, is_private),
            mutable=rest(result.mutable, is_private),
            client_state=PartialState(result.client_state, private),
        )

    def fine_tune(
        server: PyTree, client_state: PartialState, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> dict[str, Variables]:
        # After fine-tuning a client uses all that it trained, also the shared part.
        whole = received(broadcast(server), client_state.private)
        result = method.client_update(whole, client_state.inner, data, key, hyper)
        params = jax.tree.map(jnp.subtract, whole.params, result.update)
        return {PERSONAL: Variables(params, result.mutable)} | {
            name: personal.variables(server, result.client_state)
            for name, personal in method.personal_models.items()
        }

    def finalize(total: PyTree, message: PyTree, key: jax.Array) -> Aggregate:
        # Clients send no private parameters, so those of the server get the gradient 0.
        aggregate = method.reduce.finalize(total, message, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.params)
        return aggregate._replace(pseudo_gradient=joined(aggregate.pseudo_gradient, zeros))

    def server_update(
        server: PyTree, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> PyTree:
        mutable = joined(aggregate.mutable, method.variables(server).mutable)
        return method.server_update(server, aggregate._replace(mutable=mutable), round, hyper)

    inner_gradient = method.gradient

    def gradient(
        message: PartialMessage,
        client_state: PartialState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> PyTree:
        assert inner_gradient is not None
        whole = received(message, client_state.private)
        return rest(inner_gradient(whole, client_state.inner, data, key, hyper), is_private)

    return method._replace(
        name=f"partially_shared_{method.name}",
        broadcast=broadcast,
        client_update=client_update,
        reduce=method.reduce._replace(finalize=finalize),
        server_update=server_update,
        sends_models=False,  # the server does not know the private parts of clients' models
        after_sending=after_sending_within(method),
        gradient=None if inner_gradient is None else gradient,
        fine_tune=fine_tune,
    )


def private_part(model: Variables, is_private: IsPrivate) -> Variables:
    """The parameters and mutable state that stay with a client, with None in place of the others."""
    return Variables(part(model.params, is_private), part(model.mutable, is_private))


def shared_part(model: Variables, is_private: IsPrivate) -> Variables:
    """The parameters and mutable state that travel, with None in place of the others."""
    return Variables(rest(model.params, is_private), rest(model.mutable, is_private))


def with_private(model: Variables, private: Variables, is_private: IsPrivate) -> Variables:
    """The model with another private part."""
    return Variables(*map(joined, shared_part(model, is_private), private))


def only_trains(factory: OptimizerFactory, is_trained: IsPrivate) -> OptimizerFactory:
    """The factory of an optimizer that changes only the chosen parameters."""

    def labels(params: PyTree) -> PyTree:
        name = lambda is_chosen: "trained" if is_chosen else "fixed"
        return jax.tree.map(name, flags(params, is_trained))

    def create(rate: Any) -> optax.GradientTransformation:
        optimizers = {"trained": factory(rate), "fixed": optax.set_to_zero()}
        return optax.multi_transform(optimizers, labels)

    return create


def on_models(message: Any, function: Callable[[Variables], Variables]) -> Any:
    """The message with the function applied to each field that is a model."""
    models = {
        name: function(field)
        for name, field in message._asdict().items()
        if isinstance(field, Variables)
    }
    return message._replace(**models)


def check_exchanged(method: FederatedMethod, shapes: Variables) -> None:
    """Raises ValueError that names `method` if anything else shaped like the parameters is exchanged."""
    if PERSONAL in method.personal_models:
        raise ValueError(f"method must have no personal model {PERSONAL!r}, got {method.name}.")
    server = jax.eval_shape(method.init, keys.key_shape())
    message: Any = jax.eval_shape(method.broadcast, server)
    fields = getattr(message, "_fields", ())
    if not method.sends_models:
        raise ValueError(
            "method's clients must send the received model minus the trained one, got "
            f"{method.name}."
        )
    if not method.reduce.is_mean:
        raise ValueError(
            f"method must be one whose server takes the mean of its clients' models, got {method.name}."
        )
    if not {"params", "mutable"} <= set(fields) or not _is_like(message.params, shapes.params):
        raise ValueError(
            "method must send its whole model as the fields params and mutable of a named tuple, got "
            f"{method.name}: what wraps it, such as compressed, comes after partially_shared."
        )
    for name in set(fields) - {"params", "mutable"}:
        if _is_like(getattr(message, name), shapes.params):
            raise ValueError(
                "method must exchange nothing like the parameters but models, got "
                f"{method.name}, which sends {name!r}."
            )


def _is_like(tree: PyTree, params: PyTree) -> bool:
    """Whether a tree has the structure and the shapes of the parameters."""
    shape = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    structures: list[Any] = [jax.tree.structure(each) for each in (tree, params)]
    return structures[0] == structures[1] and shape(tree) == shape(params)
