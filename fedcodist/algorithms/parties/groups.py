"""Groups of parties with the same architecture: their checks, and the parties' names."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.checks import check_clients, check_integer, check_names, shown
from fedcodist.core.communication import Communication
from fedcodist.core.model import Model


class PartyGroup(NamedTuple):
    """The parties of one architecture.

    Attributes:
      model: the architecture.
      clients: int [group], the parties' indices in the federated data. Groups do not overlap. Clients
        that are in no group do not take part.
    """

    model: Model
    clients: np.ndarray


def check_groups(
    groups: Mapping[str, PartyGroup], others: Sequence[str] = ()
) -> dict[str, PartyGroup]:
    """Returns the groups with sorted clients; raises ValueError or TypeError that names `groups`.

    Args:
      groups: architecture -> its parties.
      others: names of the method's models that belong to no party.
    """
    if not groups:
        raise ValueError("groups must hold at least one architecture, got none.")
    check_names("groups", groups)
    checked: dict[str, PartyGroup] = {}
    owner: dict[int, str] = {}
    for name, group in groups.items():
        if not isinstance(group, PartyGroup):
            raise TypeError(f"groups[{name!r}] must be a PartyGroup, got {shown(group)}.")
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
    for name, parties in party_names(checked).items():
        # Results are by the names of parties, predictors by those of architectures.
        for party in sorted({name, *parties}):
            if party in called:
                raise ValueError(
                    f"groups must have names that tell models apart, {called[party]!r} and {name!r} "
                    f"both have one called {party!r}."
                )
            called[party] = name
    return checked


def check_no_gap(groups: Mapping[str, PartyGroup]) -> int:
    """Returns the number n of clients; raises ValueError unless the groups have clients 0 to n - 1."""
    count = num_clients(groups)
    num_parties = sum(len(group.clients) for group in groups.values())
    if num_parties != count:
        raise ValueError(
            f"groups must have clients 0 to {count - 1} without a gap, it has {num_parties} of them."
        )
    return count


def check_widths(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    argument: str = "num_classes",
    least: int = 2,
) -> None:
    """Raises ValueError unless every model has an output for each class of the joint label space.

    Args:
      groups: architecture -> its parties.
      num_classes: the number of classes.
      argument: the name of the argument that gives this number, for the message.
      least: the smallest number of classes. Probabilities of a single class are 1 and teach nothing,
        and with one logit both labels would count as one class.
    """
    check_integer(argument, num_classes, low=1)
    if num_classes < least:
        raise ValueError(
            f"{argument} must be at least {least}, got {num_classes}: give networks of one logit a "
            "second one."
        )
    widths = {name: group.model.num_classes for name, group in groups.items()}
    if wrong := {name: width for name, width in widths.items() if width != num_classes}:
        raise ValueError(
            f"groups must have models of {argument}={num_classes} outputs, one per class of the joint "
            f"label space that all parties share, got {wrong}."
        )


def party_names(groups: Mapping[str, PartyGroup]) -> dict[str, tuple[str, ...]]:
    """Architecture -> names of its parties: `<name>` for a single party, else `<name>_<client>`."""
    return {
        name: (name,) if len(group.clients) == 1 else tuple(f"{name}_{c}" for c in group.clients)
        for name, group in groups.items()
    }


def same_for_all(
    groups: Mapping[str, PartyGroup], communication: Communication
) -> dict[str, Communication]:
    """An algorithm's `communication` if it is the same for every party."""
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


def in_client_order(groups: Mapping[str, PartyGroup], values: Mapping[str, Any]) -> Any:
    """Trees of architecture -> [group, ...] as one tree [parties, ...], in the order of clients."""
    order = np.argsort(np.concatenate([group.clients for group in groups.values()]))
    join = lambda *leaves: jnp.concatenate(leaves)[order]
    return jax.tree.map(join, *(values[name] for name in groups))


def num_clients(groups: Mapping[str, PartyGroup]) -> int:
    """One more than the largest client index."""
    return 1 + max(int(group.clients[-1]) for group in groups.values())


def stacked(groups: Mapping[str, PartyGroup], models: Mapping[str, Any]) -> dict[str, Any]:
    """Models by party, leaves [seeds, ...], as models by architecture, leaves [seeds, group, ...]."""
    return {
        name: jax.tree.map(
            lambda *leaves: np.stack(leaves, axis=1), *(models[party] for party in names)
        )
        for name, names in party_names(groups).items()
    }
