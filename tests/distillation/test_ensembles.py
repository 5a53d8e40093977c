"""Ensembles: mean predictions, sampled models, and how they are evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.core.readout import Readout
from fedcodist.distillation.ensembles import (
    Ensemble,
    concatenated,
    dirichlet_samples,
    ensemble_predictor,
    equal_weights,
    gaussian_samples,
    mean_logits,
    mean_logits_of_all,
    mean_probabilities,
)
from fedcodist.models.digits import BatchNormMLP

FEATURES, CLASSES, MEMBERS = 4, 3, 5
IMAGES = np.random.default_rng(0).normal(size=(7, FEATURES)).astype(np.float32)
BATCH = {"image": jnp.asarray(IMAGES)}
MODEL = Model(
    init=lambda key: Variables({"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}, {}),
    apply=lambda variables, batch, **_: (
        batch["image"] @ variables.params["w"] + variables.params["b"] + variables.mutable["s"],
        variables.mutable,
    ),
    loss=cross_entropy,
    metrics={},
    num_classes=CLASSES,
)


def members(seed=0, count=MEMBERS):
    draws = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(draws.normal(size=(count, *shape)).astype(np.float32))
    return Variables({"w": array(FEATURES, CLASSES), "b": array(CLASSES)}, {"s": array(CLASSES)})


def logits_of(variables):
    """[members, batch, classes], in float64."""
    w, b, s = (
        np.asarray(leaf, np.float64) for leaf in (*_params(variables), variables.mutable["s"])
    )
    return IMAGES @ w + b[:, None] + s[:, None]


def _params(variables):
    return variables.params["w"], variables.params["b"]


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@given(st.lists(st.floats(0, 3), min_size=MEMBERS, max_size=MEMBERS), st.integers(0, 99))
@settings(max_examples=10)
def test_means_are_weighted_means(weights, seed):
    weights[seed % MEMBERS] += 1.0
    ensemble = Ensemble(members(seed), jnp.asarray(weights, jnp.float32))
    logits = logits_of(ensemble.members)
    for mean, expected in (
        (mean_logits, np.average(logits, axis=0, weights=weights)),
        (mean_probabilities, np.average(softmax(logits), axis=0, weights=weights)),
    ):
        np.testing.assert_allclose(mean(MODEL, ensemble)(BATCH), expected, rtol=2e-3, atol=1e-4)


def test_order_and_copies_do_not_matter():
    ensemble = equal_weights(members())
    shuffled = equal_weights(jax.tree.map(lambda leaf: leaf[::-1], members()))
    twice = concatenated(ensemble, shuffled)
    mean = mean_logits(MODEL, ensemble)(BATCH)
    for other in (shuffled, twice):
        np.testing.assert_allclose(mean_logits(MODEL, other)(BATCH), mean, rtol=1e-5, atol=1e-6)


def test_members_without_weight_at_the_end_are_not_evaluated():
    broken = jax.tree.map(lambda leaf: leaf.at[3:].set(jnp.nan), members())
    weights = jnp.asarray([1.0, 1.0, 1.0, 0.0, 0.0])
    mean = mean_logits(MODEL, Ensemble(broken, weights))(BATCH)
    np.testing.assert_allclose(mean, logits_of(members())[:3].mean(0), rtol=1e-4, atol=1e-5)


def test_an_architecture_without_weight_leaves_the_mean_of_the_others():
    none = Ensemble(members(1), jnp.zeros(MEMBERS))
    ensembles = {"large": none, "small": equal_weights(members())}
    mean = mean_logits_of_all({"large": MODEL, "small": MODEL}, ensembles)(BATCH)
    np.testing.assert_allclose(mean, logits_of(members()).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [mean_logits, mean_probabilities])
def test_a_member_without_weight_may_have_diverged(average):
    broken = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.inf), members())
    weights = jnp.asarray([1.0, 0.0, 1.0, 1.0, 1.0])
    without = jax.tree.map(lambda leaf: leaf[np.array([0, 2, 3, 4])], members())
    np.testing.assert_allclose(
        average(MODEL, Ensemble(broken, weights))(BATCH),
        average(MODEL, equal_weights(without))(BATCH),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_predictor_finds_its_ensemble_in_the_state():
    predictor = ensemble_predictor(MODEL, lambda state: equal_weights(state["models"]))
    outputs = predictor.predict(predictor.variables({"models": members()}), BATCH)
    expected = mean_logits(MODEL, equal_weights(members()))(BATCH)
    np.testing.assert_array_equal(outputs, expected)


@pytest.mark.parametrize("shape", [(7, 1), (7,), (7, 2, 3)], ids=["one", "none", "dense"])
def test_a_predictor_averages_outputs_of_any_shape(shape):
    """A mean of numbers is a prediction, though a model of one output cannot teach by it."""
    outputs = lambda values: values.params["b"].sum() + jnp.arange(np.prod(shape)).reshape(shape)
    model = MODEL._replace(apply=lambda values, batch, **_: (outputs(values), {}))
    predictor = ensemble_predictor(model, equal_weights)
    mean = predictor.predict(predictor.variables(members()), BATCH)
    np.testing.assert_allclose(mean, jax.vmap(outputs)(members()).mean(0), rtol=1e-5)
    if shape != (7, 2, 3):
        with pytest.raises(ValueError, match=r"must return logits .* of at least two classes"):
            mean_logits(model, equal_weights(members()))(BATCH)


@pytest.mark.parametrize("average", [mean_logits, mean_probabilities])
def test_logits_of_half_precision_are_averaged_in_float32(average):
    halves = lambda values, batch: MODEL.apply(values, batch)[0].astype(jnp.bfloat16)
    model = MODEL._replace(apply=lambda values, batch, **_: (halves(values, batch), {}))
    found = average(model, equal_weights(members()))(BATCH)
    assert found.dtype == jnp.float32
    expected = average(MODEL, equal_weights(members()))(BATCH)
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


def test_gaussian_samples_of_equal_clients_scatter_around_them():
    """Their variance is at its floor, so a sample is the model plus noise of a known length."""
    received = jax.tree.map(lambda leaf: leaf[0], members(1, 1))
    same = jax.tree.map(lambda leaf: jnp.stack([leaf + 2.0] * MEMBERS), received)
    samples = gaussian_samples(jax.random.key(0), received, same, 4000)
    for name, leaf in samples.params.items():
        length = np.linalg.norm(np.full(received.params[name].shape, 2.0))
        np.testing.assert_allclose(leaf.mean(0), received.params[name] + 2, atol=1e-3 * length)
        np.testing.assert_allclose(leaf.std(0), 0.1 * np.sqrt(1e-5) * length, rtol=0.1)


def test_gaussian_samples_follow_the_clients_spread():
    received = jax.tree.map(lambda leaf: leaf[0], members(1, 1))
    clients = jax.tree.map(lambda start, step: start + step, received, members(2))
    samples = gaussian_samples(jax.random.key(3), received, clients, 20000)
    moved = (clients.params["w"] - received.params["w"]).reshape(MEMBERS, -1)
    length = np.linalg.norm(moved, axis=1)
    unit = moved / length[:, None]
    drawn = (samples.params["w"] - received.params["w"]).reshape(20000, -1)
    np.testing.assert_allclose(drawn.mean(0), length.mean() * unit.mean(0), atol=0.02)
    np.testing.assert_allclose(drawn.std(0), 0.1 * length.mean() * unit.std(0), rtol=0.05)


def test_clients_that_did_not_move_give_no_nan():
    received = jax.tree.map(lambda leaf: leaf[0], members(1, 1))
    still = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), received)
    samples = gaussian_samples(jax.random.key(0), received, still, 2)
    np.testing.assert_array_equal(samples.params["w"], jnp.stack([received.params["w"]] * 2))


def test_dirichlet_samples_are_convex_combinations():
    samples = dirichlet_samples(jax.random.key(0), members(), 50)
    for drawn, given_ in zip(jax.tree.leaves(samples), jax.tree.leaves(members()), strict=True):
        assert (drawn <= given_.max(0) + 1e-5).all()
        assert (drawn >= given_.min(0) - 1e-5).all()
    # The same shares in every tensor: one sample of two equal tensors is equal too.
    doubled = Variables({"a": members().params["b"], "b": members().params["b"]}, {})
    drawn = dirichlet_samples(jax.random.key(0), doubled, 5).params
    np.testing.assert_allclose(drawn["a"], drawn["b"], rtol=1e-6)


def test_members_are_in_evaluation_mode():
    """Members normalise by their running averages, whatever the rest of the batch."""
    model = from_flax_linen(BatchNormMLP(hidden=(8,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    both = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
    mean = mean_logits(model, equal_weights(both))
    one_by_one = jnp.concatenate([mean({"image": image[None]}) for image in BATCH["image"]])
    np.testing.assert_allclose(mean(BATCH), one_by_one, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        (
            Readout(jnp.zeros((7, 2, 4)), jnp.zeros((4, 3)), jnp.zeros(3), jnp.ones((7, 2))),
            "Readout",
        ),
        ((jnp.zeros((7, 3)), jnp.zeros(7)), "tuple of 2"),
    ],
    ids=["readout", "tuple"],
)
def test_outputs_that_are_no_logits_are_not_averaged(outputs, kind):
    model = MODEL._replace(apply=lambda variables, batch, **_: (outputs, {}))
    with pytest.raises(TypeError, match=rf"must return logits \[.*classes\], got a {kind}"):
        mean_logits(model, equal_weights(members()))(BATCH)
    predictor = ensemble_predictor(model, equal_weights)
    with pytest.raises(TypeError, match=rf"models of an ensemble .* another array, got a {kind}"):
        predictor.predict(predictor.variables(members()), BATCH)
