"""Every party for itself: no collaboration. What FedMD starts from, and what it is compared with."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.party import (
    PARTIES,
    PartyGroup,
    check_groups,
    everybody,
    for_each_party,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
    shared_examples,
    without_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining, check_training, lasting_state, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Variables, is_finite
from fedcodist.distillation.validation import (
    VALIDATION,
    ValidationData,
    check_validation_data,
    validation_accuracy,
    validation_rows,
)

PyTree = Any
SHARED = "shared"  # the data set on which all parties train, where they do not train on their own


class Patience(NamedTuple):
    """When a party stops, as Keras' early stopping does: it looks at validation data every round and
    ends `patience` rounds after the last gain of more than `min_delta`. The last model stays.

    Attributes:
      data: the validation data.
      patience: rounds without a gain that are allowed.
      min_delta: accuracy, a share, that counts as a gain.
      validated_on: what the data are, for the algorithm's name: where they are test data, the party's
        test accuracy is too good.
    """

    data: ValidationData
    patience: int
    min_delta: float
    validated_on: str


class LocalOnlyParty(NamedTuple):
    """A party's model, its optimizer, its best accuracy, and the rounds since then."""

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
    """Each party trains its own model; optimizers go on over the rounds.

    A round is `training.epochs` passes over a party's private examples, or over the data set `shared`:
    public examples (FedMD's pre-training), or the union of all parties' (the bound that a collaboration
    could reach). `local_only_steps` is the same by steps, and `centralised` its bound.

    Args:
      groups: architecture -> its parties.
      training: optimizer, batch size, epochs per round, preprocessing.
      num_shared: rows of `shared`; where not given each party has its own examples.
      patience: early stopping; none where not given. The name of the algorithm tells of it.
      gradient_hook: (gradient, params) -> gradient, such as a penalty's.
      hyper: the learning rate.
      execution: how parties of one architecture are executed.
      name: the name in tables.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(local_only, locals())
    groups = check_groups(groups)
    check_training("training", training)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    if num_shared is not None:
        check_integer("num_shared", num_shared, low=1)
    stream = name
    if patience is not None:
        check_validation_data("patience.data", patience.data)
        check_integer("patience.patience", patience.patience, low=1)
        check_number("patience.min_delta", patience.min_delta, low=0)
        name = f"{name}, stopped on {patience.validated_on}"

    data_set_sizes = {}
    if num_shared is not None:
        data_set_sizes[SHARED] = num_shared
    if patience is not None:
        data_set_sizes[VALIDATION] = patience.data.num_examples

    def init(key):
        return start(init_models(groups, key), training)

    def select(round, key):
        examples = {}
        if num_shared is not None:
            examples[SHARED] = jnp.arange(num_shared)[None]
        if patience is not None:
            examples[VALIDATION] = validation_rows(patience.data)
        return everybody(groups, examples)

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name

        def update(model, message, party, data, key):
            goes_on = jnp.asarray(True) if patience is None else party.waited < patience.patience
            own = without_examples(data, goes_on)
            if num_shared is not None:
                own = shared_examples(inputs.examples[SHARED].columns, own)
            trained = train_client(
                model,
                training,
                party.variables,
                own,
                key,
                hyper.learning_rate,
                gradient_hook,
                optimizer_state=party.optimizer_state,
            )
            best, waited = party.best, party.waited
            if patience is not None:
                now = jax.lax.cond(
                    goes_on & (data.size > 0),
                    lambda: validation_accuracy(
                        model, trained.variables, inputs.examples[VALIDATION], patience.data
                    ),
                    lambda: party.best,
                )
                is_better = now - patience.min_delta > party.best
                best = jnp.where(is_better & goes_on, now, party.best)
                waited = jnp.where(goes_on, jnp.where(is_better, 0, waited + 1), waited)
            metrics = {
                "loss": trained.loss,
                "num_steps": trained.num_steps,
                "client_examples": trained.num_examples,
                "finite": is_finite(trained.variables),
            }
            after = LocalOnlyParty(trained.variables, trained.optimizer_state, best, waited)
            return ClientResult({}, {}, jnp.ones(()), after, metrics)

        result = for_each_party(
            groups,
            update,
            None,
            state,
            inputs.cohorts[PARTIES],
            keys.derive(key, stream, round.index),
            execution,
            axis_name,
        )
        return result.own, client_states, result.metrics

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=select,
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state[name].variables),
        communication=same_for_all(groups, Communication(down=0, up=0)),
        num_clients=num_clients(groups),
        data_set_sizes=data_set_sizes,
    )


def start(models: Mapping[str, Variables], training: LocalTraining) -> dict[str, LocalOnlyParty]:
    """The state before the first round: models, leaves [group, ...], with fresh optimizers."""

    def fresh(variables):
        first = functools.partial(lasting_state, "training.optimizer", training.optimizer)
        optimizer_state = jax.vmap(first)(variables.params)
        count = jax.tree.leaves(variables.params)[0].shape[0]
        # Of the type that a round leaves: another one would be compiled for.
        best = jnp.full(count, -jnp.inf, jnp.float32)
        return LocalOnlyParty(variables, optimizer_state, best, jnp.zeros(count, jnp.int32))

    return {name: fresh(variables) for name, variables in models.items()}
