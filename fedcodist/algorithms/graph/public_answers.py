"""The public examples whose predictions clients of a graph exchange: which, when, and their bytes."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import PartyGroup, party_names
from fedcodist.core import keys
from fedcodist.core.checks import LARGEST_BATCH, check_integer
from fedcodist.core.communication import Communication
from fedcodist.core.shuffling import stream_positions


class PublicAnswers(NamedTuple):
    """On which public examples clients send predictions, and when.

    Attributes:
      num_public: number of examples of the data set `public`.
      examples: public examples per codistillation, from an endless reshuffled stream.
      period: rounds from one codistillation to the next.
      inference_batch_size: examples per step when clients compute predictions.
    """

    num_public: int
    examples: int = 4096
    period: int = 1
    inference_batch_size: int = 500


def check_answers(answers: PublicAnswers) -> None:
    """Raises ValueError or TypeError that names the field which is not allowed."""
    for field in ("num_public", "period", "inference_batch_size"):
        check_integer(f"answers.{field}", getattr(answers, field), low=1)
    check_integer("answers.examples", answers.examples, low=1, high=LARGEST_BATCH)


def answered_indices(answers: PublicAnswers, round: jax.Array, key: jax.Array) -> jax.Array:
    """Indices of a round's public examples, int32 [examples]; -1 in rounds without codistillation."""
    first = jnp.asarray(round // answers.period, jnp.uint32) * answers.examples
    draw = keys.derive(key, "public")
    return jax.lax.cond(
        is_due(answers, round),
        lambda: stream_positions(draw, first, answers.examples, answers.num_public),
        lambda: jnp.full(answers.examples, -1, jnp.int32),
    )


def is_due(answers: PublicAnswers, round: jax.Array) -> jax.Array:
    """Whether clients teach each other at the end of a round: rounds p, 2 p, ... counted from 1."""
    return (round + 1) % answers.period == 0


def answers_communication(
    groups: Mapping[str, PartyGroup],
    edges: np.ndarray,
    num_rounds: int,
    answers: PublicAnswers,
    num_classes: int,
) -> dict[str, Communication]:
    """Bytes of predictions on the edges in rounds with codistillation, and of the examples' indices.

    A mean over the run's rounds, rounded up.
    """
    times, number = num_rounds // answers.period, np.dtype(np.float32).itemsize
    of_answers, indices = answers.examples * num_classes * number, answers.examples * number * times
    teaching = edges * times
    if edges.ndim == 3:
        teaching = edges[answers.period - 1 :: answers.period].sum(axis=0)
    num_received, num_sent = (teaching.sum(axis=axis) for axis in (1, 0))

    def of_client(client: int) -> Communication:
        down = int(num_received[client] * of_answers + indices)
        up = int(num_sent[client] * of_answers)
        return Communication(down=-(-down // num_rounds), up=-(-up // num_rounds))

    return {
        party: of_client(client)
        for name, names in party_names(groups).items()
        for client, party in zip(groups[name].clients, names, strict=True)
    }
