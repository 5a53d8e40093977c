"""Adaptive clipping: the bound follows a quantile of the clients' norms.

"Differentially Private Learning with Adaptive Clipping" (Andrew, Thakkar, McMahan, Ramaswamy, 2021).
https://arxiv.org/abs/1905.03871
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_number


class AdaptiveClip(NamedTuple):
    """How the bound changes. The initial bound is `private`'s `clip`.

    Attributes:
      quantile: gamma, the target for the share of clients whose updates are within the bound.
      learning_rate: eta, of the geometric steps.
      count_deviation: sigma_b, the standard deviation of the noise on the number of clients within the
        bound; in the paper a twentieth of the cohort. It must be above half of the noise multiplier,
        since this number is part of the same privacy budget.
    """

    quantile: Any = 0.5
    learning_rate: Any = 0.2
    count_deviation: float = 10.0

    def check(self, name: str) -> None:
        """Raises ValueError that names the field which is not allowed."""
        check_number(f"{name}.quantile", self.quantile, low=0, high=1)
        check_number(f"{name}.learning_rate", self.learning_rate, low=0)
        check_number(f"{name}.count_deviation", self.count_deviation, above=0)


def remaining_multiplier(noise_multiplier: float, count_deviation: float) -> float:
    """The multiplier of all other sums, so that together with the noised count they cost as given.

    Theorem 1 of the paper: z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2). Clients send 1/2 or -1/2, so one
    client changes the count by 1/2.

    Raises:
      ValueError: the count alone costs more than the budget.
    """
    if noise_multiplier == 0:
        return 0.0
    left = noise_multiplier**-2 - (2 * count_deviation) ** -2
    if left <= 0:
        raise ValueError(
            f"adaptive.count_deviation must be above half of noise_multiplier={noise_multiplier:g}, got "
            f"{count_deviation:g}."
        )
    return left**-0.5


def moved(clip: jax.Array, share_within: jax.Array, adaptive: AdaptiveClip) -> jax.Array:
    """The next bound: C exp(-eta (b - gamma)), b the noised share of clients within the bound."""
    distance = share_within - adaptive.quantile
    return clip * jnp.exp(-adaptive.learning_rate * distance)
