"""The merged gradient's lengths and directions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.pools.gradient_merging import merge_gradients

_merge = jax.jit(merge_gradients)
ALPHAS = st.floats(0, 1, width=32)
SEEDS = st.integers(0, 2**31 - 1)
SCALES = st.sampled_from([1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6])


def _random_tree(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    draw = lambda *shape: (scale * generator.normal(size=shape)).astype(np.float32)
    return {"dense": {"kernel": draw(4, 3), "bias": draw(3)}, "scale": draw()}


def _norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


def _minus(left, right):
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, left, right)


def _times(factor, tree):
    return jax.tree.map(lambda leaf: factor * np.asarray(leaf, np.float64), tree)


@settings(max_examples=100)
@given(SEEDS, ALPHAS, SCALES, SCALES)
def test_the_distillation_part_has_its_share_of_the_length(seed, alpha, scale, other_scale):
    gradient, direction = _random_tree(seed, scale), _random_tree(seed + 1, other_scale)
    merged = _merge(gradient, direction, alpha)
    length = _norm(gradient)
    rest = _minus(merged, _times(alpha, gradient))
    np.testing.assert_allclose(_norm(rest), (1 - alpha) * length, rtol=1e-4, atol=1e-6 * length)
    assert _norm(merged) <= length * (1 + 1e-5)
    # The rest points where the direction points: towards the student, not away from it.
    along = sum(
        np.sum(np.asarray(r) * np.asarray(d, np.float64))
        for r, d in zip(jax.tree.leaves(rest), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(
        along, (1 - alpha) * length * _norm(direction), rtol=1e-4, atol=1e-6 * length * other_scale
    )


@settings(max_examples=30)
@given(SEEDS, ALPHAS)
def test_the_formula(seed, alpha):
    gradient, direction = _random_tree(seed), _random_tree(seed + 1, 0.01)
    scale = _norm(gradient) / _norm(direction)
    expected = jax.tree.map(lambda g, d: alpha * g + (1 - alpha) * d * scale, gradient, direction)
    for got, want in zip(
        jax.tree.leaves(_merge(gradient, direction, alpha)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(SEEDS, ALPHAS, st.floats(1e-3, 1e3))
def test_the_length_of_the_direction_does_not_matter(seed, alpha, factor):
    gradient, direction = _random_tree(seed), _random_tree(seed + 1)
    longer = jax.tree.map(lambda leaf: (factor * leaf).astype(np.float32), direction)
    difference = _minus(_merge(gradient, direction, alpha), _merge(gradient, longer, alpha))
    assert _norm(difference) < 1e-5 * _norm(gradient)


@pytest.mark.parametrize("direction_scale", [0.0, 1e-42])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_no_direction_gives_alpha_times_the_gradient(alpha, direction_scale):
    gradient = _random_tree(0)
    merged = _merge(gradient, _random_tree(1, direction_scale), alpha)
    assert _norm(_minus(merged, _times(alpha, gradient))) < 1e-6


def test_no_gradient_gives_none():
    merged = _merge(_random_tree(0, 0.0), _random_tree(1), 0.3)
    assert _norm(merged) == 0


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_dtypes_are_kept(dtype):
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), _random_tree(0))
    merged = _merge(tree, tree, jnp.float32(0.5))
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(merged))


def test_the_norm_is_over_the_whole_tree():
    gradient = {"first": jnp.array([3.0]), "second": jnp.array([4.0])}
    direction = {"first": jnp.array([1.0]), "second": jnp.array([0.0])}
    merged = _merge(gradient, direction, 0.0)
    np.testing.assert_allclose(merged["first"], [5.0], rtol=1e-6)
    np.testing.assert_allclose(merged["second"], [0.0])
    assert float(optax.tree.norm(gradient)) == 5.0
