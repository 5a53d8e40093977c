"""Sentence classifier and news recommender: loops in float64, padding, dropout."""

import functools

import bert_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_examples import ENCODER, IMPRESSIONS, SENTENCES

from fedcodist.algorithms.clients.fed_kd_losses import hidden_distance
from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.text.bert import bert_base
from fedcodist.text.news import NO_NEWS, news_recommender
from fedcodist.text.sentence_classifier import sentence_classifier

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLASSIFIER = sentence_classifier(ENCODER, classes=3, queries=5)
NEWS = news_recommender(ENCODER, width=6, queries=5, candidates=3)


def noisy(model, dtype=np.float32):
    noise = np.random.default_rng(0)
    add = lambda leaf: jnp.asarray(leaf + 0.4 * noise.normal(size=leaf.shape), dtype)
    return jax.tree.map(add, model.init(jax.random.key(0)).params)


def outputs(model, params, batch, **options):
    apply = jax.jit(model.apply, static_argnames="train")
    return apply(Variables(params, {}), batch, **options)[0]


@functools.cache
def both_params():
    return noisy(CLASSIFIER), noisy(NEWS)


def in_float64(model, batch):
    with jax.enable_x64(True):
        params = noisy(model, np.float64)
        return jax.tree.map(np.asarray, (params, outputs(model, params, batch)))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


def test_parameter_totals():
    of = lambda model: parameter_count(jax.eval_shape(model.init, jax.random.key(0)).params)
    encoder, pooling = 108_891_648, 768 * 200 + 200 + 200
    assert of(sentence_classifier(bert_base())) == encoder + pooling + 768 * 2 + 2
    of_users = 64 * 200 + 200 + 200
    assert of(news_recommender(bert_base())) == encoder + pooling + 768 * 64 + 64 + of_users
    assert (CLASSIFIER.num_classes, NEWS.num_classes) == (3, 3)


@pytest.mark.slow
def test_the_classifier_equals_a_loop():
    params, found = in_float64(CLASSIFIER, SENTENCES)
    for row, tokens in enumerate(SENTENCES["tokens"]):
        hidden, attention = bert_reference.encode(params["encoder"], tokens, heads=2)
        pooled = bert_reference.pooled(params["pooling"], hidden[-1], tokens != 0)
        close(found.logits[row], bert_reference.dense(params["classes"], pooled))
        close([each[row] for each in found.hidden], hidden)
        close([each[row] for each in found.attention], attention)
    np.testing.assert_array_equal(found.logits[2], params["classes"]["bias"])
    loss = CLASSIFIER.loss(found, SENTENCES)
    logs = found.logits - np.log(np.exp(found.logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(loss, -logs[np.arange(3), SENTENCES["label"]], rtol=1e-5)
    right, _ = CLASSIFIER.metrics["accuracy"](found, SENTENCES)
    np.testing.assert_array_equal(right, found.logits.argmax(-1) == SENTENCES["label"])


def plain_news(params, titles):
    """(vectors, hidden, attention), title by title."""
    found = [bert_reference.encode(params["encoder"], tokens, heads=2) for tokens in titles]
    vectors = [
        bert_reference.dense(
            params["news"],
            bert_reference.pooled(params["title_pooling"], hidden[-1], tokens != 0),
        )
        for (hidden, _), tokens in zip(found, titles, strict=True)
    ]
    return np.stack(vectors), [h for h, _ in found], [a for _, a in found]


@pytest.mark.slow
def test_the_news_recommender_equals_a_loop():
    params, found = in_float64(NEWS, IMPRESSIONS)
    shapes = lambda layers: jax.tree.map(np.shape, layers, is_leaf=lambda x: hasattr(x, "shape"))
    assert shapes(found.hidden) == (((2, 3, 3, 8), (2, 4, 3, 8)),) * 2
    assert shapes(found.attention) == (((2, 2, 3, 3, 3), (2, 2, 4, 3, 3)),) * 2
    for row in range(2):
        candidates, history = (IMPRESSIONS[name][row] for name in ("candidates", "history"))
        vectors, hidden, attention = plain_news(params, candidates)
        read, past_hidden, past_attention = plain_news(params, history)
        user = bert_reference.pooled(params["user_pooling"], read, history.any(-1))
        scores = np.where(candidates.any(-1), vectors @ user, NO_NEWS)
        close(found.logits[row], scores)
        for layer in range(2):
            close(found.hidden[layer][0][row], [each[layer] for each in hidden])
            close(found.hidden[layer][1][row], [each[layer] for each in past_hidden])
            own = np.moveaxis(found.attention[layer][0][row], 1, 0)
            close(own, [each[layer] for each in attention])
            own = np.moveaxis(found.attention[layer][1][row], 1, 0)
            close(own, [each[layer] for each in past_attention])
    np.testing.assert_array_equal(found.logits[1], 0)  # of a user without history
    logs = found.logits - np.log(np.exp(found.logits).sum(-1, keepdims=True))
    loss = NEWS.loss(found, IMPRESSIONS)
    np.testing.assert_allclose(loss, -logs[np.arange(2), IMPRESSIONS["label"]], rtol=1e-5)
    clicks = {"label": np.array([[0, 1, -1], [1, 0, 0]])}
    shares = {name: each(found, clicks)[0] for name, each in NEWS.metrics.items()}
    assert shares["auc"][0] == (found.logits[0, 1] > found.logits[0, 0])
    np.testing.assert_allclose(shares["auc"][1], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 4])
def test_hidden_distance_sums_candidates_and_history_through_one_map(width):
    """With half the width, the student's one layer reaches the teacher's second by one map."""
    teacher = outputs(NEWS, both_params()[1], IMPRESSIONS)
    own = ENCODER.clone(layers=1, width=width or ENCODER.width)
    small = news_recommender(own, width=6, queries=5, candidates=3)
    student = outputs(small, noisy(small), IMPRESSIONS)
    maps = [np.random.default_rng(1).normal(size=(4, 8))] if width else []
    means = lambda each: np.mean(each, axis=tuple(range(1, each.ndim)))
    expected = 0
    for titles in (0, 1):
        state = student.hidden[0][titles]
        state = state @ maps[0] if width else state
        expected += means(np.square(teacher.hidden[1][titles] - state))
        attended = teacher.attention[1][titles] - student.attention[0][titles]
        expected += means(np.square(attended))
    np.testing.assert_allclose(hidden_distance(teacher, student, maps), expected, rtol=1e-5)


def padded(array, axis, more):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return np.pad(array, widths)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 1000))
def test_more_padding_never_changes_scores(seed):
    draw, (of_classifier, of_news) = np.random.default_rng(seed), both_params()
    sentence = {"tokens": draw.integers(0, 3, (2, 5)) * draw.integers(1, 5, (2, 5))}
    short = outputs(CLASSIFIER, of_classifier, sentence).logits
    longer = {"tokens": padded(sentence["tokens"], 1, 3)}
    long = outputs(CLASSIFIER, of_classifier, longer).logits
    np.testing.assert_allclose(short, long, rtol=1e-4, atol=1e-5)
    news = {name: draw.integers(1, 11, (2, 3, 4)) for name in ("candidates", "history")}
    lengths = draw.integers(0, 5, (2, 2, 3, 1))
    for column, kept in zip(news.values(), lengths, strict=True):
        column[...] = np.where(np.arange(4) < kept, column, 0)
    larger = {
        "candidates": padded(padded(news["candidates"], 2, 2), 1, 1),
        "history": padded(padded(news["history"], 2, 2), 1, 2),
    }
    short, long = (outputs(NEWS, of_news, each).logits for each in (news, larger))
    np.testing.assert_allclose(short, long[:, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(long[:, 3:], NO_NEWS)


@pytest.mark.slow
def test_training_drops_out_only_with_a_key():
    params, _ = both_params()
    still = outputs(CLASSIFIER, params, SENTENCES).logits
    unkeyed = outputs(CLASSIFIER, params, SENTENCES, train=True).logits
    np.testing.assert_array_equal(unkeyed, still)
    keyed = outputs(CLASSIFIER, params, SENTENCES, train=True, key=jax.random.key(0)).logits
    assert np.abs(keyed - still)[:2].max() > 1e-3


@pytest.mark.parametrize(
    ("create", "name"),
    [
        (sentence_classifier, "classes"),
        (sentence_classifier, "queries"),
        (news_recommender, "width"),
        (news_recommender, "queries"),
        (news_recommender, "candidates"),
    ],
)
def test_sizes_below_one_are_one_line(create, name):
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0\.$"):
        create(ENCODER, **{name: 0})
    with pytest.raises(ValueError, match=r"^dropout must be at least 0 and at most 1, got -1\.$"):
        create(ENCODER, dropout=-1)


def test_titles_of_two_lengths_are_one_line():
    batch = {"candidates": jnp.zeros((1, 3, 4), int), "history": jnp.zeros((1, 2, 5), int)}
    message = r"^candidates and history must be of one batch and title length, got \[1, 3, 4\] and"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: NEWS.apply(NEWS.init(jax.random.key(0)), batch))
