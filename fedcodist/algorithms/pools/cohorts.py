"""The draw of a round's cohort: of a fixed size, or every client on its own (Poisson)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from scipy import stats

from fedcodist.core import keys
from fedcodist.core.shuffling import sample_without_replacement

_OVERFLOW = 1e-12  # of a round, where the bound on a Poisson cohort is chosen


class PoissonCohort(NamedTuple):
    """Every client of a pool takes part with the same probability, whatever the others do.

    Attributes:
      most: clients that take part at most; those drawn beyond it are left out, which the metric
        `clients_left_out` counts. A round computes as many slots. Where None it is the least number that
        a round's draw exceeds with a probability below 1e-12.
    """

    most: int | None = None

    def slots(self, num_clients: int, cohort_size: int) -> int:
        """The bound for a pool of so many clients, of whom `cohort_size` are expected."""
        if self.most is not None:
            return self.most
        drawn = stats.binom(num_clients, cohort_size / num_clients)
        return max(1, min(num_clients, int(drawn.isf(_OVERFLOW))))


def draw_cohort(
    clients: jax.Array, cohort_size: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """Clients of a pool who take part in a round, int [cohort_size], none twice.

    Args:
      clients: int [pool], the pool's.
      cohort_size: at most the pool's clients.
      pool: its name; every pool has a draw of its own.
      round: from 0.
      key: the run's root key.
    """
    draw = keys.derive(key, "cohort", round, pool)
    return clients[sample_without_replacement(draw, len(clients), cohort_size)]


def draw_slots(
    clients: jax.Array, slots: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """The slots of a Poisson cohort, int [slots], none twice, in random order.

    The first `number_drawn` of them take part: given their number, every subset is equally likely.
    """
    drawn = draw_cohort(clients, slots, pool, round, key)
    # `sample_without_replacement` has equally likely subsets, but not equally likely orders.
    return jax.random.permutation(keys.derive(key, "slots", round, pool), drawn)


def number_drawn(
    num_clients: int, cohort_size: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """How many clients a Poisson cohort draws, int32 scalar; it may be above the bound."""
    draw = jax.random.uniform(keys.derive(key, "number", round, pool), (num_clients,))
    return jnp.sum(draw * num_clients < cohort_size, dtype=jnp.int32)
