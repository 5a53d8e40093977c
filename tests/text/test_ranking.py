"""AUC, MRR and nDCG of impressions against scikit-learn and plain loops; padding and ties."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score

from fedcodist.run.metric_sums import mean
from fedcodist.text.ranking import auc, ndcg, ranking_loss, ranking_metrics, reciprocal_rank

pytestmark = pytest.mark.usefixtures("compile_quickly")
WIDTH = 12  # one shape, compiled once


@st.composite
def impressions(draw):
    """(scores, labels) of a few impressions of 2 to WIDTH candidates, with ties, without padding."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(2, WIDTH))
        labels = draw(
            st.lists(st.integers(0, 1), min_size=count, max_size=count).filter(
                lambda each: 0 < sum(each) < len(each)
            )
        )
        some = st.floats(-9, 9, width=32, allow_subnormal=False)  # XLA takes subnormal ones for 0
        with_ties = st.sampled_from([-2.0, 0.0, 0.25, 0.5])
        scores = draw(st.lists(some | with_ties, min_size=count, max_size=count))
        found.append((np.float32(scores), np.array(labels)))
    return found


def padded(found, draw):
    """Candidates at random places among WIDTH, in their order; impressions are padded to 4."""
    scores = np.float32(draw.normal(size=(4, WIDTH)) * 10)  # padding may score high
    labels = np.full((4, WIDTH), -1)
    for row, (own_scores, own_labels) in enumerate(found):
        places = np.sort(draw.permutation(WIDTH)[: len(own_labels)])
        scores[row, places], labels[row, places] = own_scores, own_labels
    return jnp.asarray(scores), jnp.asarray(labels)


def mrr_loop(scores, labels):
    """Each click's 1 / rank, averaged over the ranks that candidates of its score may have."""
    scores, total = scores.astype(np.float64), 0.0
    for score, label in zip(scores, labels, strict=True):
        if label:
            better = sum(other > score for other in scores)
            alike = sum(other == score for other in scores)
            total += sum(1 / rank for rank in range(better + 1, better + alike + 1)) / alike
    return total / labels.sum()


@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("auc", lambda scores, labels: roc_auc_score(labels, scores)),
        ("mrr", mrr_loop),
        ("ndcg_5", lambda scores, labels: ndcg_score([labels], [scores], k=5)),
        ("ndcg_10", lambda scores, labels: ndcg_score([labels], [scores], k=10)),
    ],
)
@settings(max_examples=40)
@given(found=impressions(), seed=st.integers(0, 99))
def test_metrics_are_the_independent_ones(name, independent, found, seed):
    scores, labels = padded(found, np.random.default_rng(seed))
    values, weights = STATISTICS[name](scores, {"label": labels})
    expected = [independent(*each) for each in found]
    assert weights.tolist() == [1] * len(found) + [0] * (4 - len(found))
    np.testing.assert_allclose(values[: len(found)], expected, rtol=2e-6, atol=1e-6)
    assert np.isfinite(values).all()


STATISTICS = {name: jax.jit(statistic) for name, statistic in ranking_metrics().items()}


@settings(max_examples=20)
@given(found=impressions(), seed=st.integers(0, 99))
def test_the_order_of_candidates_does_not_matter(found, seed):
    draw = np.random.default_rng(seed)
    scores, labels = padded(found, draw)
    order = draw.permutation(WIDTH)
    for statistic in STATISTICS.values():
        there = statistic(scores, {"label": labels})
        back = statistic(scores[:, order], {"label": labels[:, order]})
        np.testing.assert_allclose(there, back, rtol=1e-6)


def test_metrics_of_three_impressions_are_those_by_hand():
    scores = jnp.array([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 0.0, 9.0], [0.0, 2.0, 2.0, 2.0]])
    labels = jnp.array([[0, 1, 0, 1], [1, 0, 0, -1], [0, 1, 0, 1]])  # padding may score high
    of_place = 1 / np.log2([2, 3, 4, 5])
    gains = [of_place[[1, 3]].sum(), of_place[:2].mean(), 2 * of_place[:3].mean()]
    by_hand = {
        "auc": [1 / 4, 3 / 4, 3 / 4],
        "mrr": [(1 / 2 + 1 / 4) / 2, (1 + 1 / 2) / 2, (1 + 1 / 2 + 1 / 3) / 3],
        "ndcg_5": np.array(gains) / [of_place[:2].sum(), 1, of_place[:2].sum()],
    }
    metrics = ranking_metrics()
    measure = lambda *both: {name: metrics[name](both[0], {"label": both[1]}) for name in by_hand}
    for name, (values, weights) in jax.jit(measure)(scores, labels).items():
        np.testing.assert_allclose(values, by_hand[name], rtol=1e-6)
        assert weights.tolist() == [1, 1, 1]


def test_equal_scores_are_the_mean_over_all_orders():
    labels = np.array([1, 0, 0, 1, 0])
    ranked = -jnp.arange(5.0)[None]
    orders = [jnp.asarray([order]) for order in set(itertools.permutations(labels.tolist()))]
    for metric in (auc, reciprocal_rank, lambda *both: ndcg(*both, k=2)):
        over_orders = np.mean([metric(ranked, order)[0] for order in orders])
        alike = metric(jnp.zeros((1, 5)), jnp.asarray(labels)[None])[0]
        np.testing.assert_allclose(alike, over_orders, rtol=1e-6)


def test_a_score_of_minus_infinity_shares_no_place_with_padding():
    scores, labels = jnp.array([[-jnp.inf, 1.0, 0.0, 5.0]]), jnp.array([[1, 0, 0, -1]])
    assert float(auc(scores, labels)[0]) == 0
    assert float(reciprocal_rank(scores, labels)[0]) == pytest.approx(1 / 3)


def test_metrics_of_a_nan_score_are_nan_but_for_padding():
    nan = jnp.nan
    scores = jnp.array([[nan, 2.0, 1.0], [nan, nan, nan], [3.0, 2.0, nan], [0.0, 2.0, 1.0]])
    labels = jnp.array([[0, 1, 0], [1, 0, -1], [1, 0, -1], [0, 1, 0]])
    for statistic in STATISTICS.values():
        values, weights = statistic(scores, {"label": labels})
        assert np.isnan(values).tolist() == [True, True, False, False]
        assert values[2:].tolist() == [1, 1] and weights.tolist() == [1] * 4


def test_impressions_of_one_kind_have_no_weight():
    labels = jnp.array([[1, 1, -1], [0, 0, 0], [-1, -1, -1], [0, 1, -1]])
    scores = jnp.array([[1.0, 2.0, 9.0]] * 4)
    for statistic in ranking_metrics().values():
        metric = mean(statistic)
        accumulator = metric.evaluate(scores, {"label": labels}, jnp.ones(4))
        assert float(accumulator[1]) == 1
        assert float(metric.compute(accumulator)) == 1.0


@settings(max_examples=20)
@given(found=impressions(), seed=st.integers(0, 99))
def test_the_loss_is_the_mean_over_clicks_of_the_softmax_of_candidates(found, seed):
    scores, labels = padded(found, np.random.default_rng(seed))
    expected = np.zeros(4)
    for row, (own, clicked) in enumerate(found):
        own = own.astype(np.float64)
        losses = np.log(np.sum(np.exp(own))) - own[clicked == 1]
        expected[row] = losses.mean()
    values, gradient = LOSS_AND_GRADIENT(scores, labels)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(gradient).all() and not gradient[labels < 0].any()


@jax.jit
def LOSS_AND_GRADIENT(scores, labels):
    loss = lambda scores: ranking_loss(scores, {"label": labels})
    return loss(scores), jax.grad(lambda scores: jnp.sum(loss(scores)))(scores)


def test_the_loss_of_one_click_is_the_same_by_its_position():
    scores = jnp.array([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
    by_position = ranking_loss(scores, {"label": jnp.array([2, 0])})
    by_candidate = ranking_loss(scores, {"label": jnp.array([[0, 0, 1], [1, 0, 0]])})
    np.testing.assert_allclose(by_position, by_candidate, rtol=1e-6)
