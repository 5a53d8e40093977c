"""Fed-ET: clients' small models, as one ensemble, teach a large model that only the server has.

Cho, Manoel, Joshi, Sim and Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer for Training Large
Models in Federated Learning", IJCAI 2022, https://arxiv.org/abs/2204.12703.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.pool import (
    Pool,
    check_class_counts,
    check_no_methods,
    check_pools,
    check_sends_models,
)
from fedcodist.algorithms.pools.pool_rounds import set_models, train_pools, update_servers
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.distillation.divergences import KL
from fedcodist.distillation.loop import Teacher, distill
from fedcodist.distillation.settings import Distillation, check_distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices
from fedcodist.models.headed import HEAD, check_heads, split_head, with_head

PyTree = Any
SERVER = "server"
_CLIENTS = "clients"  # the one teacher: all clients of all pools


class FedETHyper(NamedTuple):
    """Floats of Fed-ET; traced.

    Attributes:
      learning_rate: of the large model's training.
      diversity: lambda, the weight of predictions by clients that differ from the consensus.
      methods: pool -> the hyper-parameters of its method; `fed_et` puts the pools' own here.
    """

    learning_rate: Any = 5e-3
    diversity: Any = 0.05
    methods: Mapping[str, PyTree] = {}


class FedETState(NamedTuple):
    """Pool -> its method's server state, and the large model."""

    pools: dict[str, PyTree]
    server: Variables


def fed_et(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    server: Model,
    distillation: Distillation = Distillation(128, 64, optax.sgd, mixup_beta=0),
    hyper: FedETHyper = FedETHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Small models of the pools' clients teach the server's large model, which gives back its head.

    In a round the cohorts train, and every pool's server averages its clients. The large model's head
    becomes the mean of all clients' heads. On unlabelled data a client's weight for an example is the
    variance of its logits over classes, which is large for a confident client. The consensus, the class
    of the weighted mean logits, is the label that the large model learns. The clients that predict
    another class give a second, soft target: the softmax of their weighted mean logits, which is learned
    with weight lambda. There is none for examples on which all clients agree. Then every pool's model
    gets the large model's head.

    Which layers the paper calls the shared representation layers is not verified. Here they are the
    linear heads, as in a public reimplementation, from which the defaults are taken too.

    Args:
      pools: name -> Pool, one small architecture each, networks of `headed`.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`.
      server: the large model, of `headed` with a head of the pools' shape.
      distillation: steps, batch size, optimizer, augmentation; its divergence must be the default.
      hyper: learning rate and lambda.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_et, locals())
    pools = check_pools(pools)
    check_class_counts(pools)
    check_sends_models(pools)
    check_distillation(distillation, num_unlabelled)
    _check_models(pools, server, distillation)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.diversity", hyper.diversity, low=0)
    check_no_methods("methods", hyper.methods)

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {UNLABELLED: unlabelled_indices(key, round, distillation, num_unlabelled)}

    def round_(
        state: FedETState, client_states: PyTree, round: Round, hyper: FedETHyper
    ) -> tuple[FedETState, PyTree, dict[str, jax.Array]]:
        # Small models train on clients, and every pool's server averages its clients' models.
        trained = train_pools(
            pools, state.pools, client_states, round, hyper.methods, execution, members=True
        )
        of_pools = update_servers(
            pools, state.pools, trained.aggregates, round.index, hyper.methods
        )

        # The large model's head starts as the mean of all clients' heads.
        start = state.server._replace(
            params=with_head(state.server.params, mean_head(trained.members))
        )
        # It learns the consensus and, with weight lambda, the predictions of clients that differ.
        members = {name: (pools[name].method.model, trained.members[name]) for name in pools}
        taught = distill(
            models={SERVER: server},
            students={SERVER: start},
            teachers={_CLIENTS: consensus_teacher(members, hyper.diversity)},
            targets=lambda student, outputs: outputs[_CLIENTS],
            unlabelled=round.inputs.examples[UNLABELLED],
            key=keys.derive(round.key, "distillation", round.index),
            learning_rates={SERVER: hyper.learning_rate},
            settings=distillation,
            axis_name=round.axis_name,
            divergence=optax.softmax_cross_entropy,
        )
        large = taught.students[SERVER]

        # The head goes back into every pool's model.
        _, head = split_head(large.params)
        models = {name: pool.method.variables(of_pools[name]) for name, pool in pools.items()}
        models = {n: m._replace(params=with_head(m.params, head)) for n, m in models.items()}
        state = FedETState(set_models(pools, of_pools, models), large)
        return state, trained.client_states, trained.metrics

    algorithm = assemble(
        "fed_et",
        pools,
        columns,
        hyper._replace(methods={name: pool.method.hyper for name, pool in pools.items()}),
        round_,
        select_examples,
        {UNLABELLED: num_unlabelled},
        servers=lambda state: state.pools,
    )

    def init(key: jax.Array) -> FedETState:
        return FedETState(algorithm.init(key), server.init(keys.derive(key, "init", SERVER)))

    predictors = {**algorithm.predictors, SERVER: single_model(server, lambda state: state.server)}
    return algorithm._replace(init=init, predictors=predictors)


def mean_head(members: Mapping[str, Variables]) -> PyTree:
    """The plain mean of the heads of all pools' clients, leaves [clients, ...] by pool."""
    heads = [variables.params[HEAD] for variables in members.values()]
    return jax.tree.map(lambda *leaves: jnp.mean(jnp.concatenate(leaves), axis=0), *heads)


def consensus_teacher(
    members: Mapping[str, tuple[Model, Variables]], diversity: jax.Array | float
) -> Teacher:
    """A teacher whose answers are the targets of all clients' models (see `consensus_targets`).

    Args:
      members: pool -> its model, and its clients' variables, leaves [clients, ...].
      diversity: lambda.
    """

    def answer(batch: Batch) -> jax.Array:
        logits = [
            jax.lax.map(
                lambda client, model=model: checked_logits(model.apply(client, batch)[0]), variables
            )
            for model, variables in members.values()
        ]
        return consensus_targets(jnp.concatenate(logits), diversity)

    return answer


def consensus_targets(logits: jax.Array, diversity: jax.Array | float) -> jax.Array:
    """onehot(consensus) + lambda softmax(mean logits of clients that differ), [batch, classes].

    The gradient of the cross-entropy with this sum is that of CE(label) + lambda KL(others || student).
    If no client differs the second term is 0.

    Args:
      logits: of all clients, [clients, batch, classes].
      diversity: lambda.
    """
    variances = jnp.var(logits, axis=-1)
    consensus = jnp.argmax(_weighted(logits, variances)[0], axis=-1)
    differs = jnp.argmax(logits, axis=-1) != consensus
    others, has_others = _weighted(logits, variances * differs)
    soft = jnp.where(has_others[:, None], jax.nn.softmax(others), 0)
    return jax.nn.one_hot(consensus, logits.shape[-1], dtype=logits.dtype) + diversity * soft


def _weighted(logits: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean over clients [batch, classes], whether there is any weight [batch])."""
    total = jnp.sum(weights, axis=0)
    shares = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("cb,cbk->bk", shares, logits), total > 0


def _check_models(pools: Mapping[str, Pool], server: Model, distillation: Distillation) -> None:
    if SERVER in pools:
        raise ValueError(f"pools must not have the name {SERVER!r}, which is the large model's.")
    check_heads("pools", {name: pool.method.model for name, pool in pools.items()})
    check_heads(
        "server", {SERVER: server, **{name: pool.method.model for name, pool in pools.items()}}
    )
    if distillation.divergence != KL or distillation.direction != "forward":
        raise ValueError(
            "distillation.divergence and .direction must be the defaults for fed_et, which has a loss "
            f"of its own, got {distillation.divergence!r} and {distillation.direction!r}."
        )
