"""Heads that parties with different networks share: checks, and setting the same head in all models.

For methods whose parties have models made by `fedcodist.models.headed`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import PartyGroup, all_clients
from fedcodist.core.aggregation import as_stored
from fedcodist.core.communication import tree_bytes
from fedcodist.core.model import Variables, variable_shapes
from fedcodist.models.headed import HEAD, check_heads, split_head, with_head

PyTree = Any


def check_shared_heads(groups: Mapping[str, PartyGroup]) -> tuple[int, int]:
    """Returns (width, classes) of the parties' heads; raises ValueError if heads differ in shape."""
    return check_heads("groups", {name: group.model for name, group in groups.items()})


def head_bytes(groups: Mapping[str, PartyGroup]) -> int:
    """The size of one head."""
    model = next(iter(groups.values())).model
    return tree_bytes(split_head(variable_shapes(model).params)[1])


def with_same_head(models: Mapping[str, Variables], head: PyTree) -> dict[str, Variables]:
    """All parties' models with the same head.

    Args:
      models: architecture -> its parties' models, leaves [group, ...].
      head: the shared head's parameters, leaves without the group axis.
    """

    def for_all(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.broadcast_to(as_stored(new, old), old.shape)

    return {
        name: variables._replace(
            params=with_head(variables.params, jax.tree.map(for_all, head, variables.params[HEAD]))
        )
        for name, variables in models.items()
    }


def with_first_head(
    groups: Mapping[str, PartyGroup], models: Mapping[str, Variables]
) -> dict[str, Variables]:
    """All parties' models with the head of the party with the smallest index, before the first round."""
    first = all_clients(groups)[0]
    name = next(name for name, group in groups.items() if first in group.clients)
    head = jax.tree.map(lambda leaf: leaf[0], models[name].params[HEAD])
    return with_same_head(models, head)
