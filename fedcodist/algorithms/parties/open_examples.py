"""The public examples whose predictions parties exchange: how many and which per round, and bytes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import batches, keys
from fedcodist.core.checks import check_integer
from fedcodist.core.communication import Communication, scores_communication
from fedcodist.core.inputs import Round
from fedcodist.core.shuffling import permuted_positions


class OpenExamples(NamedTuple):
    """The open examples, whose labels are not used.

    Attributes:
      num_public: number of examples of the data set `public`.
      open_size: examples per round, drawn anew in each. None: all, and then no indices are sent.
      inference_batch_size: examples per step while probabilities are computed.
    """

    num_public: int
    open_size: int | None = 1000
    inference_batch_size: int = 500


def checked_size(open_examples: OpenExamples) -> int:
    """How many open examples a round has.

    Raises:
      ValueError, TypeError: names the field and what is allowed.
    """
    check_integer("open_examples.inference_batch_size", open_examples.inference_batch_size, low=1)
    check_integer("open_examples.num_public", open_examples.num_public, low=1)
    if open_examples.open_size is None:
        return open_examples.num_public
    check_integer("open_examples.open_size", open_examples.open_size, low=1)
    if open_examples.open_size > open_examples.num_public:
        raise ValueError(
            f"open_examples.open_size must be at most the {open_examples.num_public} public examples, "
            f"got {open_examples.open_size}."
        )
    return open_examples.open_size


def open_communication(open_examples: OpenExamples, num_classes: int) -> Communication:
    """The bytes of a round in which parties and server exchange scores of the open examples."""
    is_drawn = open_examples.open_size is not None
    return scores_communication(checked_size(open_examples), num_classes, is_drawn)


def drawing(
    open_examples: OpenExamples,
) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """(round, key) -> the indices of the round's open examples, int32 [1, size]."""

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        indices = jnp.arange(checked_size(open_examples))
        if open_examples.open_size is not None:
            draw = keys.derive(key, "open", round)
            indices = permuted_positions(draw, indices, open_examples.num_public)
        return {PUBLIC: indices[None]}

    return select_examples


def view_of_round(
    round: Round, preprocess: batches.Preprocess
) -> tuple[dict[str, jax.Array], batches.Preprocess]:
    """The columns of a round's open examples, and their preprocessing in all passes of the round."""
    public, key = round.inputs.examples[PUBLIC], keys.derive(round.key, "view", round.index)
    columns = {name: column[public.indices[0]] for name, column in public.columns.items()}
    return batches.one_view(columns, preprocess, key)
