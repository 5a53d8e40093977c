"""Parties: clients who each own a model of any architecture. All parties take part in every round.

Their models are in the algorithm's state, stacked by architecture. There they can be evaluated, exported
and checkpointed like any model, and initial values may depend on seed and party.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    all_clients,
    num_clients,
    party_names,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult, Reduce, mask_of_round, weighted_mean
from fedcodist.core.communication import Communication
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.for_each_client import Execution, dealing_order, for_each_client
from fedcodist.core.inputs import ClientData, Cohort, Round, Selection
from fedcodist.core.local_training import TrainedClient
from fedcodist.core.method import PARTIES, FederatedAlgorithm, Predictor
from fedcodist.core.model import Model, Variables
from fedcodist.core.padding_checks import training_clients
from fedcodist.core.shape_checks import check_same_shapes
from fedcodist.core.trees import is_finite

PyTree = Any
# (the party's model, message, its state, data, key) -> PartyResult
PartyUpdate = Callable[[Model, PyTree, PyTree, ClientData, jax.Array], "PartyResult"]
# The results of a round: (state, client states, metrics)
AfterRound = tuple[PyTree, PyTree, dict[str, jax.Array]]


class PartyResult(NamedTuple):
    """What one party returns.

    Attributes:
      state: the party's new state: its model, and more in some methods. None if the pass does not change
        it; the pass's `states` then hold None.
      metrics: dict of scalars or vectors; `party_metrics` makes those that every method has.
      sends: pytree that is multiplied by `weight` and summed over parties; only the sum is used.
      weight: scalar weight of `sends`.
      reports: pytree that is not summed but kept for each party, such as predictions for neighbours.

    The party sends both `sends` and `reports`, so the method's `communication` must count both. No check
    compares it with what is sent.
    """

    state: PyTree
    metrics: dict[str, jax.Array]
    sends: PyTree = None
    weight: Any = 1.0
    reports: PyTree = None


class PartiesResult(NamedTuple):
    """The results of all parties.

    Attributes:
      combined: what `reduce` makes of all `sends`; by default their weighted mean.
      states: architecture -> the parties' new states, leaves [group, ...].
      reports: architecture -> the parties' reports, leaves [group, ...].
      metrics: `<party>/<name>` -> scalar.
    """

    combined: PyTree
    states: dict[str, PyTree]
    reports: dict[str, PyTree]
    metrics: dict[str, jax.Array]


def assemble(
    name: str,
    groups: Mapping[str, PartyGroup],
    hyper: PyTree,
    init: Callable[[jax.Array], PyTree],
    round_: Callable[..., AfterRound],
    variables: Callable[[PyTree, str], Variables],
    communication: Mapping[str, Communication],
    select_examples: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] = lambda round, key: {},
    data_set_sizes: Mapping[str, int] = {},
    other_predictors: Mapping[str, Predictor] = {},
    num_rounds: int | None = None,
    server: Callable[[PyTree], PyTree] | None = None,
) -> FederatedAlgorithm:
    """Makes an algorithm of parties from a function of one round.

    Args:
      name, hyper, init: as in FederatedAlgorithm.
      groups: checked groups.
      round_: FederatedAlgorithm.round.
      variables: (state, architecture) -> its parties' models, leaves [group, ...].
      communication: party -> bytes of one round.
      select_examples: (round, key) -> data set -> indices of the round's examples of other data sets.
      data_set_sizes: data set -> examples that it must have.
      other_predictors: models that are no party's, such as a server's. By the name of an architecture,
        and with its members, they are other predictions of its parties.
      num_rounds: the most rounds of a run, if a schedule was made for so many.
      server: state -> what the server keeps, such as a model. A run stops if it is not finite.
    """
    of_parties = party_predictors(groups, variables)
    for other, predictor in other_predictors.items():
        if other in of_parties and predictor.members != of_parties[other].members:
            raise ValueError(
                f"other_predictors must not have the name of an architecture, got {other!r}."
            )
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=lambda round, key: everybody(groups, select_examples(round, key)),
        round=round_ if server is None else _with_finite_server(server, round_, communication),
        predictors={**of_parties, **other_predictors},
        communication=communication,
        num_clients=num_clients(groups),
        data_set_sizes=data_set_sizes,
        num_rounds=num_rounds,
    )


def _with_finite_server(
    server: Callable[[PyTree], PyTree], round_: Callable[..., AfterRound], parties: Iterable[str]
) -> Callable[..., AfterRound]:
    """The round, whose metrics also tell whether what the server keeps is finite."""

    def round_and_server(
        state: PyTree, client_states: PyTree, round: Round, hyper: PyTree
    ) -> AfterRound:
        state, client_states, metrics = round_(state, client_states, round, hyper)
        is_server_finite = is_finite(server(state))
        finite_models = {f"{name}/finite_model": is_server_finite for name in parties}
        return state, client_states, metrics | finite_models

    return round_and_server


def party_metrics(
    variables: Variables, num_steps: Any, num_examples: Any, **others: jax.Array
) -> dict[str, jax.Array]:
    """The metrics that every method of parties reports for a party's training.

    Args:
      variables: after training; a run stops if they, or what the party sends, are not finite.
      num_steps, num_examples: of the training.
      others: losses, by name.
    """
    return {
        **others,
        "num_steps": jnp.asarray(num_steps),
        "client_examples": jnp.asarray(num_examples),
        "finite": is_finite(variables),
    }


def training_metrics(trained: TrainedClient) -> dict[str, jax.Array]:
    """The `party_metrics` of a party that `train_client` has trained, and its `loss`."""
    return party_metrics(
        trained.variables, trained.num_steps, trained.num_examples, loss=training_loss(trained)
    )


def training_loss(trained: TrainedClient) -> jax.Array:
    """The mean loss over the steps; NaN without a step, so that means over rounds leave it out."""
    return jnp.where(trained.num_steps > 0, trained.loss, jnp.nan)


def run_parties(
    groups: Mapping[str, PartyGroup],
    update: PartyUpdate,
    message: PyTree,
    states: Mapping[str, PyTree],
    round: Round,
    key: jax.Array,
    execution: Execution = Execution(),
    reduce: Reduce | None = None,
) -> PartiesResult:
    """Runs `update` once for every party.

    Parties of all architectures are dealt to devices together, since an architecture often has only one
    party. At the end there is one reduction for all of them.

    Args:
      groups: checked groups.
      update: (model, message, state, data, key) -> PartyResult; pure. If data.bound is 0, the party
        belongs to another device, and the update should take no time, see `if_here`.
      message: what every party downloads.
      states: architecture -> the parties' states, leaves [group, ...].
      round: its cohort has all parties in ascending order.
      key: of this pass; each party's key is derived from it and the party's index.
      execution: as in `for_each_client`.
      reduce: how `sends` are summed; by default their weighted mean. It gets a ClientResult with
        `sends` as `update` and without mutable state. The `metrics` of its Aggregate, such as
        `client_bytes_up`, become metrics of every party, if the pass sends anything.

    Raises:
      TypeError: names two architectures whose parties send arrays of different shapes.
    """
    reduce = weighted_mean() if reduce is None else reduce
    cohort, axis_name = round.inputs.cohorts[PARTIES], round.axis_name
    here = _dealt_here(cohort.sizes, axis_name)
    everyone = all_clients(groups)
    # One set of masks for all architectures. Every device adds all masks, so they cancel on each device.
    mask = mask_of_round(reduce, cohort.clients, key)
    totals, new_states, metrics = {}, {}, {}
    for name, group in groups.items():
        places = np.searchsorted(everyone, group.clients)
        is_here = here[places]
        members = Cohort(
            columns=cohort.columns,
            clients=cohort.clients[places],
            starts=cohort.starts[places],
            sizes=jnp.where(is_here, cohort.sizes[places], 0),
            capacity=cohort.capacity,
        )
        with training_clients(group.clients):
            result = for_each_client(
                functools.partial(_client_update, update, group.model),
                functools.partial(_prepare_here, reduce),
                message,
                (states[name], None),
                members,
                key,
                execution,
                mask=mask,
            )
        totals[name] = result.total
        new_states[name], metrics[name] = result.client_states, result.metrics
        if axis_name is not None:
            only_here = lambda leaf, is_here=is_here: jnp.where(
                is_here.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf)
            )
            new_states[name], metrics[name] = jax.tree.map(
                only_here, (new_states[name], metrics[name])
            )
    first = next(iter(totals))
    for name, total in totals.items():
        promise = f"parties of {name!r} must send what those of {first!r} send"
        check_same_shapes(promise, totals[first], total)
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *totals.values())
    total, new_states, metrics = sum_over_devices((total, new_states, metrics), axis_name)
    names = party_names(groups)
    by_party = {
        f"{party}/{metric}": values[index]
        for name, metrics_of_group in metrics.items()
        for metric, values in metrics_of_group.items()
        for index, party in enumerate(names[name])
    }
    received = Variables(message, {})  # a Reduce expects a message with `params` and `mutable`
    aggregate = reduce.finalize(total, received, keys.derive(key, "reduce"))
    # A pass that sends nothing would replace what the reduction measured in another pass of the round.
    if jax.tree.leaves(aggregate.pseudo_gradient):
        by_party |= {
            f"{party}/{metric}": value
            for metric, value in aggregate.metrics.items()
            for parties in names.values()
            for party in parties
        }
    return PartiesResult(
        aggregate.pseudo_gradient,
        {name: state for name, (state, _) in new_states.items()},
        {name: reports for name, (_, reports) in new_states.items()},
        by_party,
    )


def if_here(data: ClientData, compute: Callable[[], PyTree]) -> PyTree:
    """What `compute` returns; zeros, without its time, for a party that belongs to another device."""
    nothing = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute))
    return jax.lax.cond(data.bound > 0, compute, nothing)


def everybody(groups: Mapping[str, PartyGroup], examples: Mapping[str, jax.Array]) -> Selection:
    """The selection of a round: all parties, and the given examples of other data sets."""
    return Selection({PARTIES: jnp.asarray(all_clients(groups))}, dict(examples))


def init_models(
    groups: Mapping[str, PartyGroup], key: jax.Array, same_start: bool = False
) -> dict[str, Variables]:
    """Every party's own initial model: architecture -> leaves [group, ...].

    With `same_start` the parties of an architecture have the same initial values, those of the first of
    them, so that averaging their models makes sense.
    """

    def stack(group: PartyGroup) -> Variables:
        initial_model = lambda client: group.model.init(keys.derive(key, "init", client))
        clients = np.full_like(group.clients, group.clients[0]) if same_start else group.clients
        return jax.vmap(initial_model)(jnp.asarray(clients))

    return {name: stack(group) for name, group in groups.items()}


def party_predictors(
    groups: Mapping[str, PartyGroup], variables: Callable[[PyTree, str], Variables]
) -> dict[str, Predictor]:
    """One predictor per architecture, whose members are its parties.

    Args:
      groups: architecture -> its parties.
      variables: (algorithm state, architecture) -> Variables, leaves [group, ...].
    """
    names = party_names(groups)

    def predictor(name: str, model: Model) -> Predictor:
        predict = lambda values, batch: model.apply(values, batch)[0]
        clients = tuple(groups[name].clients.tolist())
        return Predictor(model, lambda state: variables(state, name), predict, names[name], clients)

    return {name: predictor(name, group.model) for name, group in groups.items()}


def _client_update(
    update: PartyUpdate,
    model: Model,
    message: PyTree,
    state: PyTree,
    data: ClientData,
    key: jax.Array,
) -> ClientResult:
    """A party's update as a ClientResult; `extra` says whether the party belongs to this device.

    `state` is (the party's state, None), of the same form as the result's (state, reports).
    """
    party_state, _ = state
    result = update(model, message, party_state, data, key)
    metrics = result.metrics
    if "finite" in metrics:
        is_sent_finite = is_finite((result.sends, result.reports))
        metrics = metrics | {"finite": metrics["finite"] & is_sent_finite}
    weight = jnp.asarray(result.weight, jnp.result_type(float))
    chex.assert_shape(weight, ())
    state_and_reports = (result.state, result.reports)
    return ClientResult(result.sends, {}, weight, state_and_reports, metrics, extra=data.size > 0)


def _prepare_here(reduce: Reduce, result: ClientResult, key: jax.Array) -> PyTree:
    """A party's part of the sum; zeros if the party belongs to another device."""
    prepared = reduce.prepare(result._replace(extra=None), key)
    return jax.tree.map(lambda leaf: jnp.where(result.extra, leaf, jnp.zeros_like(leaf)), prepared)


def _dealt_here(sizes: jax.Array, axis_name: str | None) -> jax.Array:
    """Whether each party belongs to this device, bool [parties]; dealt like streamed examples."""
    if axis_name is None:
        return jnp.ones(len(sizes), bool)
    devices, device = this_device(axis_name)
    order = dealing_order(sizes, devices)
    turn = jnp.arange(len(sizes)) % devices
    return jnp.zeros(len(sizes), bool).at[order].set(turn == device)
