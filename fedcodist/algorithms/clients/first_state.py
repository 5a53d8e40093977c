"""Client states that start from the server's initial model, which clients draw from the server's seed.

The initial value of a client state cannot be the initial model itself: that value is the same for all
seeds of a run, and the initial model is not. So the server sends the key from which its model was drawn
(8 bytes). A client that takes part for the first time draws the model again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.inputs import ClientData
from fedcodist.core.method import FederatedMethod, PersonalModel, after_sending_within
from fedcodist.core.model import Variables

PyTree = Any


class KeyedServer(NamedTuple):
    """The method's server, and data of the key from which its initial model was drawn."""

    inner: PyTree
    key: jax.Array


class KeyedMessage(NamedTuple):
    """What a client downloads: the method's message, and `KeyedServer`'s key."""

    inner: PyTree
    key: jax.Array

    @property
    def params(self) -> PyTree:
        return self.inner.params

    @property
    def mutable(self) -> PyTree:
        return self.inner.mutable


class StartedState(NamedTuple):
    """The client state.

    Attributes:
      inner: the method's client state; zeros before the client's first participation.
      has_started: bool, whether the client has taken part.
    """

    inner: PyTree
    has_started: Any


def with_first_state(
    method: FederatedMethod, first: Callable[[Variables], PyTree]
) -> FederatedMethod:
    """The method with client states that `first` makes from the server's initial model.

    Args:
      method: its `client_update`, and the `variables` of its personal models, get the client state after
        the client's last participation, or before the first one the result of `first`. Its own
        `init_client_state` is not used.
      first: the server's initial Variables -> client state.
    """
    initial = lambda key: method.variables(method.init(key))

    def started(key_data: jax.Array, client_state: StartedState) -> PyTree:
        # XLA draws only those leaves of the initial model that `first` reads.
        make = lambda: first(initial(jax.random.wrap_key_data(jnp.asarray(key_data))))
        return jax.lax.cond(client_state.has_started, lambda: client_state.inner, make)

    def client_update(
        message: KeyedMessage,
        client_state: StartedState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> ClientResult:
        state = started(message.key, client_state)
        result = method.client_update(message.inner, state, data, key, hyper)
        return result._replace(client_state=StartedState(result.client_state, jnp.asarray(True)))

    def server_update(
        server: KeyedServer, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> KeyedServer:
        return server._replace(inner=method.server_update(server.inner, aggregate, round, hyper))

    def set_model(server: KeyedServer, new: Variables, reset_optimizer: bool) -> KeyedServer:
        return server._replace(inner=method.set_model(server.inner, new, reset_optimizer))

    def init_client_state() -> StartedState:
        room = jax.eval_shape(lambda key: first(initial(key)), jax.random.key(0))
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), room)
        return StartedState(zeros, np.asarray(False))

    def of_state(personal: PersonalModel) -> PersonalModel:
        def variables(server: KeyedServer, client_state: StartedState) -> Variables:
            return personal.variables(server.inner, started(server.key, client_state))

        return PersonalModel(personal.model, variables)

    inner_gradient = method.gradient

    def gradient(
        message: KeyedMessage,
        client_state: StartedState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> PyTree:
        assert inner_gradient is not None
        state = started(message.key, client_state)
        return inner_gradient(message.inner, state, data, key, hyper)

    inner_fine_tune = method.fine_tune

    def fine_tune(
        server: KeyedServer,
        client_state: StartedState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> dict[str, Variables]:
        assert inner_fine_tune is not None
        return inner_fine_tune(server.inner, started(server.key, client_state), data, key, hyper)

    return method._replace(
        init=lambda key: KeyedServer(method.init(key), jax.random.key_data(key)),
        broadcast=lambda server: KeyedMessage(method.broadcast(server.inner), server.key),
        client_update=client_update,
        server_update=server_update,
        variables=lambda server: method.variables(server.inner),
        set_model=set_model,
        init_client_state=init_client_state,
        personal_models={
            name: of_state(personal) for name, personal in method.personal_models.items()
        },
        gradient=None if inner_gradient is None else gradient,
        fine_tune=None if inner_fine_tune is None else fine_tune,
        after_sending=after_sending_within(method),
    )
