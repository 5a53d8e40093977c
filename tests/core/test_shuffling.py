"""Random orders are permutations, random subsets are subsets, and both are uniform."""

import functools
import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedcodist.core.shuffling import (
    permuted_positions,
    sample_without_replacement,
    stream_positions,
)

LARGEST = 300
SEEDS = st.integers(0, 2**31 - 1)


@jax.jit
def _whole_permutation(seed, size, epoch):
    return permuted_positions(jax.random.key(seed), jnp.arange(LARGEST), size, epoch)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, LARGEST), st.integers(0, 10_000))
def test_every_position_goes_to_another_place(seed, size, epoch):
    places = np.asarray(_whole_permutation(seed, size, epoch))
    assert sorted(places[:size]) == list(range(size))
    # Positions beyond the end wrap around.
    np.testing.assert_array_equal(places, places[np.arange(LARGEST) % size])


@pytest.mark.parametrize("size", range(1, 18))
def test_small_sizes_are_permuted_in_every_epoch(size):
    for epoch in range(5):
        places = np.asarray(_whole_permutation(0, size, epoch))[:size]
        assert sorted(places) == list(range(size))


@settings(max_examples=20)
@given(SEEDS, st.integers(30, LARGEST), st.integers(0, 1000))
def test_epochs_and_keys_have_different_orders(seed, size, epoch):
    order = np.asarray(_whole_permutation(seed, size, epoch))[:size]
    assert np.any(order != np.asarray(_whole_permutation(seed, size, epoch + 1))[:size])
    assert np.any(order != np.asarray(_whole_permutation(seed ^ 1, size, epoch))[:size])


def test_a_part_of_a_permutation_needs_no_whole():
    key = jax.random.key(3)
    some = permuted_positions(key, jnp.array([0, 99_999_999, 12_345]), 100_000_000)
    assert some.dtype == jnp.int32
    assert len(set(some.tolist())) == 3
    assert all(0 <= place < 100_000_000 for place in some.tolist())


def test_sizes_and_epochs_broadcast():
    key = jax.random.key(5)
    epochs = jnp.arange(3)[:, None]
    together = permuted_positions(key, jnp.broadcast_to(jnp.arange(7), (3, 7)), 7, epochs)
    for epoch in range(3):
        np.testing.assert_array_equal(together[epoch], _whole_permutation(5, 7, epoch)[:7])


@pytest.mark.parametrize("by", ["key", "epoch"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_are_equally_likely(size, by):
    draws = 400 * math.factorial(size)
    orders = np.asarray(_many_orders(by, size, draws))
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == math.factorial(size)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("by", ["key", "epoch"])
@pytest.mark.parametrize("size", [5, 9, 20])
def test_every_position_goes_anywhere_equally_often(size, by):
    orders = np.asarray(_many_orders(by, size, 200 * size))
    for position in range(size):
        counts = np.bincount(orders[:, position], minlength=size)
        assert stats.chisquare(counts).pvalue > 1e-5, position


@pytest.mark.parametrize("by", ["key", "epoch"])
@pytest.mark.parametrize(("size", "tolerance"), [(6, 0.06), (12, 0.02)])
def test_neighbours_go_to_nearly_independent_places(size, tolerance, by):
    """Total variation of the pair (place of 0, place of 1) from uniform over ordered pairs.

    A Feistel network of few bits is not quite uniform: one pair in sixteen of 5 to 8 elements keeps
    its difference. Single places of 5 to 7 elements are uniform to about 1 %.
    """
    draws = 200 * size * (size - 1)
    orders = np.asarray(_many_orders(by, size, draws))
    pairs = Counter(map(tuple, orders[:, :2].tolist()))
    shares = np.array(list(pairs.values())) / draws
    assert len(pairs) == size * (size - 1)
    noise = np.sqrt(len(pairs) / (2 * np.pi * draws))
    assert np.sum(np.abs(shares - 1 / len(pairs))) / 2 < tolerance + 1.3 * noise


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _many_orders(by, size, draws):
    numbers = jnp.arange(draws)
    if by == "epoch":
        return permuted_positions(
            jax.random.key(11), jnp.arange(size)[None], size, numbers[:, None]
        )
    permute = lambda key: permuted_positions(key, jnp.arange(size), size)
    return jax.vmap(permute)(jax.random.split(jax.random.key(11), draws))


@functools.partial(jax.jit, static_argnums=(2,))
def _stream_part(start, size, count):
    return stream_positions(jax.random.key(2), start, count, size)


@settings(max_examples=30)
@given(st.integers(1, 25), st.integers(0, 3))
def test_a_stream_covers_every_row_once_per_pass(size, passes):
    whole = np.asarray(_stream_part(0, size, 100))
    rows = whole[passes * size : (passes + 1) * size]
    assert sorted(rows) == list(range(size))
    later = np.asarray(_stream_part(passes * size, size, 100))
    np.testing.assert_array_equal(later[:size], rows)


@settings(max_examples=20)
@given(st.integers(0, 60), st.integers(1, 40))
def test_a_stream_goes_on_where_it_stopped(start, size):
    whole = np.asarray(_stream_part(0, size, 100))
    np.testing.assert_array_equal(_stream_part(start, size, 40), whole[start : start + 40])


def test_passes_of_a_stream_differ():
    passes = np.asarray(_stream_part(0, 25, 100)).reshape(4, 25)
    assert len(set(map(tuple, passes.tolist()))) == 4


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([(1, 1), (5, 5), (20, 3), (1000, 20), (2**31 - 1, 20)]))
def test_a_sample_is_distinct_and_inside(seed, sizes):
    population, count = sizes
    sample = np.asarray(_sample(seed, population, count))
    assert sample.shape == (count,)
    assert len(set(sample.tolist())) == count
    assert sample.min() >= 0
    assert sample.max() < population


@pytest.mark.parametrize(("population", "count"), [(6, 3), (5, 1), (5, 4)])
def test_all_subsets_are_equally_likely(population, count):
    subsets = math.comb(population, count)
    keys = jax.random.split(jax.random.key(0), 400 * subsets)
    samples = jax.jit(jax.vmap(lambda key: sample_without_replacement(key, population, count)))(
        keys
    )
    counts = Counter(tuple(sorted(sample)) for sample in samples.tolist())
    assert len(counts) == subsets
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_a_cohort_of_a_million_clients_is_drawn_at_once():
    _sample(0, 1_000_000, 20).block_until_ready()
    seconds = []
    for seed in range(50):
        start = time.perf_counter()
        _sample(seed, 1_000_000, 20).block_until_ready()
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 2e-3


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sample(seed, population, count):
    return sample_without_replacement(jax.random.key(seed), population, count)


@pytest.mark.parametrize("count", [0, 6, -1])
def test_a_sample_larger_than_its_population(count):
    with pytest.raises(ValueError, match=rf"between 1 and population=5, got {count}"):
        sample_without_replacement(jax.random.key(0), 5, count)
