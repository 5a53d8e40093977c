"""Parties: clients who each own a model, which may be of any architecture. All take part always.

Their models are in the algorithm's state, stacked by architecture: there they can be evaluated,
exported and checkpointed like any model, and a first value may depend on seed and party.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce, weighted_mean
from fedcodist.core.checks import check_clients, check_integer, check_names
from fedcodist.core.communication import Communication
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.for_each_client import Execution, dealing_order, for_each_client
from fedcodist.core.inputs import ClientData, Cohort, Round, Selection
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import Preprocess
from fedcodist.core.method import FederatedAlgorithm, Predictor
from fedcodist.core.model import Model, Variables, is_finite
from fedcodist.core.padded_statistics import of_clients

PyTree = Any
PARTIES = "parties"  # the one cohort
PUBLIC = "public"  # examples that everybody has
# (the party's model, message, its state, data, key) -> PartyResult
PartyUpdate = Callable[[Model, PyTree, PyTree, ClientData, jax.Array], "PartyResult"]


class PartyGroup(NamedTuple):
    """The parties of one architecture.

    Attributes:
      model: the architecture.
      clients: int [group], the parties' indices in the federated data. Groups do not overlap; clients
        of none take no part.
    """

    model: Model
    clients: np.ndarray


class PartyResult(NamedTuple):
    """What one party returns.

    Attributes:
      state: what the party has afterwards, its model and more.
      metrics: dict of scalars; `party_metrics` makes those that every method has.
      sends: pytree that is summed over parties, times `weight`. Nobody sees one party's alone. Where
        each example has a weight of its own, it is the pair (weights * scores, weights), `weight` is 1,
        and the method divides the two.
      weight: scalar, of all that the party sends.
      reports: pytree that is kept apart for each party, such as answers to its neighbours.

    Both `sends` and `reports` leave the party, so both count as bytes up.
    """

    state: PyTree
    metrics: dict[str, jax.Array]
    sends: PyTree = None
    weight: Any = 1.0
    reports: PyTree = None


class PartiesResult(NamedTuple):
    """What all parties leave.

    Attributes:
      aggregate: what `reduce` makes of all that they sent; a weighted mean's is in `pseudo_gradient`.
      states: architecture -> what each party has afterwards, leaves [group, ...].
      reports: architecture -> what each party reported, leaves [group, ...].
      metrics: `<party>/<name>` -> scalar.
    """

    aggregate: Aggregate
    states: dict[str, PyTree]
    reports: dict[str, PyTree]
    metrics: dict[str, jax.Array]


def assemble(
    name: str,
    groups: Mapping[str, PartyGroup],
    hyper: PyTree,
    init: Callable[[jax.Array], PyTree],
    round_: Callable[..., Any],
    variables: Callable[[PyTree, str], Variables],
    communication: Mapping[str, Communication],
    select_examples: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] = lambda round, key: {},
    data_set_sizes: Mapping[str, int] = {},
    other_predictors: Mapping[str, Predictor] = {},
) -> FederatedAlgorithm:
    """Makes an algorithm of parties, who take part in every round, and a round.

    Args:
      name, hyper, init: as FederatedAlgorithm has them.
      groups: checked groups.
      round_: FederatedAlgorithm.round.
      variables: (state, architecture) -> its parties' models, leaves [group, ...].
      communication: party -> bytes of one round.
      select_examples: (round, key) -> data set -> places of a round's examples that are not clients'.
      data_set_sizes: data set -> examples that it must have.
      other_predictors: models that are no party's, such as a server's.
    """
    everyone = jnp.asarray(all_clients(groups))
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=lambda round, key: Selection({PARTIES: everyone}, select_examples(round, key)),
        round=round_,
        predictors={**party_predictors(groups, variables), **other_predictors},
        communication=communication,
        num_clients=num_clients(groups),
        data_set_sizes=data_set_sizes,
    )


def party_metrics(
    variables: Variables, num_steps: Any, num_examples: Any, **others: jax.Array
) -> dict[str, jax.Array]:
    """The metrics that every method of parties gives of a party's training.

    Args:
      variables: after training; a run warns where they are not finite.
      num_steps, num_examples: that it took and saw.
      others: losses, by name.
    """
    return {
        **others,
        "num_steps": jnp.asarray(num_steps),
        "client_examples": jnp.asarray(num_examples),
        "finite": is_finite(variables),
    }


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

    Parties of all architectures are dealt to devices together, since an architecture often has but
    one. There is one reduction for all of them at the end.

    Args:
      groups: checked groups.
      update: (model, message, state, data, key) -> PartyResult; pure. Where data.bound is 0 it should
        take no time: that party belongs to another device.
      message: what every party gets.
      states: architecture -> what each party has, leaves [group, ...].
      round: whose cohort has all parties in ascending order.
      key: of this pass; each party's is derived from it and its index.
      execution: as in `for_each_client`.
      reduce: how what parties send is summed; their weighted mean where not given. It gets a
        ClientResult whose `update` is what the party sends, and no mutable state.
    """
    reduce = weighted_mean() if reduce is None else reduce
    cohort, axis_name = round.inputs.cohorts[PARTIES], round.axis_name
    here = _dealt_here(cohort.sizes, axis_name)
    everyone = all_clients(groups)
    totals, kept, metrics = [], {}, {}
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
        with of_clients(group.clients):
            result = for_each_client(
                functools.partial(_client_update, update, group.model),
                functools.partial(_prepare_here, reduce),
                message,
                states[name],
                members,
                key,
                execution,
            )
        only_here = lambda leaf, is_here=is_here: jnp.where(
            is_here.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf)
        )
        totals.append(result.total)
        kept[name] = jax.tree.map(only_here, result.client_states)
        metrics[name] = jax.tree.map(only_here, result.metrics)
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *totals)
    total, kept, metrics = sum_over_devices((total, kept, metrics), axis_name)
    names = party_names(groups)
    by_party = {
        f"{party}/{metric}": values[index]
        for name, metrics_of_group in metrics.items()
        for metric, values in metrics_of_group.items()
        for index, party in enumerate(names[name])
    }
    received = Variables(message, {})  # a Reduce knows messages by their model
    return PartiesResult(
        reduce.finalize(total, received, keys.derive(key, "reduce")),
        {name: state for name, (state, _) in kept.items()},
        {name: reports for name, (_, reports) in kept.items()},
        by_party,
    )


def sums() -> Reduce:
    """The weighted sum of what parties send, for methods that divide by a number of their own."""

    def prepare(result, key):
        return jax.tree.map(lambda leaf: leaf * result.weight, result.update), result.weight

    def finalize(total, message, key):
        update, weight = total
        return Aggregate(update, {}, weight)

    return Reduce(prepare, finalize)


def check_groups(
    groups: Mapping[str, PartyGroup], others: Sequence[str] = ()
) -> dict[str, PartyGroup]:
    """Returns the groups with sorted clients, or raises one line that names what is wrong.

    Args:
      groups: architecture -> its parties.
      others: names of the method's models that are no party's.
    """
    if not groups:
        raise ValueError("groups must hold at least one architecture, got none.")
    check_names("groups", groups)
    checked: dict[str, PartyGroup] = {}
    owner: dict[int, str] = {}
    for name, group in groups.items():
        clients = check_clients(f"groups[{name!r}].clients", group.clients)
        for client in clients.tolist():
            if client in owner:
                raise ValueError(
                    f"groups must give each party one model, party {client} is in "
                    f"{owner[client]!r} and {name!r}."
                )
            owner[client] = name
        checked[name] = group._replace(clients=clients)
    called = {other: other for other in others}
    for name, own in party_names(checked).items():
        for party in own:
            if party in called:
                raise ValueError(
                    f"groups must have names that tell models apart, {called[party]!r} and {name!r} "
                    f"both have one called {party!r}."
                )
            called[party] = name
    return checked


def check_no_gap(groups: Mapping[str, PartyGroup]) -> int:
    """Returns how many clients there are, or raises one line unless groups have 0 to that less one."""
    count = num_clients(groups)
    given = sum(len(group.clients) for group in groups.values())
    if given != count:
        raise ValueError(
            f"groups must have clients 0 to {count - 1} without a gap, it has {given} of them."
        )
    return count


def check_widths(
    groups: Mapping[str, PartyGroup], num_classes: int, argument: str = "num_classes"
) -> None:
    """Raises one line unless every model has an output for each class of the joint label space.

    Args:
      groups: whose models.
      num_classes: how many classes there are.
      argument: what tells it, for the message.
    """
    check_integer(argument, num_classes, low=1)
    widths = {name: group.model.num_classes for name, group in groups.items()}
    if wrong := {name: width for name, width in widths.items() if width != num_classes}:
        raise ValueError(
            f"groups must have models of {argument}={num_classes} outputs, one per class of the joint "
            f"label space that all parties share, got {wrong}."
        )


def party_names(groups: Mapping[str, PartyGroup]) -> dict[str, tuple[str, ...]]:
    """Names of each architecture's parties: its own where it has one, else with the client's index."""
    return {
        name: (name,) if len(group.clients) == 1 else tuple(f"{name}_{c}" for c in group.clients)
        for name, group in groups.items()
    }


def same_for_all(
    groups: Mapping[str, PartyGroup], communication: Communication
) -> dict[str, Communication]:
    """An algorithm's `communication` where every party's is the same."""
    return {name: communication for names in party_names(groups).values() for name in names}


def all_clients(groups: Mapping[str, PartyGroup]) -> np.ndarray:
    """The indices of all parties, ascending."""
    return np.sort(np.concatenate([group.clients for group in groups.values()]))


def by_architecture(groups: Mapping[str, PartyGroup], values: jax.Array) -> dict[str, jax.Array]:
    """Values [parties, ...] in the order of clients, as architecture -> [group, ...]."""
    everyone = all_clients(groups)
    return {
        name: values[np.searchsorted(everyone, group.clients)] for name, group in groups.items()
    }


def num_clients(groups: Mapping[str, PartyGroup]) -> int:
    """One more than the largest client index."""
    return 1 + max(int(group.clients[-1]) for group in groups.values())


def everybody(groups: Mapping[str, PartyGroup], examples: Mapping[str, jax.Array]) -> Selection:
    """The selection of a round in which all parties take part, and the examples read besides."""
    return Selection({PARTIES: jnp.asarray(all_clients(groups))}, dict(examples))


def init_models(
    groups: Mapping[str, PartyGroup], key: jax.Array, same_start: bool = False
) -> dict[str, Variables]:
    """Every party's own initial model: architecture -> leaves [group, ...].

    With `same_start` the parties of an architecture share the values of the first of them, so that
    a mean of their models means something.
    """

    def stack(group):
        own = lambda client: group.model.init(keys.derive(key, "init", client))
        clients = np.full_like(group.clients, group.clients[0]) if same_start else group.clients
        return jax.vmap(own)(jnp.asarray(clients))

    return {name: stack(group) for name, group in groups.items()}


def party_predictors(
    groups: Mapping[str, PartyGroup], variables: Callable[[PyTree, str], Variables]
) -> dict[str, Predictor]:
    """One predictor per architecture, whose members are its parties.

    Args:
      groups: who owns what.
      variables: (algorithm state, architecture) -> Variables, leaves [group, ...].
    """
    names = party_names(groups)

    def predictor(name, model):
        predict = lambda values, batch: model.apply(values, batch)[0]
        return Predictor(model, lambda state: variables(state, name), predict, names[name])

    return {name: predictor(name, group.model) for name, group in groups.items()}


def stacked(groups: Mapping[str, PartyGroup], models: Mapping[str, Any]) -> dict[str, Any]:
    """Models by party, leaves [seeds, ...], as models by architecture, leaves [seeds, group, ...]."""
    return {
        name: jax.tree.map(
            lambda *leaves: np.stack(leaves, axis=1), *(models[own] for own in names)
        )
        for name, names in party_names(groups).items()
    }


def shared_examples(columns: Mapping[str, jax.Array], data: ClientData) -> ClientData:
    """Examples that all parties have, as those of the party that `data` belongs to."""
    count = next(iter(columns.values())).shape[0]
    return ClientData(
        columns=columns,
        start=jnp.zeros((), jnp.int32),
        size=jnp.where(data.size > 0, count, 0),
        bound=jnp.where(data.bound > 0, count, 0),
        capacity=count,
        ragged=data.ragged,
    )


def all_examples(columns: Mapping[str, jax.Array]) -> ClientData:
    """Examples as those of one client who has all of them, such as a server."""
    count = next(iter(columns.values())).shape[0]
    size = jnp.asarray(count, jnp.int32)
    return ClientData(columns, jnp.zeros((), jnp.int32), size, size, count, ragged=False)


def inference(
    model: Model,
    variables: Variables,
    data: ClientData,
    preprocess: Preprocess,
    batch_size: int,
    of: Callable[[Any], jax.Array] = logits_of,
) -> jax.Array:
    """What a model says in evaluation mode of all of some examples, [capacity, ...].

    Args:
      model, variables: the model.
      data: the examples.
      preprocess: as in `LocalTraining`; it gets one fixed key.
      batch_size: examples per step.
      of: outputs -> array [batch, ...]: the logits, or such as an embedding.
    """
    size = min(batch_size, data.capacity)

    def said_of(positions):
        rows = data.start + jnp.minimum(positions, data.capacity - 1)
        batch = {name: column[rows] for name, column in data.columns.items()}
        outputs, _ = model.apply(variables, preprocess(batch, jax.random.key(0), positions))
        return of(outputs)

    def add(index, values):
        positions = index * size + jnp.arange(size)
        return values.at[positions].set(said_of(positions), mode="drop")

    shape = jax.eval_shape(said_of, jnp.arange(size))
    start = jnp.zeros((data.capacity, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, -(-data.bound // size), add, start)


def without_examples(data: ClientData, keeps: jax.Array) -> ClientData:
    """The same client, without any examples where `keeps` is false: it then makes no step."""
    bound = data.bound if data.ragged else jnp.where(keeps, data.bound, 0)
    return dataclasses.replace(data, size=jnp.where(keeps, data.size, 0), bound=bound)


def _client_update(update, model, message, state, data, key) -> ClientResult:
    """A party's update as a client's, whose `extra` is whether the party is this device's."""
    result = update(model, message, state, data, key)
    weight = jnp.asarray(result.weight, jnp.result_type(float))
    chex.assert_shape(weight, ())
    kept = (result.state, result.reports)
    return ClientResult(result.sends, {}, weight, kept, result.metrics, extra=data.size > 0)


def _prepare_here(reduce: Reduce, result: ClientResult, key: jax.Array) -> PyTree:
    """What is summed of a party; zeros where another device has it."""
    prepared = reduce.prepare(result._replace(extra=None), key)
    return jax.tree.map(lambda leaf: jnp.where(result.extra, leaf, jnp.zeros_like(leaf)), prepared)


def _dealt_here(sizes: jax.Array, axis_name: str | None) -> jax.Array:
    """Whether each party is this device's, bool [parties]; as streamed examples are dealt."""
    if axis_name is None:
        return jnp.ones(len(sizes), bool)
    devices, device = this_device(axis_name)
    order = dealing_order(sizes, devices)
    turn = jnp.arange(len(sizes)) % devices
    return jnp.zeros(len(sizes), bool).at[order].set(turn == device)
