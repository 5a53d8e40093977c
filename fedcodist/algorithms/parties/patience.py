"""Early stopping for parties: each stops when its own model no longer improves on validation data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.party import PartyResult, PartyUpdate
from fedcodist.algorithms.parties.shared_examples import without_examples
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.inputs import ClientData, Examples
from fedcodist.core.model import Model
from fedcodist.distillation.validation import (
    ValidationData,
    check_validation_data,
    validation_accuracy,
)

PyTree = Any


class Patience(NamedTuple):
    """When a party stops. As in Keras' early stopping, it is validated in every round and stops
    `patience` rounds after the last gain of more than `min_delta`. It keeps its last model.

    Attributes:
      data: the validation data.
      patience: how many rounds without a gain are allowed.
      min_delta: the smallest gain in accuracy (a share) that counts.
      validated_on: a name of the data, for the algorithm's name. If they are the test data, the party's
        test accuracy is biased upwards.
    """

    data: ValidationData
    patience: int
    min_delta: float
    validated_on: str


def check_patience(patience: Patience) -> None:
    """Raises ValueError or TypeError, which name the field, for a patience that makes no sense."""
    check_validation_data("patience.data", patience.data)
    check_integer("patience.patience", patience.patience, low=1)
    check_number("patience.min_delta", patience.min_delta, low=0)


def stopping_early(update: PartyUpdate, patience: Patience, examples: Examples) -> PartyUpdate:
    """The update with early stopping.

    A party's state has its `best` accuracy, and `waited`, the number of rounds since then. A party that
    has stopped gets no examples, so it takes no step.

    Args:
      update: does not change `best` and `waited`; its state has the model as `variables`.
      patience: when a party stops.
      examples: the validation data of the round.
    """

    def patient_update(
        model: Model, message: PyTree, party: PyTree, data: ClientData, key: jax.Array
    ) -> PartyResult:
        goes_on = party.waited < patience.patience
        result = update(model, message, party, without_examples(data, goes_on), key)
        accuracy = jax.lax.cond(
            goes_on & (data.size > 0),
            lambda: validation_accuracy(model, result.state.variables, examples, patience.data),
            lambda: party.best,
        )
        is_better = accuracy - patience.min_delta > party.best
        state = result.state._replace(
            best=jnp.where(is_better & goes_on, accuracy, party.best),
            waited=jnp.where(goes_on, jnp.where(is_better, 0, party.waited + 1), party.waited),
        )
        return result._replace(state=state)

    return patient_update
