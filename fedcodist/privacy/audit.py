"""A privacy audit in one run: guesses about canaries give a lower bound on epsilon.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023,
https://arxiv.org/abs/2305.08846.
"""

from typing import Any, NamedTuple

import numpy as np

from fedcodist.core.checks import check_integer, check_not_masked, check_number

HIGHEST_EPSILON = 50.0  # e^-50 is negligible beside 1 in float64


class Guesses(NamedTuple):
    """How well an auditor guessed which canaries took part.

    Attributes:
      canaries: their number; each took part with probability 1/2.
      made: the number of guesses. There are none about the other canaries.
      correct: the number of correct guesses.
    """

    canaries: int
    made: int
    correct: int


def guesses_of(scores: Any, took_part: Any, made: int) -> Guesses:
    """Guesses that canaries with the highest scores took part, and those with the lowest did not.

    A canary is a client with a message unlike all others, such as one that sends a coordinate of its own
    at the clipping bound. Its score is computed from the released sum, such as the sum's value at this
    coordinate.

    Args:
      scores: floats [canaries].
      took_part: bool [canaries], drawn with probability 1/2 each, independently.
      made: the number of guesses, an even number; half of them are of each kind. It must be chosen
        before the scores are known.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_not_masked("scores", scores)
    check_not_masked("took_part", took_part)
    scores, took_part = np.asarray(scores, np.float64), np.asarray(took_part)
    if took_part.dtype != bool:
        raise TypeError(f"took_part must be bool [canaries], got {took_part.dtype}.")
    if scores.ndim != 1 or scores.shape != took_part.shape:
        raise ValueError(
            "scores and took_part must be one number per canary, got shapes "
            f"{list(scores.shape)} and {list(took_part.shape)}."
        )
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite.")
    check_integer("made", made, low=2, high=len(scores))
    if made % 2:
        raise ValueError(f"made must be even, got {made}.")
    order = np.argsort(scores, kind="stable")
    lowest, highest = order[: made // 2], order[-(made // 2) :]
    correct = np.sum(~took_part[lowest]) + np.sum(took_part[highest])
    return Guesses(len(scores), made, int(correct))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """The largest probability of at least this many correct guesses under (epsilon, delta)-privacy.

    It is the probability of at least v successes in r draws with probability e^epsilon /
    (1 + e^epsilon), plus 2 m delta max_i P[v - i <= successes < v] / i. Here m is the number of
    canaries, r of guesses and v of correct guesses.
    """
    from scipy import stats

    canaries, made, correct = guesses
    draws = stats.binom(made, 1 / (1 + np.exp(-epsilon)))
    by_chance = draws.sf(correct - 1)
    just_below = np.cumsum(draws.pmf(np.arange(correct - 1, -1, -1)))
    steepest = np.max(just_below / np.arange(1, correct + 1), initial=0.0)
    return float(min(by_chance + 2 * canaries * delta * steepest, 1.0))


def epsilon_lower_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that the guesses refute at this confidence; 0 if none.

    A claimed epsilon below this bound, at this delta, is wrong (or the run was a rare event). Causes may
    be too little noise, a missing clip, or a sum that was not counted. A bound below the claim proves
    nothing.

    Args:
      guesses: as returned by `guesses_of`.
      delta: of the claim, at least 0 and below 1.
      confidence: above 0 and below 1.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_integer("guesses.correct", guesses.correct, low=0, high=guesses.made)
    check_integer("guesses.made", guesses.made, low=0, high=guesses.canaries)
    check_number("delta", delta, low=0, below=1)
    check_number("confidence", confidence, above=0, below=1)
    is_refuted = lambda epsilon: p_value(guesses, epsilon, delta) < 1 - confidence
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, HIGHEST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
