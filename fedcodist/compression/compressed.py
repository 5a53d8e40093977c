"""Any method with its uplink and downlink compressed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.compression.compressor import Compressor, Progress
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer
from fedcodist.core.communication import tree_bytes
from fedcodist.core.inputs import ClientData
from fedcodist.core.method import FederatedMethod, PersonalModel, fine_tuned_models
from fedcodist.core.model import Variables
from fedcodist.core.parts import joined

PyTree = Any
Observer = Callable[[PyTree, Progress], dict[str, jax.Array]]


class Downlink(NamedTuple):
    """Where clients are that have read all messages.

    Attributes:
      params: that they have; None in place of those that do not travel.
      memory: the compressor's.
      sent: uint32 [2], bytes of all messages, in words of 32 bits; the first is the whole model.
    """

    params: PyTree
    memory: PyTree
    sent: jax.Array


class CompressedServer(NamedTuple):
    """The method's server, whose model is always the one that clients will have.

    Attributes:
      inner: the method's server state.
      before: Downlink without the message that precedes the coming round.
      memory, sent: the downlink's with it.
      round: int32, the coming round, from 0.
      key: uint32, data of the key from which the downlink draws.
    """

    inner: PyTree
    before: Downlink
    memory: PyTree
    sent: jax.Array
    round: jax.Array
    key: jax.Array


class CompressedMessage(NamedTuple):
    """What a client has after its download: the method's message, and `CompressedServer`'s."""

    inner: PyTree
    sent: jax.Array
    round: jax.Array

    @property
    def params(self) -> PyTree:
        return self.inner.params

    @property
    def mutable(self) -> PyTree:
        return self.inner.mutable


class CompressedClientState(NamedTuple):
    """What a client keeps.

    Attributes:
      inner: the method's client_state.
      memory: the uplink compressor's, such as what its messages lost so far.
      read: uint32 [2], `Downlink.sent` at its last participation; 0 before the first.
    """

    inner: PyTree
    memory: PyTree
    read: jax.Array


def compressed(
    method: FederatedMethod,
    num_rounds: int,
    uplink: Compressor | None = None,
    downlink: Compressor | None = None,
    observe: Observer | None = None,
    observe_gradient: Observer | None = None,
) -> FederatedMethod:
    """The method, but clients' updates and changes of the server's model travel compressed.

    Uplink: each client compresses its update; the server aggregates what it can restore of them. Batch
    statistics and what a method sends besides (SCAFFOLD's variates) travel as they are.

    Downlink (as in FedKD): a message is the change of the model since the last one. The server too goes
    on from what clients can restore, so that all have the same model and there is no other. Whatever
    changes the model, server optimizer or distillation, all of a round's changes make one message.
    What the memory of an error feedback holds back comes with a later one.

    Bytes are measured: the metrics `client_bytes_up` and `client_bytes_down` are a round's means over
    its clients, and a run's summary has these in place of what shapes tell. A client that was not in the
    last rounds needs all messages since its last one, or the whole model where that takes fewer bytes.

    Args:
      method: any single-model method.
      num_rounds: of the whole training, for compressors that change with it.
      uplink, downlink: compressors; None leaves that way as it is.
      observe: (a client's update, share of the rounds done) -> metrics of it, such as `spectra`'s.
      observe_gradient: the same of the gradient of the client's loss on one batch at the model that it
        received; its metrics' names begin with `gradient_`. What an optimizer such as Adam makes of an
        epoch of gradients is another matrix, of a far higher rank.

    Raises:
      ValueError: `observe_gradient` for a method that does not tell its gradient; a private method,
        whose bounds must come after compression.
      ValueError: when the algorithm is built, for a method that is compressed already, FetchSGD or
        Federated Dropout.
    """
    check_arguments(compressed, locals())
    _check(method, num_rounds, observe_gradient)
    inner_gradient = method.gradient

    def broadcast(server: CompressedServer) -> CompressedMessage:
        return CompressedMessage(method.broadcast(server.inner), server.sent, server.round)

    def client_update(
        message: CompressedMessage,
        client_state: CompressedClientState,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> ClientResult:
        result = method.client_update(message.inner, client_state.inner, data, key, hyper)
        if "bytes_up" in result.metrics:
            raise ValueError("method must not be one that sends less than its model by itself.")
        progress = (message.round + 1) / num_rounds
        metrics = {} if observe is None else dict(observe(result.update, progress))
        if observe_gradient is not None and inner_gradient is not None:
            look = keys.derive(key, "observed_gradient")
            gradient = inner_gradient(message.inner, client_state.inner, data, look, hyper)
            seen = observe_gradient(gradient, progress)
            metrics |= {f"gradient_{name}": value for name, value in seen.items()}

        # Uplink: the update as the server can restore it; all else travels as it is.
        update, memory, bytes_up = sent_up(
            uplink, result.update, client_state.memory, keys.derive(key, "uplink"), progress
        )
        metrics["bytes_up"] = bytes_up + tree_bytes((result.mutable, result.weight, result.extra))

        # Downlink: what the client has missed since it last took part; all else travels as it is.
        whole = tree_bytes(message.params)
        missed = whole if downlink is None else missed_bytes(message.sent, client_state.read, whole)
        metrics["bytes_down"] = jnp.int32(missed) + (tree_bytes(message.inner) - whole)
        return result._replace(
            update=update,
            client_state=CompressedClientState(result.client_state, memory, message.sent),
            metrics=result.metrics | metrics,
        )

    def server_update(
        server: CompressedServer, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> CompressedServer:
        params = method.broadcast(server.inner).params
        before = Downlink(params, server.memory, server.sent)
        inner = method.server_update(server.inner, aggregate, round, hyper)
        after = jnp.asarray(round, jnp.int32) + 1
        return written(method, downlink, num_rounds, server._replace(round=after), inner, before)

    def set_model(
        server: CompressedServer, new: Variables, reset_optimizer: bool
    ) -> CompressedServer:
        inner = method.set_model(server.inner, new, reset_optimizer)
        return written(method, downlink, num_rounds, server, inner, server.before)

    return method._replace(
        init=lambda key: first_server(method, downlink, key),
        # Nothing of it is sent, so nothing is compressed.
        fine_tune=lambda server, client_state, *others: fine_tuned_models(
            method, server.inner, client_state.inner, *others
        ),
        broadcast=broadcast,
        client_update=client_update,
        server_update=server_update,
        variables=lambda server: method.variables(server.inner),
        set_model=set_model,
        init_client_state=lambda: first_client_state(method, uplink),
        personal_models={name: _within(model) for name, model in method.personal_models.items()},
        gradient=None,  # whoever looks at it does so here
    )


def _check(method: FederatedMethod, num_rounds: int, observe_gradient: Observer | None) -> None:
    check_integer("num_rounds", num_rounds, low=1)
    if method.privacy is not None:
        raise ValueError(
            "method must not be private: private(compressed(method, ...), ...) bounds what is restored."
        )
    if observe_gradient is not None and method.gradient is None:
        raise ValueError(
            "observe_gradient must be None for a method that does not tell its gradient."
        )


def _within(model: PersonalModel) -> PersonalModel:
    """A method's personal model, of the server and the client states that `compressed` makes."""
    return model._replace(
        variables=lambda server, client_state: model.variables(server.inner, client_state.inner)
    )


def first_client_state(method: FederatedMethod, uplink: Compressor | None) -> CompressedClientState:
    """What a client keeps before its first participation."""
    start = lambda key: method.broadcast(method.init(key)).params
    travelling = jax.eval_shape(start, jax.random.key(0))
    memory = () if uplink is None else uplink.init(travelling)
    return CompressedClientState(method.init_client_state(), memory, jnp.zeros(2, jnp.uint32))


def first_server(
    method: FederatedMethod, downlink: Compressor | None, key: jax.Array
) -> CompressedServer:
    """The server before the first round, whose first message is the whole model."""
    inner = method.init(key)
    params = method.broadcast(inner).params
    sent = plus(jnp.zeros(2, jnp.uint32), jnp.uint32(tree_bytes(params)))
    start = Downlink((), (), sent)
    if downlink is not None:
        start = Downlink(params, downlink.init(params), sent)
    draw = jax.random.key_data(keys.derive(key, "downlink"))
    return CompressedServer(inner, start, start.memory, sent, jnp.int32(0), draw)


def sent_up(
    uplink: Compressor | None, update: PyTree, memory: PyTree, key: jax.Array, progress: jax.Array
) -> tuple[PyTree, PyTree, jax.Array]:
    """A client's update as the server can restore it, the compressor's memory, and the bytes it took."""
    if uplink is None:
        return update, memory, jnp.int32(tree_bytes(update))
    message, memory = uplink.compress(update, memory, key, progress)
    return uplink.decompress(message, update), memory, uplink.payload(message)


def written(
    method: FederatedMethod,
    downlink: Compressor | None,
    num_rounds: int,
    server: CompressedServer,
    inner: PyTree,
    before: Downlink,
) -> CompressedServer:
    """The server whose message leads from `before` to another inner server's model.

    The inner server too goes on from what clients can restore of that model.
    """
    if downlink is None:
        return server._replace(inner=inner)
    draw = keys.derive(jax.random.wrap_key_data(jnp.asarray(server.key)), server.round)
    sent = method.broadcast(inner).params  # the model's parameters, or those of them that travel
    after = sent_down(downlink, before, sent, draw, server.round / num_rounds)
    wanted = method.variables(inner)
    model = Variables(joined(after.params, wanted.params), wanted.mutable)
    inner = method.set_model(inner, model, reset_optimizer=False)
    return CompressedServer(inner, before, after.memory, after.sent, server.round, server.key)


def sent_down(
    downlink: Compressor, before: Downlink, wanted: PyTree, key: jax.Array, progress: jax.Array
) -> Downlink:
    """Where clients are after a message of the change from where they were to the wanted parameters."""
    change = jax.tree.map(jnp.subtract, before.params, wanted)
    message, memory = downlink.compress(change, before.memory, key, progress)
    restored = downlink.decompress(message, change)
    params = jax.tree.map(jnp.subtract, before.params, restored)
    sent = plus(before.sent, downlink.payload(message).astype(jnp.uint32))
    return Downlink(params, memory, sent)


def plus(count: jax.Array, more: jax.Array) -> jax.Array:
    """A count of bytes, uint32 [2] with the high word first, and some more of them, uint32."""
    low = count[1] + more
    return jnp.stack([count[0] + (low < more), low])


def missed_bytes(sent: jax.Array, read: jax.Array, most: int) -> jax.Array:
    """The bytes from one count to a later one, at most so many; uint32."""
    low = sent[1] - read[1]
    high = sent[0] - read[0] - (sent[1] < read[1])
    return jnp.where(high > 0, jnp.uint32(most), jnp.minimum(low, jnp.uint32(most)))
