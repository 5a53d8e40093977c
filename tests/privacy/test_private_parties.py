"""What parties send in private: bounds, sensitivity and noise as NumPy says, and whole rounds."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_model import linear_model
from scipy import stats

from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import OpenExamples, ds_fl
from fedcodist.algorithms.parties.fd import LabelMeans, fd
from fedcodist.algorithms.parties.fed_md import fed_md
from fedcodist.algorithms.parties.fed_proto import fed_proto
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.compression.compressed_reduce import compressed_reduce
from fedcodist.compression.quantisation import quantisation
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.inputs import Round
from fedcodist.core.method import PARTIES
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.headed import headed
from fedcodist.privacy.accounting import PrivacyBudget, spent
from fedcodist.privacy.private_parties import (
    classes_sensitivity,
    clipped_rows,
    counted,
    private_classes,
    private_scores,
    scores_sensitivity,
)
from fedcodist.privacy.secure_sum_reduce import secure_sum_reduce
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")
NOTHING = Variables({}, {})


def result(update, weight=1.0):
    return ClientResult(update, {}, jnp.float32(weight), None, {})


def summed(reduce, updates, weights=None, key=0):
    """The aggregate of parties who send these."""
    key = jax.random.key(key)
    weights = np.ones(len(updates)) if weights is None else weights
    prepared = [
        reduce.prepare(result(update, weight), key)
        for update, weight in zip(updates, weights, strict=True)
    ]
    return reduce.finalize(jax.tree.map(lambda *leaves: sum(leaves), *prepared), NOTHING, key)


ROWS = st.lists(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(ROWS, st.floats(0.01, 100))
def test_clipping_rows(rows, clip):
    rows = np.float32(rows)
    found = np.float64(clipped_rows(jnp.asarray(rows), clip))
    exact = np.float64(rows)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    expected = exact * np.minimum(1, clip / np.maximum(norms, 1e-300))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=clip * 1e-6)
    assert (np.linalg.norm(found, axis=1) <= clip * (1 + 1e-6)).all()


def test_a_row_that_is_not_finite_counts_nothing():
    rows = jnp.array([[np.nan, 1.0], [np.inf, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(clipped_rows(rows, 1.0), [[0, 0], [0, 0], [0.6, 0.8]], rtol=1e-6)


def test_a_party_moves_the_sum_by_its_sensitivity_at_most():
    generator = np.random.default_rng(0)
    for clip, weight in ((0.7, 1.0), (2.0, 3.0)):
        reduce = private_scores(clip, 0.0, max_weight=weight)
        scores = jnp.float32(generator.normal(size=(5, 4)) * [[0.1], [1], [5], [50], [500]])
        sent, _ = reduce.prepare(result(scores, 10.0), jax.random.key(0))
        bound = weight * scores_sensitivity(scores, clip)
        assert np.linalg.norm(sent) <= bound * (1 + 1e-6)
        sent, _ = reduce.prepare(result(1e3 * scores, 10.0), jax.random.key(0))
        assert np.linalg.norm(sent) == pytest.approx(bound, rel=1e-5)  # it is no looser bound
    for clip, count in ((0.7, 1.0), (2.0, 3.0)):
        reduce = private_classes(clip, 0.0, max_count=count)
        pair = LabelMeans(
            jnp.float32(generator.normal(size=(4, 6)) * 1e4), jnp.float32([9, 9, 9, 9])
        )
        (vectors, counts), _ = reduce.prepare(result(pair, 5.0), jax.random.key(0))
        norm = np.sqrt(np.sum(vectors**2) + clip**2 * np.sum(counts**2))
        assert norm == pytest.approx(classes_sensitivity(4, clip, count), rel=1e-5)


def test_without_noise_it_is_the_mean_of_clipped_scores():
    generator = np.random.default_rng(1)
    updates, weights = generator.normal(size=(3, 5, 4)), np.array([0.2, 1.0, 2.0])
    found = summed(private_scores(1.5, 0.0), [jnp.float32(u) for u in updates], weights)
    norms = np.linalg.norm(updates, axis=-1, keepdims=True)
    rows = updates * np.minimum(1, 1.5 / norms)
    expected = np.average(rows, axis=0, weights=np.minimum(weights, 1.0))
    np.testing.assert_allclose(found.pseudo_gradient, expected, rtol=1e-5, atol=1e-6)
    pair = lambda u: LabelMeans(jnp.float32(u), jnp.float32([2, 0.5, 0, 1, 1]))
    found = summed(private_classes(1.5, 0.0), [pair(u) for u in updates]).pseudo_gradient
    kept = np.array([1, 0.5, 0, 1, 1])[:, None]
    rows = updates * kept / np.array([2, 0.5, 1, 1, 1])[:, None]
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    rows = rows * np.minimum(1, 1.5 * kept / np.maximum(norms, 1e-9))
    np.testing.assert_allclose(found.logits, rows.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.has_label, 3 * kept[:, 0], rtol=1e-6)


def test_the_noise_has_the_stated_deviation():
    examples, classes, clip, z = 40, 300, 2.0, 0.5
    zeros = [jnp.zeros((examples, classes))] * 4
    found = summed(private_scores(clip, z, max_weight=3.0), zeros, [3, 1, 1, 3]).pseudo_gradient
    expected = z * 3 * clip * np.sqrt(examples) / 8
    # Of 12,000 draws; 4 deviations of the estimate.
    assert np.std(found) == pytest.approx(expected, rel=4 / np.sqrt(2 * found.size))
    assert abs(np.mean(found)) < 4 * expected / np.sqrt(found.size)
    again = summed(private_scores(clip, z, 3.0), zeros, [3, 1, 1, 3], key=1).pseudo_gradient
    assert abs(np.corrcoef(np.ravel(found), np.ravel(again))[0, 1]) < 0.05
    pairs = [LabelMeans(jnp.zeros((2000, 6)), jnp.zeros(2000))] * 3
    vectors, counts = summed(private_classes(clip, z), pairs).pseudo_gradient
    sensitivity = clip * np.sqrt(2 * 2000)
    assert np.std(vectors) == pytest.approx(z * sensitivity, rel=4 / np.sqrt(2 * vectors.size))
    assert np.std(counts) == pytest.approx(z * sensitivity / clip, rel=4 / np.sqrt(2 * counts.size))


@pytest.mark.parametrize("kind", ["scores", "classes"])
def test_the_multiplier_that_is_counted_is_that_of_the_reduction(kind):
    """Measured: the noise of a sum by the most that one party can change it. Epsilon is of that."""
    pytest.importorskip("dp_accounting")
    clip, z = 2.0, 1.7
    if kind == "scores":
        reduce = private_scores(clip, z, max_weight=3.0)
        huge = jnp.full((40, 60), 1e3)
    else:
        reduce = private_classes(clip, z)
        huge = LabelMeans(jnp.full((2000, 6), 1e3), jnp.full(2000, 9.0))
    scaled = lambda tree: LabelMeans(tree[0], clip * tree[1]) if kind == "classes" else tree
    sent, _ = reduce.prepare(result(huge, weight=9.0), None)
    most = optax.tree.norm(scaled(sent))
    nothing = (jax.tree.map(jnp.zeros_like, huge), jnp.float32(1))
    noise = reduce.finalize(nothing, NOTHING, jax.random.key(0)).pseudo_gradient
    values = np.concatenate([np.ravel(leaf) for leaf in scaled(noise)])
    measured = np.std(values) / float(most)
    method, _ = METHODS["fd" if kind == "classes" else "fed_md"]
    cohorts = counted(method(reduce=reduce), z).privacy
    assert cohorts[PARTIES].noise_multiplier == pytest.approx(
        measured, rel=4 / np.sqrt(2 * values.size)
    )
    epsilon = spent(cohorts, 3, PrivacyBudget(1e-5)).epsilon
    mu = 3**0.5 / measured  # three Gaussians are one of sensitivity sqrt(3)
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    assert delta == pytest.approx(1e-5, rel=0.4)  # of a measured multiplier


# -------------------------------------------------------------------------------------- whole rounds

SIZES, CLASSES, FEATURES = (5, 2, 7), 3, 4
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)).astype(np.float32),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
}
PUBLIC_IMAGES = GENERATOR.normal(size=(9, FEATURES)).astype(np.float32)


GROUPS = {
    "pair": PartyGroup(linear_model(FEATURES, CLASSES), np.array([0, 2])),
    "single": PartyGroup(linear_model(FEATURES, CLASSES), np.array([1])),
}
embedding = headed(nn.Dense(5), jnp.zeros((1, FEATURES)), CLASSES)
HEADED = {name: group._replace(model=embedding) for name, group in GROUPS.items()}
METHODS = {
    "fed_proto": (
        functools.partial(fed_proto, HEADED, CLASSES, weighting="parties"),
        "classes",
    ),
    "fed_md": (
        functools.partial(fed_md, GROUPS, Alignment(np.arange(9) % 2, 6), CLASSES),
        "scores",
    ),
    "ds_fl": (
        functools.partial(ds_fl, GROUPS, linear_model(FEATURES, CLASSES), OpenExamples(9, 6)),
        "scores",
    ),
    "fd": (functools.partial(fd, GROUPS, CLASSES), "classes"),
}


@functools.cache
def after(name, clip, noise, rounds=2, wrap=None):
    make, kind = METHODS[name]
    private_sum = {"scores": private_scores, "classes": private_classes}[kind]
    reduce = None if clip is None else private_sum(clip, noise)
    algorithm = make(reduce=reduce if wrap is None else wrap(reduce))
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = jax.tree.map(jnp.asarray, resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}}))
    key = jax.random.key(0)

    @jax.jit
    def round_(state, index):
        hyper = jax.tree.map(jnp.asarray, algorithm.hyper)
        inputs = data.read(algorithm.select(index, key))
        state, _, metrics = algorithm.round(state, {}, Round(index, key, inputs), hyper)
        return state, metrics

    state = algorithm.init(key)
    for index in range(rounds):
        state, metrics = round_(state, index)
    return jax.tree.map(np.asarray, (state, metrics))


def distance(left, right):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), left, right)))


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_and_with_a_wide_clip_a_round_is_the_plain_one(name):
    assert distance(after(name, 1e4, 0.0)[0], after(name, None, None)[0]) < 1e-4
    noised, metrics = after(name, 1e4, 1e-3)
    assert distance(noised, after(name, None, None)[0]) > 1e-4
    assert all(metrics[party + "/finite"] for party in ("pair_0", "pair_2", "single"))


def test_a_party_of_fd_subtracts_what_was_summed_of_it():
    """Clipped means: the server's total without a party's own is the sum of the others'."""
    state, _ = after("fd", 0.3, 0.0)
    sent = jax.tree.leaves(
        [state.models[name].sent for name in GROUPS], is_leaf=lambda x: isinstance(x, LabelMeans)
    )
    for field in ("logits", "has_label"):
        total = sum(getattr(group, field).sum(0) for group in sent)
        np.testing.assert_allclose(getattr(state.total, field), total, rtol=1e-5, atol=1e-6)
    largest = max(np.linalg.norm(group.logits, axis=-1).max() for group in sent)
    assert largest == pytest.approx(0.3, rel=1e-5)


def test_what_a_party_of_fd_keeps_as_sent_is_what_was_summed():
    """The identity of the test above, after one round of two parties of one network."""
    groups = {"pair": PartyGroup(linear_model(FEATURES, CLASSES), np.array([0, 1]))}
    algorithm = fd(groups, CLASSES, reduce=private_classes(0.3, 0.0))
    columns = {name: column[:7] for name, column in COLUMNS.items()}
    data = resident_data(FederatedData.from_arrays(columns, offsets=[0, 5, 7]))

    @jax.jit
    def one_round(data):
        key = jax.random.key(0)
        round = Round(0, key, data.read(algorithm.select(0, key)))
        return algorithm.round(algorithm.init(key), {}, round, algorithm.hyper)[0]

    state = one_round(data)
    sent = state.models["pair"].sent
    for total, each in zip(state.total, sent, strict=True):
        np.testing.assert_allclose(total, each.sum(0), rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(sent.logits, axis=-1).max() == pytest.approx(0.3, rel=1e-5)


def test_masked_and_compressed_it_is_the_same():
    wrap = lambda reduce: secure_sum_reduce(
        3, 2.0, reduce=compressed_reduce(quantisation(16), reduce)
    )
    state, metrics = after("fed_md", 1.0, 0.1, 1, wrap)
    # The noise is drawn from the same key, outside of the masks.
    assert distance(state, after("fed_md", 1.0, 0.1, 1)[0]) < 3e-3
    assert metrics["single/client_clipped_share"] == 0
    assert metrics["single/client_bytes_up"] > 4 * 6 * CLASSES


@pytest.mark.parametrize("make", [private_scores, private_classes])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "clip must be above 0, got 0"),
        ((1.0, -0.5), "noise_multiplier must be at least 0, got -0.5"),
        ((1.0, 1.0, 0.0), "max_(weight|count) must be above 0, got 0"),
        ((1.0, float("nan")), "noise_multiplier must be finite and at least 0, got nan"),
    ],
)
def test_bad_input_is_one_line(make, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(*arguments)
    assert "\n" not in str(raised.value)


def test_a_method_that_sends_no_pair_is_refused():
    make, _ = METHODS["fed_md"]
    with pytest.raises(ValueError, match=r"^reduce must return means"):
        make(reduce=private_classes(1.0, 1.0))
    with pytest.raises(
        ValueError, match=r"private_classes must be of a method .*shapes \[\[6, 3\]\]"
    ):
        private_classes(1.0, 1.0).prepare(result(jnp.zeros((6, 3))), jax.random.key(0))
