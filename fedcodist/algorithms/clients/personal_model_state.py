"""A client state that holds a model only for predictions; local training does not read it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Model, Variables, variable_shapes


class PersonalModelState(NamedTuple):
    """The client state.

    Attributes:
      model: the client's model; zeros before its first participation.
      has_started: bool, whether the client has taken part.
    """

    model: Variables
    has_started: Any


def no_personal_model(model: Model) -> PersonalModelState:
    """A client's state before its first participation."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), variable_shapes(model))
    return PersonalModelState(zeros, np.asarray(False))


def with_personal_model(variables: Variables) -> PersonalModelState:
    """A client's state after a participation."""
    return PersonalModelState(variables, jnp.asarray(True))


def personal_or_server_model(method: FederatedMethod) -> PersonalModel:
    """The model in the client state, or the server's model if the client never took part."""

    def variables(server: Any, client_state: PersonalModelState) -> Variables:
        return jax.lax.cond(
            client_state.has_started, lambda: client_state.model, lambda: method.variables(server)
        )

    return PersonalModel(method.model, variables)
