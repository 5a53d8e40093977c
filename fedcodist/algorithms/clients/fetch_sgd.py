"""FetchSGD: clients send count sketches of gradients; the server keeps momentum and error as sketches.

"FetchSGD: Communication-Efficient Federated Learning with Sketching" (Rothchild et al., 2020).
https://arxiv.org/abs/2007.07682
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.clients.scaffold import full_gradient
from fedcodist.compression.changed_entries import changed_entries
from fedcodist.compression.compressed import compressed
from fedcodist.compression.count_sketch import (
    Sketch,
    check_sketch,
    estimates,
    sketched,
    without,
)
from fedcodist.compression.top_k import largest_entries, scattered
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, weighted_mean
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, check_training, drawn_examples
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables, check_stateless
from fedcodist.core.schedules import Schedule, constant
from fedcodist.core.trees import flat, parameter_count, unflat

PyTree = Any


class FetchSGDHyper(NamedTuple):
    """The server's learning rate and rho, the momentum; traced."""

    learning_rate: Any = 0.1
    momentum: Any = 0.9


class FetchSGDServer(NamedTuple):
    """The model, and the tables [sketch_rows, sketch_columns] of momentum and error."""

    params: PyTree
    momentum: jax.Array
    error: jax.Array


def fetch_sgd(
    model: Model,
    training: LocalTraining = LocalTraining(),
    sketch_rows: int = 5,
    sketch_columns: int = 500_000,
    k: int = 50_000,
    rate_in_error: bool = False,
    examples_per_round: int | None = None,
    schedule: Schedule = constant,
    seed: int = 0,
    hyper: FetchSGDHyper = FetchSGDHyper(),
) -> FederatedMethod:
    """Clients send a sketch of one gradient; the server applies the k largest entries of its error.

    A client's gradient is that of the mean loss over its examples, or some of them, at the received
    model and without dropout. S is the mean of the clients' sketches, weighted by the numbers of
    examples in their gradients, as in the authors' code. The server does (algorithm 1)

        momentum <- rho momentum + S
        error <- error + momentum                  (times the learning rate with `rate_in_error`)
        delta = the k entries of largest estimate in error
        model <- model - learning rate x delta     (without the rate with `rate_in_error`)

    and then sets the cells of both tables to 0 into which delta's entries are hashed, as in the authors'
    code. A comment there says that it diverges to subtract delta's sketch, as the paper does (not
    verified: we know the paper from memory only). Clients download the entries that changed.

    The aggregate is a table and does not have the parameters' shape, so MergedCodist cannot merge it.

    Args:
      model: without mutable state, which a gradient does not change.
      training: its batch size (the examples of one forward pass) and preprocessing are used, but not its
        optimizer and epochs.
      sketch_rows, sketch_columns: of the table; the released code has these for models of millions of
        parameters.
      k: entries of a round's delta.
      rate_in_error: applies the learning rate to the error, as in the paper (not verified), and not to
        delta. With a constant rate both are the same.
      examples_per_round: how many of a client's examples are drawn for a round's gradient; None: all.
      schedule: (learning rate, round from 0) -> learning rate of that round.
      seed: of the hashes, the same for all clients and rounds.
      hyper: learning rate and momentum.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fetch_sgd, locals())
    check_training("training", training)
    if training.differentiate is not None:
        raise ValueError("training.differentiate must be None for fetch_sgd, which takes no steps.")
    names = ("sketch_rows", "sketch_columns", "k")
    check_sketch(sketch_rows, sketch_columns, k, names)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.momentum", hyper.momentum, low=0, high=1)
    check_integer("seed", seed, low=0)
    check_stateless("model", model)
    if examples_per_round is not None:
        check_integer("examples_per_round", examples_per_round, low=1)

    def init(key: jax.Array) -> FetchSGDServer:
        table = jnp.zeros((sketch_rows, sketch_columns))
        return FetchSGDServer(model.init(key).params, table, table)

    def variables(server: FetchSGDServer) -> Variables:
        return Variables(server.params, {})

    def client_update(
        message: Variables, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> ClientResult:
        # Algorithm 1, client: the sketch of one gradient.
        seen = data
        if examples_per_round is not None:
            seen = drawn_examples(data, examples_per_round, keys.derive(key, "examples"))
        gradient = full_gradient(model, training, message, seen, key, train=False)
        table = sketched(flat(gradient), sketch_rows, sketch_columns, seed).table
        metrics = {"num_steps": jnp.int32(1), "examples": seen.size}
        return ClientResult(table, {}, jnp.asarray(seen.size, jnp.float32), client_state, metrics)

    def server_update(
        server: FetchSGDServer, aggregate: Aggregate, round: jax.Array, hyper: FetchSGDHyper
    ) -> FetchSGDServer:
        # Algorithm 1, server: momentum and error feedback in tables, then the k largest entries.
        size = parameter_count(server.params)
        rate = schedule(hyper.learning_rate, round)
        before, after = (rate, 1.0) if rate_in_error else (1.0, rate)
        momentum = hyper.momentum * server.momentum + aggregate.pseudo_gradient
        error = server.error + before * momentum
        entries = largest_entries(estimates(Sketch(error, size, seed)), min(k, size))
        step = unflat(after * scattered(entries, size), server.params)
        # As in the authors' code, the cells of these entries are set to 0 in both tables.
        emptied = (
            without(Sketch(table, size, seed), entries.indices).table for table in (momentum, error)
        )
        params = jax.tree.map(jnp.subtract, server.params, step)
        return FetchSGDServer(params, *emptied)

    def set_model(server: FetchSGDServer, new: Variables, reset_optimizer: bool) -> FetchSGDServer:
        if not reset_optimizer:
            return server._replace(params=new.params)
        table = jnp.zeros_like(server.momentum)
        return FetchSGDServer(new.params, table, table)

    method = FederatedMethod(
        name="fetch_sgd",
        model=model,
        hyper=hyper,
        init=init,
        broadcast=variables,
        client_update=client_update,
        reduce=weighted_mean(),
        server_update=server_update,
        variables=variables,
        set_model=set_model,
        sends_models=False,
    )
    # Changed entries are compressed alike in all rounds, so a run may have any number.
    return compressed(method, num_rounds=1, downlink=changed_entries())._replace(num_rounds=None)
