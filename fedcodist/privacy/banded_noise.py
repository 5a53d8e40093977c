"""Noise that is correlated over rounds: later rounds partly cancel the noise of earlier ones.

DP-FTRL with banded matrices, Choquette-Choo et al., 2023, (Amplified) Banded Matrix Factorization,
https://arxiv.org/abs/2306.08153. The library jax-privacy finds the matrix and multiplies by its inverse.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.extras import check_installed

PyTree = Any


class BandedNoise(NamedTuple):
    """The argument `noise_multiplier` of `private` for noise that is correlated over rounds.

    The noise of all rounds is C^-1 Z, with one row per round. The rows of Z are independent, like the
    noise that `private` draws otherwise. C is lower triangular with constant diagonals. `bands` of these
    are not 0, and no column has a norm above 1. A model is the sum of all updates so far. Among such
    matrices, C is the one with the least noise in these sums, on average over the rounds.

    Each participation of a client costs as much as with independent noise of this multiplier, if there
    are at least `bands` - 1 rounds between two participations. So a pool must have
    `poisson=PoissonCohort(cycle=bands)`: a client can then be drawn in one of `bands` rounds.

    Attributes:
      noise_multiplier: z, of Z; 0 only clips.
      bands: 1 is independent noise.
      rounds: of the whole training.
    """

    noise_multiplier: float
    bands: int
    rounds: int

    def check(self, name: str) -> None:
        """Raises ValueError, TypeError or ImportError that names the field which is not allowed."""
        check_number(f"{name}.noise_multiplier", self.noise_multiplier, low=0)
        check_integer(f"{name}.bands", self.bands, low=1)
        check_integer(f"{name}.rounds", self.rounds, low=1)
        if self.bands > self.rounds:
            raise ValueError(
                f"{name}.bands must be at most rounds={self.rounds}, got {self.bands}."
            )
        check_installed("noise that is correlated over rounds", "jax_privacy", "privacy")


class NoiseState(NamedTuple):
    """The state of the noise, which only the server may know.

    Attributes:
      coefficients: float32 [bands], a column of C. They are in the state so that a run that is resumed
        on another machine uses the same ones.
      buffers: part of the sums -> leaves [bands - 1, ...], the latest rounds' noise with deviation 1.
    """

    coefficients: jax.Array
    buffers: dict[str, PyTree]


@functools.cache
def strategy(bands: int, rounds: int) -> np.ndarray:
    """The first `bands` entries of C's first column, float32; the others are 0. This takes seconds."""
    if bands == 1:
        return np.ones(1, np.float32)
    from jax_privacy.matrix_factorization import toeplitz

    with jax.ensure_compile_time_eval():  # a server's `init` is traced
        return np.asarray(toeplitz.optimize_banded_toeplitz(rounds, bands), np.float32)


def first_noise_state(noise: BandedNoise, parts: Mapping[str, PyTree]) -> NoiseState:
    """The state before the first round.

    Args:
      noise: bands and rounds.
      parts: name -> arrays of the shapes of a sum whose noise is correlated.
    """
    coefficients = jnp.asarray(strategy(noise.bands, noise.rounds))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), dict(parts))
    return NoiseState(coefficients, _inverse(coefficients).init_multiply(shapes))


def correlated(
    draws: Mapping[str, PyTree], state: NoiseState
) -> tuple[dict[str, PyTree], NoiseState]:
    """One round's correlated noise, and the state after the round.

    Args:
      draws: name -> independent draws with deviation 1; parts without a buffer are returned unchanged.
      state: before the round.
    """
    rows = {part: draws[part] for part in state.buffers}
    # Accelerators would round the factors, but the accounting assumes exact products with C^-1.
    with jax.default_matmul_precision("highest"):
        noise, buffers = _inverse(state.coefficients).multiply_next(rows, state.buffers)
    return {**draws, **noise}, state._replace(buffers=buffers)


def _inverse(coefficients: jax.Array) -> Any:
    """C^-1 as a matrix that is multiplied row by row."""
    from jax_privacy.matrix_factorization import toeplitz

    return toeplitz.inverse_as_streaming_matrix(coefficients)
