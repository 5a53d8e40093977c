"""Local training without collaboration: the baseline of methods of parties, and FedMD's pre-training."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    PartyUpdate,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.patience import Patience, check_patience, stopping_early
from fedcodist.algorithms.parties.shared_examples import shared_examples
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import lasting_state
from fedcodist.distillation.validation import VALIDATION, validation_indices

PyTree = Any
# Keys are derived from the name. These are the names before they were changed, also that of a config's
# phase, so that recorded runs can still be reproduced.
_STREAMS = {"local_only": "isolated", "centralised training": "pooled training"}
SHARED = "shared"  # the data set on which all parties train if they do not use their own examples


class LocalOnlyParty(NamedTuple):
    """A party's model and optimizer state; for early stopping, its best accuracy and rounds since it."""

    variables: Variables
    optimizer_state: PyTree
    best: jax.Array
    waited: jax.Array


class LocalOnlyHyper(NamedTuple):
    """The learning rate, traced."""

    learning_rate: Any = 1e-3


def local_only(
    groups: Mapping[str, PartyGroup],
    training: LocalTraining,
    num_shared: int | None = None,
    patience: Patience | None = None,
    gradient_hook: Callable[[PyTree, PyTree], PyTree] = lambda gradient, params: gradient,
    hyper: LocalOnlyHyper = LocalOnlyHyper(),
    execution: Execution = Execution(),
    name: str = "local_only",
) -> FederatedAlgorithm:
    """Each party trains its own model; optimizers continue over rounds.

    A round is `training.epochs` passes over a party's private examples, or over the data set `shared`.
    This may be public examples (FedMD's pre-training), or the union of all parties' examples (an upper
    bound for collaboration). `local_only_steps` is the same but counts steps; its upper bound is
    `centralised`.

    Args:
      groups: architecture -> its parties.
      training: optimizer, batch size, epochs per round, preprocessing.
      num_shared: number of examples of `shared`; None: each party trains on its own examples.
      patience: early stopping, which the algorithm's name then mentions; None: no early stopping.
      gradient_hook: (gradient, params) -> gradient, such as a penalty's.
      hyper: the learning rate.
      execution: how parties of one architecture are executed.
      name: the name in tables. Keys of batches and augmentation are derived from it, so that two such
        phases of one run do not draw the same.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(local_only, locals())
    groups = check_groups(groups)
    check_training("training", training)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    purpose, data_set_sizes = _STREAMS.get(name, name), {}
    if num_shared is not None:
        check_integer("num_shared", num_shared, low=1)
        data_set_sizes[SHARED] = num_shared
    if patience is not None:
        check_patience(patience)
        data_set_sizes[VALIDATION] = patience.data.num_examples
        name = f"{name}, stopped on {patience.validated_on}"

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        examples = {}
        if num_shared is not None:
            examples[SHARED] = jnp.arange(num_shared)[None]
        if patience is not None:
            examples[VALIDATION] = validation_indices(patience.data)
        return examples

    def round_(
        state: dict[str, LocalOnlyParty], client_states: PyTree, round: Round, hyper: LocalOnlyHyper
    ) -> AfterRound:
        def update(
            model: Model, message: None, party: LocalOnlyParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            if num_shared is not None:
                data = shared_examples(round.inputs.examples[SHARED].columns, data)
            trained = train_client(
                model,
                training,
                party.variables,
                data,
                key,
                hyper.learning_rate,
                gradient_hook,
                optimizer_state=party.optimizer_state,
            )
            metrics = training_metrics(trained)
            after = party._replace(
                variables=trained.variables, optimizer_state=trained.optimizer_state
            )
            return PartyResult(after, metrics)

        whole_update: PartyUpdate = update
        if patience is not None:
            whole_update = stopping_early(update, patience, round.inputs.examples[VALIDATION])
        key = keys.derive(round.key, purpose, round.index)
        result = run_parties(groups, whole_update, None, state, round, key, execution)
        return result.states, client_states, result.metrics

    return assemble(
        name,
        groups,
        hyper,
        lambda key: start(init_models(groups, key), training),
        round_,
        lambda state, name: state[name].variables,
        same_for_all(groups, Communication(down=0, up=0)),
        select_examples,
        data_set_sizes,
    )._replace(restart=_not_waiting)


def _not_waiting(state: dict[str, LocalOnlyParty]) -> dict[str, LocalOnlyParty]:
    """Parties that go on in another run, whose early stopping has its own validation data."""
    return {
        name: party._replace(
            best=jnp.full_like(party.best, -jnp.inf), waited=jnp.zeros_like(party.waited)
        )
        for name, party in state.items()
    }


def start(models: Mapping[str, Variables], training: LocalTraining) -> dict[str, LocalOnlyParty]:
    """The state before the first round: models, leaves [group, ...], with fresh optimizers."""

    def fresh(variables: Variables) -> LocalOnlyParty:
        first = functools.partial(lasting_state, "training.optimizer", training.optimizer)
        optimizer_state = jax.vmap(first)(variables.params)
        count = jax.tree.leaves(variables.params)[0].shape[0]
        # The dtype that a round returns; with another one the round would compile twice.
        best = jnp.full(count, -jnp.inf, jnp.float32)
        return LocalOnlyParty(variables, optimizer_state, best, jnp.zeros(count, jnp.int32))

    return {name: fresh(variables) for name, variables in models.items()}
