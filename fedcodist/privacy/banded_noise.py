"""Noise that is correlated over rounds: what one round adds to the model, later ones take back in part.

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
    """What `private` takes for its noise multiplier, for noise that is correlated over rounds.

    The noise of all rounds is C^-1 Z, one row for each round. The rows of Z are independent; they are
    what `private` draws without this. C is lower triangular, its diagonals are constant, `bands` of them
    are not 0, and no column has a norm above 1. A model is a sum of all rounds' updates, and C is the
    matrix of this kind for which these sums have the least noise, as a mean over the rounds.

    A client pays in each round in which it takes part as with independent noise of this multiplier, if
    between two of them are at least `bands` - 1 others. So a pool must have
    `poisson=PoissonCohort(cycle=bands)`, where it can be drawn in one of `bands` rounds.

    Attributes:
      noise_multiplier: z, of Z; 0 clips only.
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
    """What the server keeps of the noise, from round to round; nobody else may know it.

    Attributes:
      coefficients: float32 [bands], a column of C. A run that goes on elsewhere has the same ones.
      buffers: part of the sums -> leaves [bands - 1, ...], the latest rounds' noise of deviation 1.
    """

    coefficients: jax.Array
    buffers: dict[str, PyTree]


@functools.cache
def strategy(bands: int, rounds: int) -> np.ndarray:
    """The first `bands` entries of C's first column, float32; the others are 0. It takes seconds."""
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
    """One round's noise, of rows of Z, and the state after it.

    Args:
      draws: name -> independent draws of deviation 1; those of parts without a buffer stay as they are.
      state: before the round.
    """
    rows = {part: draws[part] for part in state.buffers}
    # Accelerators round what they multiply, and the accounting counts on C.
    with jax.default_matmul_precision("highest"):
        noise, buffers = _inverse(state.coefficients).multiply_next(rows, state.buffers)
    return {**draws, **noise}, state._replace(buffers=buffers)


def _inverse(coefficients: jax.Array) -> Any:
    """C^-1 as a matrix that is multiplied row by row."""
    from jax_privacy.matrix_factorization import toeplitz

    return toeplitz.inverse_as_streaming_matrix(coefficients)
