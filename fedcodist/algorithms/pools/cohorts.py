"""The draw of a round's cohort."""

import jax

from fedcodist.core import keys
from fedcodist.core.shuffling import sample_without_replacement


def draw_cohort(
    clients: jax.Array, cohort_size: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """Clients of a pool who take part in a round, int [cohort_size], in random order, none twice.

    Args:
      clients: int [pool], the pool's.
      cohort_size: at most the pool's clients.
      pool: its name; every pool has a draw of its own.
      round: from 0.
      key: the run's root key.
    """
    draw = keys.derive(key, "cohort", round, pool)
    return clients[sample_without_replacement(draw, len(clients), cohort_size)]
