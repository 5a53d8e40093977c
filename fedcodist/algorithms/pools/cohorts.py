"""Draws a round's cohort: of a fixed size, or every client independently (Poisson)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.checks import check_integer
from fedcodist.core.shuffling import sample_without_replacement

_OVERFLOW = 1e-12  # probability that a round's draw exceeds the default bound on a Poisson cohort


class PoissonCohort(NamedTuple):
    """Every client of a pool takes part with the same probability, independently of the others.

    Attributes:
      most: the most clients that take part, and the number of slots that a round computes. Clients drawn
        beyond it are left out; the metric `clients_left_out` counts them. None: the least number that a
        round's draw exceeds with a probability below 1e-12.
      cycle: rounds in which every client can be drawn once; it divides the number of clients. A pool's
        i-th client can be drawn in round r (both from 0) if i and r are equal modulo `cycle`. Noise that
        is correlated over rounds needs this, see `BandedNoise`.
    """

    most: int | None = None
    cycle: int = 1

    def num_eligible(self, num_clients: int) -> int:
        """Clients of a pool who can be drawn in one round."""
        return num_clients // self.cycle

    def eligible(self, clients: jax.Array, round: jax.Array) -> jax.Array:
        """The clients of a pool, int [pool], who can be drawn in a round."""
        if self.cycle == 1:
            return clients
        return clients.reshape(-1, self.cycle)[:, round % self.cycle]

    def slots(self, num_clients: int, cohort_size: int) -> int:
        """The bound for a pool of so many clients, of whom `cohort_size` are expected."""
        if self.most is not None:
            return self.most
        from scipy import stats  # its import takes a second

        eligible = self.num_eligible(num_clients)
        drawn = stats.binom(eligible, cohort_size / eligible)
        return max(1, min(eligible, int(drawn.isf(_OVERFLOW))))

    def check_pool(self, where: str, num_clients: int, cohort_size: int) -> None:
        """Raises ValueError that names the pool if the cycle or the bound does not fit it."""
        check_integer(f"{where}.poisson.cycle", self.cycle, low=1)
        if num_clients % self.cycle:
            raise ValueError(
                f"{where}.poisson.cycle must divide the pool's {num_clients} clients, got {self.cycle}."
            )
        eligible = self.num_eligible(num_clients)
        if self.cycle == 1:
            highest = f"the pool's {num_clients} clients"
        else:
            highest = f"{eligible}, the pool's {num_clients} clients by cycle={self.cycle}"
        if cohort_size > eligible:
            raise ValueError(f"{where}.cohort_size must be at most {highest}, got {cohort_size}.")
        if self.most is None:
            return
        check_integer(f"{where}.poisson.most", self.most, low=1)
        if not cohort_size <= self.most <= eligible:
            raise ValueError(
                f"{where}.poisson.most must be between cohort_size={cohort_size} and {highest}, got "
                f"{self.most}."
            )


def draw_cohort(
    clients: jax.Array, cohort_size: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """Clients of a pool who take part in a round, int [cohort_size], none twice.

    Args:
      clients: int [pool], the pool's clients.
      cohort_size: at most the number of the pool's clients.
      pool: its name; every pool draws independently.
      round: from 0.
      key: the run's root key.
    """
    draw = keys.derive(key, "cohort", round, pool)
    return clients[sample_without_replacement(draw, len(clients), cohort_size)]


def draw_slots(
    clients: jax.Array, slots: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """The clients in the slots of a Poisson cohort, int [slots], none twice, in random order.

    The first `number_drawn` of them take part: given their number, every subset is equally likely.
    """
    drawn = draw_cohort(clients, slots, pool, round, key)
    # `sample_without_replacement` has equally likely subsets, but not equally likely orders.
    return jax.random.permutation(keys.derive(key, "slots", round, pool), drawn)


def number_drawn(
    num_clients: int, cohort_size: int, pool: str, round: jax.Array, key: jax.Array
) -> jax.Array:
    """How many clients a Poisson cohort draws, int32 scalar; it may be above the bound."""
    # Whole numbers: a float32 would draw a client of ten million several per cent too often.
    draw = jax.random.randint(
        keys.derive(key, "number", round, pool), (num_clients,), 0, num_clients
    )
    return jnp.sum(draw < cohort_size, dtype=jnp.int32)
