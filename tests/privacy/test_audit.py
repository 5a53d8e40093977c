"""The audit in one run: its bound against enumeration, and claims that it refutes or does not.

Each canary sends a coordinate of its own at the clipping bound, and is there with probability 1/2. The
claims are those of the library dp-accounting for one Gaussian mechanism, or several.
"""

import functools
import itertools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.aggregation import ClientResult
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import Cohort
from fedcodist.core.model import Variables
from fedcodist.privacy.audit import Guesses, epsilon_lower_bound, guesses_of, p_value
from fedcodist.privacy.private_parties import private_classes, private_scores

pytestmark = pytest.mark.usefixtures("compile_quickly")
CANARIES, GUESSES, DELTA = 8192, 326, 1e-5
CLIP, NOISE = 2.0, 2.5
NOTHING = Variables({}, {})


def test_the_papers_example():
    """Appendix D: 75 of 100 guesses right are no surprise at e^epsilon = 3; p = 0.553."""
    assert p_value(Guesses(100, 100, 75), np.log(3), 0.0) == pytest.approx(0.553, abs=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-2])
def test_the_p_value_by_enumeration(delta):
    canaries, made, epsilon = 6, 4, 0.7
    q = np.exp(epsilon) / (1 + np.exp(epsilon))
    chances = dict.fromkeys(range(made + 1), 0.0)
    for draws in itertools.product((0, 1), repeat=made):
        chances[sum(draws)] += np.prod([q if draw else 1 - q for draw in draws])
    for correct in range(made + 1):
        by_chance = sum(chances[wins] for wins in range(correct, made + 1))
        below = [
            sum(chances[wins] for wins in range(correct - i, correct)) / i
            for i in range(1, correct + 1)
        ]
        expected = min(by_chance + 2 * canaries * delta * max(below, default=0), 1)
        found = p_value(Guesses(canaries, made, correct), epsilon, delta)
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_bound_grows_with_right_guesses_and_is_none_for_chance():
    bounds = [epsilon_lower_bound(Guesses(200, 100, right), 0.0) for right in (50, 70, 90, 100)]
    assert bounds[0] == 0 and np.all(np.diff(bounds) > 0.2)
    # All of r right: the bound's e^-epsilon is that of 0.05 = q^r.
    assert bounds[-1] == pytest.approx(np.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-3)
    assert epsilon_lower_bound(Guesses(200, 100, 90), 1e-3) < bounds[2]


def test_guesses_are_of_the_extreme_scores():
    scores, took_part = [3.0, -1.0, 0.1, 5.0, -2.0], [True, True, False, True, False]
    assert guesses_of(scores, took_part, 4) == Guesses(5, 4, 3)
    assert guesses_of(scores, took_part, 2) == Guesses(5, 2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: guesses_of([1.0, 2.0], [True], 2), "scores and took_part must be one number per"),
        (lambda: guesses_of([1.0, np.nan], [True, False], 2), "scores must be finite"),
        (
            lambda: guesses_of(np.ma.masked_equal([1.0, 2.0], 2), [True, False], 2),
            "scores must not be masked",
        ),
        (
            lambda: guesses_of([1.0, 2.0], np.ma.masked_equal([True, False], True), 2),
            "took_part must not be masked",
        ),
        (
            lambda: guesses_of([1.0, 2.0], ["no", "yes"], 2),
            "took_part must be bool .canaries., got <U3",
        ),
        (
            lambda: guesses_of([1.0, 2.0], [0.3, 0.9], 2),
            "took_part must be bool .canaries., got float64",
        ),
        (lambda: guesses_of([1.0, 2.0, 3.0], [True] * 3, 3), "made must be even, got 3"),
        (lambda: guesses_of([1.0, 2.0], [True] * 2, 4), "made must be at most 2, got 4"),
        (
            lambda: epsilon_lower_bound(Guesses(2, 2, 2), 1.0),
            "delta must be at least 0 and below 1, got 1",
        ),
        (
            lambda: epsilon_lower_bound(Guesses(10, 10, 12), 0.1),
            "correct must be at most 10, got 12",
        ),
        (lambda: epsilon_lower_bound(Guesses(10, 12, 5), 0.1), "made must be at most 10, got 12"),
        (lambda: epsilon_lower_bound(Guesses(2, 2, 2), 0.0, 0.0), "confidence must be above 0"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


# -------------------------------------------------------------------------- claims of our own mechanisms


def claimed(*noise_multipliers):
    """Epsilon of Gaussian mechanisms in which everybody takes part."""
    accountant = dp_accounting.pld.PLDAccountant()
    for noise_multiplier in noise_multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier))
    return accountant.get_epsilon(DELTA)


def took_part(canaries):
    return np.random.default_rng(7).random(canaries) < 0.5


def total_of(reduce, sent, canaries):
    """The sum of what canaries prepare, who send `sent(coordinate)` if they take part."""

    def client_update(message, client_state, data, key):
        canary = data.columns["canary"][data.start]
        there = data.columns["there"][data.start]
        update = jax.tree.map(lambda leaf: leaf * there, sent(canary))
        return ClientResult(update, {}, jnp.float32(1), None, {})

    places = jnp.arange(canaries, dtype=jnp.int32)
    columns = {"canary": places, "there": jnp.asarray(took_part(canaries), jnp.float32)}
    cohort = Cohort(columns, places, places, jnp.ones_like(places), capacity=1)
    run = jax.jit(
        lambda cohort: (
            for_each_client(
                client_update,
                *(reduce.prepare, None, None, cohort, jax.random.key(0), Execution("vmap", 16)),
            ).total
        )
    )
    return run(cohort)


def scores_of(canary, canaries=CANARIES, size=3.0):
    """The scores of one example with as many classes as canaries, of norm `size` times the bound."""
    return size * CLIP * jax.nn.one_hot(canary, canaries)[None]


@functools.cache
def total_of_scores(clip=CLIP):
    return total_of(private_scores(clip, 0.0), scores_of, CANARIES)


def bound_of(noise, seeds=(0,), clip=CLIP):
    """The audit's bound on what is released with this noise, once or several times."""
    reduce = private_scores(CLIP, noise)
    released = sum(
        reduce.finalize(total_of_scores(clip), NOTHING, jax.random.key(seed)).pseudo_gradient[0]
        for seed in seeds
    )
    return epsilon_lower_bound(guesses_of(released, took_part(CANARIES), GUESSES), DELTA)


def test_the_right_noise_is_not_refuted():
    assert 0.3 < bound_of(NOISE) < claimed(NOISE)


def test_half_of_the_noise_is_refuted():
    assert bound_of(NOISE / 2) > claimed(NOISE)
    assert bound_of(NOISE / 2) < claimed(NOISE / 2)


def test_a_clip_that_is_left_out_is_refuted():
    assert bound_of(NOISE, clip=100 * CLIP) > claimed(NOISE)


def test_a_pool_that_is_not_counted_is_refuted():
    """A client in four pools pays in each: the claim of one of them is wrong, that of all is right."""
    four = bound_of(NOISE, seeds=range(4))
    assert claimed(NOISE) < four < claimed(*4 * [NOISE])


@pytest.mark.slow
def test_classes_and_several_examples():
    """Messages of many rows: all of them at their bound, and counts beside vectors."""
    canaries, rows = CANARIES, 2
    member = took_part(canaries)

    def bound(reduce, total, of):
        released = reduce.finalize(total, NOTHING, jax.random.key(3)).pseudo_gradient
        return epsilon_lower_bound(guesses_of(of(released), member, GUESSES), DELTA)

    sent = lambda canary: jnp.tile(scores_of(canary), (rows, 1))
    total = total_of(private_scores(CLIP, 0.0), sent, canaries)
    in_all_rows = lambda scores: scores.sum(0)
    right, half = (bound(private_scores(CLIP, z), total, in_all_rows) for z in (NOISE, NOISE / 2))
    assert right < claimed(NOISE) < half
    # The counts are shared by all canaries, whose number is known; what is left is the vectors', and
    # these have 1 / sqrt(2) of the message's norm.
    pair = lambda canary: (scores_of(canary), jnp.ones(1))
    total = total_of(private_classes(CLIP, 0.0), pair, canaries)
    in_vectors = lambda pair: pair[0][0]
    right, third = (bound(private_classes(CLIP, z), total, in_vectors) for z in (NOISE, NOISE / 3))
    assert right < claimed(NOISE) < third
