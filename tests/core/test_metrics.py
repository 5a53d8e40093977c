"""Metrics as sums over batches, masks and groups."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_score, recall_score

from fedcodist.core.metrics import accuracy, f_score, precision, recall
from fedcodist.run.metric_sums import added, grouped_mean, mean


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
        total = added(total, metric.evaluate(jnp.asarray(values[part]), batch, mask[part]))
    return np.asarray(metric.compute(total))


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([6, 12]), st.sampled_from([3, 6]))
def test_means_over_batches_are_means_over_all(seed, count, batch_size):
    values, weights, groups, mask = _examples(seed, count)
    result = _over_batches(mean(_value_statistic), values, weights, groups, mask, batch_size)
    kept = weights * mask
    expected = np.sum(values * kept) / kept.sum() if kept.sum() else np.nan
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=20)
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


def test_a_value_without_weight_may_be_not_a_number():
    """Such as a ratio of an example where it is undefined, or of padding."""
    values, weights = np.array([np.nan, 1.0, 3.0, np.inf]), np.array([0.0, 1.0, 1.0, 1.0])
    mask, groups = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 1, 1])
    total = _over_batches(mean(_value_statistic), values, weights, groups, mask, 4)
    by_group = grouped_mean(_value_statistic, lambda batch: batch["group"], 2)
    assert total == 2
    assert _over_batches(by_group, values, weights, groups, mask, 4).tolist() == [1, 3]


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


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([3, 6, 12]), st.floats(0, 1), st.floats(0, 1))
def test_precision_recall_and_f_are_scikit_learns(seed, batch_size, share, predicted_share):
    """Over batches and a mask, of examples of three classes."""
    draw = np.random.default_rng(seed)
    label = np.where(draw.uniform(size=12) < share, 1, draw.choice([0, 2], 12))
    predicted = np.where(draw.uniform(size=12) < predicted_share, 1, draw.choice([0, 2], 12))
    mask = (draw.uniform(size=12) < 0.8).astype(np.float32)
    logits = np.eye(3, dtype=np.float32)[predicted] + draw.uniform(size=(12, 1))
    for statistic, independent in (
        (precision(), precision_score),
        (recall(), recall_score),
        (f_score(), f1_score),
    ):
        metric = mean(statistic)
        total = metric.init()
        for first in range(0, 12, batch_size):
            part = slice(first, first + batch_size)
            batch = {"label": jnp.asarray(label[part])}
            total = added(total, metric.evaluate(logits[part], batch, mask[part]))
        expected = independent(
            label[mask > 0], predicted[mask > 0], labels=[1], average="macro", zero_division=np.nan
        )
        np.testing.assert_allclose(metric.compute(total), expected, rtol=1e-6)
