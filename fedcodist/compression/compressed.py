"""Compresses the uplink and the downlink of any method."""

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
from fedcodist.core.method import (
    FederatedMethod,
    PersonalModel,
    after_sending_within,
    fine_tuned_models,
)
from fedcodist.core.model import Variables
from fedcodist.core.parts import joined

PyTree = Any
Observer = Callable[[PyTree, Progress], dict[str, jax.Array]]


class Downlink(NamedTuple):
    """The state of clients that have read all messages.

    Attributes:
      params: their parameters; None in place of those that are not sent.
      memory: of the compressor.
      sent: uint32 [2], the bytes of all messages as two 32-bit words, the high word first. The first
        message is the whole model.
    """

    params: PyTree
    memory: PyTree
    sent: jax.Array


class CompressedServer(NamedTuple):
    """The method's server, whose model is always the one that clients can restore.

    Attributes:
      inner: the method's server state.
      before: Downlink before the message that precedes the next round.
      memory, sent: those of Downlink after this message.
      round: int32, the next round, from 0.
      key: uint32, data of the key for the downlink's draws.
    """

    inner: PyTree
    before: Downlink
    memory: PyTree
    sent: jax.Array
    round: jax.Array
    key: jax.Array


class CompressedMessage(NamedTuple):
    """A client's message after decompression: the method's message, and `sent` and `round`."""

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
    """The client state.

    Attributes:
      inner: the method's client state.
      memory: of the uplink compressor, such as the error of its messages so far.
      read: uint32 [2], `Downlink.sent` at the client's last participation; 0 before the first.
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
    """The method with compressed updates of clients, and compressed changes of the server's model.

    Uplink: each client compresses its update; the server aggregates the updates that it can restore.
    Batch statistics and `extra` (SCAFFOLD's variates) are sent uncompressed.

    Downlink (as in FedKD): a message is the change of the model since the last message. The server
    itself continues from the model that clients can restore, so all have the same model. All changes of
    a round, by server optimizer or distillation, are sent as one message. What an error feedback keeps
    in its memory is sent with a later message.

    Bytes are measured: the metrics `client_bytes_up` and `client_bytes_down` are a round's means over
    its clients. In a run's summary they replace bytes counted from shapes. A client that was not in the
    last rounds needs all messages since its last one, or the whole model if that takes fewer bytes.

    Args:
      method: any single-model method.
      num_rounds: of the whole training, for compressors that change during it. In a run that begins
        with `Experiment.start`, the first round compresses as the earlier run's next round would.
      uplink, downlink: compressors; None: no compression in this direction.
      observe: (a client's update, share of the rounds done) -> metrics of it, such as `spectra`.
      observe_gradient: the same for the gradient of the client's loss on one batch at the received
        model; its metrics' names begin with `gradient_`. The update of an optimizer such as Adam over an
        epoch is a different matrix, of a far higher rank.

    Raises:
      ValueError: `observe_gradient` for a method that does not define `gradient`; a private method,
        whose bounds must come after compression.
      ValueError: when the algorithm is built, for a method that is already compressed, FetchSGD or
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

        # Uplink: the update as the server can restore it; everything else is uncompressed.
        update, memory, bytes_up = sent_up(
            uplink, result.update, client_state.memory, keys.derive(key, "uplink"), progress
        )
        metrics["bytes_up"] = bytes_up + tree_bytes((result.mutable, result.weight, result.extra))

        # Downlink: the messages that the client has missed; everything else is uncompressed.
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
        # Fine-tuning sends nothing, so nothing is compressed.
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
        num_rounds=num_rounds,
        gradient=None,  # use `observe_gradient` instead
        after_sending=after_sending_within(method),
    )


def _check(method: FederatedMethod, num_rounds: int, observe_gradient: Observer | None) -> None:
    check_integer("num_rounds", num_rounds, low=1)
    if method.privacy is not None:
        raise ValueError(
            "method must not be private: private(compressed(method, ...), ...) bounds what is restored."
        )
    if method.reduce.mask is not None:
        raise ValueError(
            "method must not be one of a secure sum: secure_sum(compressed(method, ...), ...) adds up "
            "what is restored."
        )
    if observe_gradient is not None and method.gradient is None:
        raise ValueError(
            "observe_gradient must be None for a method that does not tell its gradient."
        )


def _within(model: PersonalModel) -> PersonalModel:
    """A method's personal model, which reads `compressed`'s server and client states."""
    return model._replace(
        variables=lambda server, client_state: model.variables(server.inner, client_state.inner)
    )


def first_client_state(method: FederatedMethod, uplink: Compressor | None) -> CompressedClientState:
    """The client state before the first participation."""
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
    return uplink.decompress(message, update), memory, jnp.asarray(uplink.payload(message))


def written(
    method: FederatedMethod,
    downlink: Compressor | None,
    num_rounds: int,
    server: CompressedServer,
    inner: PyTree,
    before: Downlink,
) -> CompressedServer:
    """The server with a message that leads from `before` to the model of `inner`.

    The inner server then continues from the model that clients can restore.
    """
    if downlink is None:
        return server._replace(inner=inner)
    draw = keys.derive(jax.random.wrap_key_data(jnp.asarray(server.key)), server.round)
    sent = method.broadcast(inner).params  # the model's parameters, or the part that is sent
    after = sent_down(downlink, before, sent, draw, server.round / num_rounds)
    wanted = method.variables(inner)
    model = Variables(joined(after.params, wanted.params), wanted.mutable)
    inner = method.set_model(inner, model, False)
    return CompressedServer(inner, before, after.memory, after.sent, server.round, server.key)


def sent_down(
    downlink: Compressor, before: Downlink, wanted: PyTree, key: jax.Array, progress: jax.Array
) -> Downlink:
    """The Downlink after a message with the change from `before.params` to the wanted parameters."""
    change = jax.tree.map(jnp.subtract, before.params, wanted)
    message, memory = downlink.compress(change, before.memory, key, progress)
    restored = downlink.decompress(message, change)
    params = jax.tree.map(jnp.subtract, before.params, restored)
    sent = plus(before.sent, jnp.asarray(downlink.payload(message), jnp.uint32))
    return Downlink(params, memory, sent)


def plus(count: jax.Array, more: jax.Array) -> jax.Array:
    """The sum of a count of bytes, uint32 [2] with the high word first, and a uint32."""
    low = count[1] + more
    return jnp.stack([count[0] + (low < more), low])


def missed_bytes(sent: jax.Array, read: jax.Array, most: int) -> jax.Array:
    """The bytes between two counts, `sent` minus `read`, but at most `most`; uint32."""
    low = sent[1] - read[1]
    high = sent[0] - read[0] - (sent[1] < read[1])
    return jnp.where(high > 0, jnp.uint32(most), jnp.minimum(low, jnp.uint32(most)))
