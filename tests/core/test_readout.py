"""Chunked losses equal plain ones in values and gradients, and never hold all logits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core import readout, sampled_softmax
from fedcodist.core.readout import Readout


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def made_up(seed, shape, width=5, classes=11, padded=0.4):
    rng = np.random.default_rng(seed)
    outputs = Readout(
        jnp.asarray(rng.normal(size=(*shape, width))),
        jnp.asarray(rng.normal(size=(width, classes))),
        jnp.asarray(rng.normal(size=classes)),
        jnp.asarray((rng.uniform(size=shape) >= padded).astype(np.float64)),
    )
    labels = jnp.asarray(rng.integers(0, classes, shape), jnp.int32)
    return outputs, labels, jnp.asarray(rng.normal(size=shape))


def plain(outputs, labels):
    logits = outputs.features @ outputs.kernel + outputs.bias
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses * outputs.weights


def gradients(function, outputs, cotangents):
    def total(features, kernel, bias):
        new = outputs._replace(features=features, kernel=kernel, bias=bias)
        return jnp.sum(function(new) * cotangents)

    return jax.grad(total, argnums=(0, 1, 2))(*outputs[:3])


def assert_same(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


shapes = st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4)])


@settings(max_examples=8)
@given(shapes, st.sampled_from([None, 1, 4]), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 99))
def test_chunked_cross_entropy_equals_the_plain_one(shape, chunk, padded, seed):
    def both(outputs, labels, cotangents):
        chunked = functools.partial(readout.cross_entropy, labels=labels, chunk=chunk)
        return [
            (loss(outputs), gradients(loss, outputs, cotangents))
            for loss in (chunked, functools.partial(plain, labels=labels))
        ]

    assert_same(*jax.jit(both)(*made_up(seed, shape, padded=padded)))


@pytest.mark.slow
@settings(max_examples=12)
@given(shapes, st.sampled_from([None, 1, 4]), st.sampled_from([0.4, 1.0]), st.integers(0, 99))
def test_totals_in_chunks_equal_plain_ones(shape, chunk, padded, seed):
    outputs, labels, weights = made_up(seed, shape, padded=padded)
    outputs = outputs._replace(weights=outputs.weights * jnp.abs(weights))
    other = made_up(seed + 1, shape, width=3)[0]

    def divergence(logits, known):
        target = jax.nn.softmax(known["teacher"]) * (1 + known["label"][..., None])
        return optax.kl_divergence(jax.nn.log_softmax(logits), target)

    def direct(new):
        known = {"teacher": other.features @ other.kernel + other.bias, "label": labels}
        values = divergence(new.features @ new.kernel + new.bias, known)
        return 3 * jnp.sum(values * new.weights)

    def chunked(new):
        known = {"teacher": other, "label": labels}
        return 3 * readout.total_in_chunks(divergence, new, known, chunk)

    def both(outputs):
        return [(each(outputs), gradients(each, outputs, 1.0)) for each in (chunked, direct)]

    assert_same(*jax.jit(both)(outputs))


def test_every_chunk_adds_to_the_gradients():
    """The case of a language model in distillation: one kernel, and positions in several chunks."""
    outputs, labels, _ = made_up(8, (4, 5), padded=0.3)

    def both(outputs):
        chunked = lambda new: readout.total_in_chunks(readout.label_losses, new, labels, chunk=4)
        whole = functools.partial(plain, labels=labels)
        return [gradients(each, outputs, 1.0) for each in (chunked, whole)]

    assert_same(*jax.jit(both)(outputs))


def test_losses_of_labels_are_cross_entropies():
    outputs, labels, _ = made_up(4, (9,), padded=0.0)
    total = jax.jit(lambda new: readout.total_in_chunks(readout.label_losses, new, labels))
    assert_same(total(outputs), jnp.sum(plain(outputs, labels)))


def test_constants_get_no_gradient():
    outputs, _, _ = made_up(5, (6,))

    def total(scale):
        teacher = outputs._replace(features=scale * outputs.features)
        function = lambda logits, known: jnp.sum(logits * known, axis=-1)
        return readout.total_in_chunks(function, outputs, teacher)

    assert total(2.0) != total(1.0) and jax.grad(total)(1.0) == 0


@pytest.mark.parametrize("padded", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_the_most_probable_class_is_that_of_all_logits(padded, chunk):
    outputs, _, _ = made_up(3, (4, 6), padded=padded)
    allowed = jnp.arange(11) % 3 != 0
    logits = outputs.features @ outputs.kernel + outputs.bias
    expected = np.argmax(np.where(allowed, logits, -np.inf), axis=-1) * (outputs.weights != 0)
    found = jax.jit(readout.most_probable, static_argnums=2)(outputs, allowed, chunk)
    np.testing.assert_array_equal(found, expected)


def test_clients_at_once_are_clients_one_by_one():
    clients = [made_up(seed, (4, 6), padded=padded) for seed, padded in enumerate((0.0, 0.3, 0.9))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)

    def both(outputs, labels, cotangents):
        loss = functools.partial(readout.cross_entropy, labels=labels, chunk=5)
        return loss(outputs), gradients(loss, outputs, cotangents)

    together, alone = jax.jit(jax.vmap(both))(*stacked), jax.jit(both)
    for index, client in enumerate(clients):
        assert_same(jax.tree.map(lambda leaf, i=index: leaf[i], together), alone(*client))


def all_shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_shapes(inner)


@pytest.mark.parametrize("name", ["cross_entropy", "total_in_chunks", "plain"])
def test_logits_of_a_batch_never_exist(name):
    outputs, labels, cotangents = made_up(0, (40, 20), width=4, classes=500)
    functions = {
        "cross_entropy": lambda new: readout.cross_entropy(new, labels, 64),
        "total_in_chunks": lambda new: jnp.full(
            labels.shape, readout.total_in_chunks(readout.label_losses, new, labels, 64)
        ),
        "plain": lambda new: plain(new, labels),
    }
    traced = jax.make_jaxpr(lambda new: gradients(functions[name], new, cotangents))(outputs)
    largest = max(map(math.prod, all_shapes(traced.jaxpr)))
    assert (largest >= 40 * 20 * 500) == (name == "plain")
    assert name == "plain" or largest <= 64 * 500


def test_padding_is_not_multiplied():
    """The loop's length is what counts: with no real position nothing is read."""
    outputs, labels, _ = made_up(0, (8, 8), padded=1.0)
    broken = outputs._replace(kernel=outputs.kernel * jnp.nan)
    assert np.all(readout.cross_entropy(broken, labels, 16) == 0)
    assert readout.total_in_chunks(readout.label_losses, broken, labels, 16) == 0
    one = broken._replace(weights=broken.weights.at[3, 3].set(1))
    assert np.isnan(readout.cross_entropy(one, labels, 16)[3, 3])
    assert np.isnan(readout.total_in_chunks(readout.label_losses, one, labels, 16))


@pytest.mark.parametrize("padded", [0.0, 0.3, 0.8, 0.97])
def test_only_chunks_of_real_positions_are_computed(padded):
    outputs, labels, _ = made_up(7, (8, 8), padded=padded)
    computed = []

    def counted(logits, labels):
        jax.debug.callback(lambda: computed.append(len(logits)))
        return readout.label_losses(logits, labels)

    jax.block_until_ready(readout.total_in_chunks(counted, outputs, labels, 5))
    jax.effects_barrier()
    real = np.count_nonzero(outputs.weights)
    assert computed == [5] * -(-real // 5) and len(computed) < 13 * (1.1 - padded) + 1


@pytest.mark.parametrize(("positions", "largest"), [(2, 1), (400, 100), (5000, 256)])
def test_chunks_are_small_beside_the_batch(positions, largest):
    outputs, labels, cotangents = made_up(0, (positions,), classes=7)
    loss = lambda new: readout.cross_entropy(new, labels)
    traced = jax.make_jaxpr(lambda new: gradients(loss, new, cotangents))(outputs)
    rows = {shape[0] for shape in all_shapes(traced.jaxpr) if shape[1:] == (7,)} - {5}
    assert max(rows) == largest


def test_samples_estimate_the_sum_over_all_classes():
    outputs, labels, _ = made_up(1, (6, 5), classes=40, padded=0.0)
    exact = plain(outputs, labels)
    order = np.random.default_rng(0).permutation(40)

    def estimate(key):
        drawn = sampled_softmax.draw_classes(key, 30, order)
        losses = sampled_softmax.sampled_cross_entropy(
            outputs._replace(samples=drawn), labels, order
        )
        return jnp.exp(losses) - 1  # the sum over samples that are not the label, relative to it

    estimates = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(0), 20_000))
    others = jnp.exp(exact) - 1
    deviation = jnp.std(estimates, axis=0) / np.sqrt(len(estimates))
    assert np.all(np.abs(jnp.mean(estimates, axis=0) - others) < 5 * deviation)


def test_many_samples_approach_the_softmax():
    """So does the gradient: a frequent class, of which many samples are expected, learns no faster."""
    outputs, labels, cotangents = made_up(1, (6, 5), classes=20, padded=0.0)
    order = np.random.default_rng(0).permutation(20)
    drawn = sampled_softmax.draw_classes(jax.random.key(0), 20_000, order)
    sampled = lambda new: sampled_softmax.sampled_cross_entropy(
        new._replace(samples=drawn), labels, order
    )
    full = functools.partial(plain, labels=labels)

    @jax.jit
    def both(outputs):
        return [(loss(outputs), gradients(loss, outputs, cotangents)) for loss in (sampled, full)]

    found, expected = both(outputs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.05)


@pytest.mark.slow
def test_with_all_classes_sampled_it_is_the_softmax(monkeypatch):
    """Each class is drawn once: without a correction, the loss is the full softmax's."""
    outputs, labels, cotangents = made_up(6, (4, 5))
    every = jnp.arange(11)
    order = np.random.default_rng(0).permutation(11)
    monkeypatch.setattr(
        sampled_softmax, "_log_expected", lambda samples, by_frequency: jnp.zeros(11)
    )
    sampled = lambda new: sampled_softmax.sampled_cross_entropy(new, labels, order)
    full = functools.partial(plain, labels=labels)
    outputs_of_all = outputs._replace(samples=every)
    found = sampled(outputs_of_all), gradients(sampled, outputs_of_all, cotangents)
    expected = full(outputs), gradients(full, outputs, cotangents)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_draws_follow_their_probabilities():
    order = np.random.default_rng(0).permutation(20)
    drawn = np.asarray(sampled_softmax.draw_classes(jax.random.key(0), 200_000, order))
    assert drawn.min() >= 0 and drawn.max() == 19
    expected = np.exp(sampled_softmax._log_expected(200_000, order))
    # Log-uniform: twice as far down the order is about half as frequent.
    places = expected[order] * np.log(21) / 200_000
    np.testing.assert_allclose(places, np.log((np.arange(20) + 2) / (np.arange(20) + 1)), rtol=1e-5)
    assert expected.sum() == pytest.approx(200_000)
    assert np.all(np.abs(np.bincount(drawn) - expected) < 5 * np.sqrt(expected))


def test_sampled_loss_leaves_padding_out_and_needs_samples():
    outputs, labels, cotangents = made_up(2, (3, 4), padded=0.5)
    outputs = outputs._replace(samples=jnp.array([1, 1, 3]))
    order = np.arange(len(outputs.bias))
    losses = sampled_softmax.sampled_cross_entropy(outputs, labels, order)
    assert np.array_equal(losses == 0, outputs.weights == 0) and np.all(losses >= 0)
    loss = functools.partial(
        sampled_softmax.sampled_cross_entropy, labels=labels, by_frequency=order
    )
    own = jax.jit(functools.partial(gradients, loss))(outputs, cotangents)
    touched = set(np.flatnonzero(np.abs(own[2]))) - {1, 3}
    assert touched == {int(label) for label in labels[outputs.weights > 0]} - {1, 3}
    with pytest.raises(ValueError, match=r"samples must be classes from draw_classes"):
        sampled_softmax.sampled_cross_entropy(outputs._replace(samples=None), labels, order)
