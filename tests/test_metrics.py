"""Metrics as sums over batches, masks and groups."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.metrics import accuracy, grouped_mean, mean


def _value_statistic(outputs, batch):
    return outputs, batch["weight"]


def _examples(seed, count):
    generator = np.random.default_rng(seed)
    return (
        generator.normal(size=count).astype(np.float32),
        generator.uniform(0.1, 2, count).astype(np.float32),
        generator.integers(0, 4, count),
        (generator.uniform(size=count) < 0.7).astype(np.float32),
    )


def _over_batches(metric, values, weights, groups, mask, batch_size):
    total = metric.init()
    for first in range(0, len(values), batch_size):
        part = slice(first, first + batch_size)
        batch = {"weight": jnp.asarray(weights[part]), "group": jnp.asarray(groups[part])}
        total = metric.merge(total, metric.evaluate(jnp.asarray(values[part]), batch, mask[part]))
    return np.asarray(metric.compute(total))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([6, 12]), st.sampled_from([3, 6]))
def test_means_over_batches_are_means_over_all(seed, count, batch_size):
    values, weights, groups, mask = _examples(seed, count)
    result = _over_batches(mean(_value_statistic), values, weights, groups, mask, batch_size)
    kept = weights * mask
    expected = np.sum(values * kept) / kept.sum() if kept.sum() else np.nan
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([3, 6]))
def test_means_of_groups(seed, batch_size):
    values, weights, groups, mask = _examples(seed, 12)
    metric = grouped_mean(_value_statistic, lambda batch: batch["group"], 5)
    result = _over_batches(metric, values, weights, groups, mask, batch_size)
    assert result.shape == (5,)
    for group in range(5):
        kept = weights * mask * (groups == group)
        expected = np.sum(values * kept) / kept.sum() if kept.sum() else np.nan
        np.testing.assert_allclose(result[group], expected, rtol=1e-4, atol=1e-6)
    assert np.isnan(result[4])  # a group without examples


def test_no_examples_is_not_a_number():
    metric = mean(_value_statistic)
    assert np.isnan(metric.compute(metric.init()))


def test_accuracy_is_the_share_of_right_answers():
    logits = jnp.array([[1.0, 2.0, 0.0], [3.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    batch = {"target": jnp.array([1, 1, 2])}
    correct, weights = accuracy("target")(logits, batch)
    np.testing.assert_array_equal(correct, [1, 0, 1])
    np.testing.assert_array_equal(weights, [1, 1, 1])
    metric = mean(accuracy("target"))
    result = metric.compute(metric.evaluate(logits, batch, jnp.array([1.0, 1.0, 0.0])))
    assert float(result) == 0.5
