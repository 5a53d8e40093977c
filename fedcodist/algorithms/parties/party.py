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
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_clients, check_integer, check_names
from fedcodist.core.communication import Communication
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.for_each_client import Execution, dealing_order, for_each_client
from fedcodist.core.inputs import ClientData, Cohort, Selection
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.method import Predictor
from fedcodist.core.model import Model, Variables
from fedcodist.core.padded_statistics import of_clients

PyTree = Any
PARTIES = "parties"  # the one cohort
PUBLIC = "public"  # examples that everybody has
# (the party's model, message, what it has, data, key) -> ClientResult: `update` is what it sends,
# `client_state` what it has afterwards. `weight` is one number for all that it sends; where each
# example has its own, `update` is the pair (weights * scores, weights), `weight` is 1, and the method
# divides the sums.
PartyUpdate = Callable[[Model, PyTree, PyTree, ClientData, jax.Array], ClientResult]


class PartyGroup(NamedTuple):
    """The parties of one architecture.

    Attributes:
      model: the architecture.
      clients: int [group], the parties' indices in the federated data. Groups do not overlap; clients
        of none take no part.
    """

    model: Model
    clients: np.ndarray


class PartiesResult(NamedTuple):
    """What all parties leave.

    Attributes:
      update, weight: the weighted sum of what they sent, and the sum of weights.
      own: architecture -> what each has afterwards, leaves [group, ...].
      metrics: `<party>/<name>` -> scalar.
    """

    update: PyTree
    weight: jax.Array
    own: dict[str, PyTree]
    metrics: dict[str, jax.Array]


def for_each_party(
    groups: Mapping[str, PartyGroup],
    update: PartyUpdate,
    message: PyTree,
    own: Mapping[str, PyTree],
    cohort: Cohort,
    key: jax.Array,
    execution: Execution = Execution(),
    axis_name: str | None = None,
) -> PartiesResult:
    """Runs `update` once for every party.

    Parties of all architectures are dealt to devices together, since an architecture often has but
    one. There is one reduction for all of them at the end.

    Args:
      groups: checked groups.
      update: (model, message, own, data, key) -> ClientResult; pure. Where data.bound is 0 it should
        take no time: that party belongs to another device.
      message: what every party gets.
      own: architecture -> what each party has, its model and more, leaves [group, ...].
      cohort: all parties, in ascending order.
      key: of this pass; each party's is derived from it and its index.
      execution, axis_name: as in `for_each_client`.
    """
    here = _dealt_here(cohort.sizes, axis_name)
    everyone = all_clients(groups)
    updates, weights, after, metrics = [], [], {}, {}
    for name, group in groups.items():
        at = np.searchsorted(everyone, group.clients)
        is_here = here[at]
        members = Cohort(
            columns=cohort.columns,
            clients=cohort.clients[at],
            starts=cohort.starts[at],
            sizes=jnp.where(is_here, cohort.sizes[at], 0),
            capacity=cohort.capacity,
        )
        with of_clients(group.clients):
            result = for_each_client(
                functools.partial(_checked_update, update, group.model),
                _weighted,
                message,
                own[name],
                members,
                key,
                execution,
            )
        keep = lambda leaf, is_here=is_here: jnp.where(
            is_here.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf)
        )
        sent, weight = result.total
        updates.append(sent)
        weights.append(weight)
        after[name] = jax.tree.map(keep, result.client_states)
        metrics[name] = jax.tree.map(keep, result.metrics)
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *updates)
    total, weight, after, metrics = sum_over_devices(
        (total, sum(weights[1:], weights[0]), after, metrics), axis_name
    )
    names = party_names(groups)
    by_party = {
        f"{party}/{metric}": values[index]
        for name, each in metrics.items()
        for metric, values in each.items()
        for index, party in enumerate(names[name])
    }
    return PartiesResult(total, weight, after, by_party)


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


def inference(
    model: Model, variables: Variables, data: ClientData, preprocess: Preprocess, batch_size: int
) -> jax.Array:
    """A model's logits in evaluation mode on all of some examples, [capacity, classes]."""
    size = min(batch_size, data.capacity)

    def outputs(positions):
        rows = data.start + jnp.minimum(positions, data.capacity - 1)
        batch = {name: column[rows] for name, column in data.columns.items()}
        outputs, _ = model.apply(variables, preprocess(batch, jax.random.key(0), positions))
        return logits_of(outputs)

    def add(index, logits):
        positions = index * size + jnp.arange(size)
        return logits.at[positions].set(outputs(positions), mode="drop")

    shape = jax.eval_shape(outputs, jnp.arange(size))
    start = jnp.zeros((data.capacity, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, -(-data.bound // size), add, start)


def without_examples(data: ClientData, keeps: jax.Array) -> ClientData:
    """The same client, without any examples where `keeps` is false: it then makes no step."""
    bound = data.bound if data.ragged else jnp.where(keeps, data.bound, 0)
    return dataclasses.replace(data, size=jnp.where(keeps, data.size, 0), bound=bound)


def _checked_update(update, model, message, own, data, key):
    result = update(model, message, own, data, key)
    chex.assert_shape(result.weight, ())
    is_here = data.size > 0
    return result._replace(
        update=jax.tree.map(lambda leaf: jnp.where(is_here, leaf, 0), result.update),
        weight=jnp.where(is_here, result.weight, 0),
    )


def _weighted(result: ClientResult, key: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf * result.weight, result.update), result.weight


def _dealt_here(sizes: jax.Array, axis_name: str | None) -> jax.Array:
    """Whether each party is this device's, bool [parties]; as streamed examples are dealt."""
    if axis_name is None:
        return jnp.ones(len(sizes), bool)
    devices, device = this_device(axis_name)
    order = dealing_order(sizes, devices)
    turn = jnp.arange(len(sizes)) % devices
    return jnp.zeros(len(sizes), bool).at[order].set(turn == device)
