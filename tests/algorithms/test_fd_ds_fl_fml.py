"""FD, DS-FL and FML: rounds against plain NumPy, what they must reduce to, and what they exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist import simulation
from fedcodist.algorithms.ds_fl import DSFLHyper, ds_fl, sharpened
from fedcodist.algorithms.fd import FDHyper, LabelMeans, fd, of_others
from fedcodist.algorithms.fml import MEME, OWN, FMLHyper, both, fml, mutual_loss
from fedcodist.algorithms.parties import PUBLIC, Group
from fedcodist.client_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.metrics import accuracy
from fedcodist.model import Model, Variables, cross_entropy
from fedcodist.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, RATE, EPOCHS, ROUNDS = (5, 2, 7), 3, 4, 0.3, 2, 2
GENERATOR = np.random.default_rng(0)
PUBLIC_IMAGES = GENERATOR.normal(size=(6, FEATURES))
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    # Party 1 has label 0 only, and label 2 is party 2's alone.
    "label": np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 2, 2, 1, 0, 2], np.int32),
}
# Whole batches, so that the order of examples does not matter to the plain loop.
TRAINING = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def linear(classes=CLASSES) -> Model:
    def init(key):
        return Variables({"w": jax.random.normal(key, (FEATURES, classes))}, {})

    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, classes)


MODEL = linear()
GROUPS = {"all": Group(MODEL, np.arange(3))}


ALGORITHMS = {
    "fd": fd(GROUPS, CLASSES, TRAINING, FDHyper(RATE, 0.7, 2.0)),
    "ds_fl": ds_fl(
        GROUPS,
        MODEL,
        len(PUBLIC_IMAGES),
        TRAINING,
        LocalTraining(optax.sgd, batch_size=4, epochs=1),
        open_size=4,
        hyper=DSFLHyper(RATE, RATE, 0.1),
    ),
    "fml": fml(GROUPS, MODEL, TRAINING, FMLHyper(RATE, 0.3, 0.6)),
}


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (simulation.AXIS,))
    return simulation.build_programs(ALGORITHMS[name], ROUNDS, mesh), mesh


def run(name, hyper=None, rounds=ROUNDS, devices=None, images=COLUMNS["image"]):
    """(first state, last state, metrics) of the first seed."""
    algorithm = ALGORITHMS[name]
    programs, mesh = programs_of(name, devices)
    put = functools.partial(simulation.replicate, mesh=mesh)
    private = FederatedData.from_arrays(COLUMNS | {"image": images}, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    before = jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper or algorithm.hyper)
    after, _, metrics = programs.train(
        *put((before, {}, seeds, np.int32(0), np.int32(rounds), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after, metrics))


# --------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def examples_of(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return COLUMNS["image"][rows], COLUMNS["label"][rows]


def descend(w, images, target):
    """One step on the mean cross-entropy with a target."""
    return w - RATE * images.T @ (softmax(images @ w) - target) / len(images)


def alone(w, client, epochs=EPOCHS):
    images, labels = examples_of(client)
    for _ in range(epochs):
        w = descend(w, images, np.eye(CLASSES)[labels])
    return w


def weights_of(state):
    models = state.models["all"]
    return getattr(models, "variables", models).params["w"]


# ------------------------------------------------------------------------------------------- FD


def test_fd_is_a_plain_loop():
    before, after, _ = run("fd")
    hyper, models = ALGORITHMS["fd"].hyper, list(weights_of(before))
    means = [{} for _ in SIZES]
    for _ in range(ROUNDS):
        new_means = []
        for client in range(3):
            images, labels = examples_of(client)
            others = {
                y: np.mean([m[y] for j, m in enumerate(means) if j != client and y in m], axis=0)
                for y in range(CLASSES)
                if any(j != client and y in m for j, m in enumerate(means))
            }
            w = models[client]
            for _ in range(EPOCHS):
                slope = softmax(images @ w) - np.eye(CLASSES)[labels]
                for row, y in enumerate(labels.tolist()):
                    if y in others:
                        t = hyper.temperature
                        pull = softmax(images[row] @ w / t) - softmax(others[y] / t)
                        slope[row] += hyper.weight * t * pull
                w = w - RATE * images.T @ slope / len(images)
            models[client] = w
            new_means.append({y: (images[labels == y] @ w).mean(0) for y in set(labels.tolist())})
        means = new_means
    np.testing.assert_allclose(weights_of(after), models, rtol=1e-5, atol=1e-7)


def test_fd_without_its_regulariser_is_training_alone():
    before, after, _ = run("fd", FDHyper(RATE, 0.0, 2.0))
    expected = [alone(w, c, ROUNDS * EPOCHS) for c, w in enumerate(weights_of(before))]
    np.testing.assert_allclose(weights_of(after), expected, rtol=1e-6, atol=1e-8)


def test_a_single_party_has_no_others():
    """Whatever it has sent: the regulariser is undefined and left out."""
    means = LabelMeans(jnp.asarray(GENERATOR.normal(size=(3, 3))), jnp.array([1.0, 0.0, 1.0]))
    others = of_others(means, means)
    assert not others.has_label.any()
    assert not others.logits.any()


def test_fd_sends_a_square_of_classes():
    about = ALGORITHMS["fd"].communication["all_0"]
    assert about.up == about.down == 4 * CLASSES * (CLASSES + 1)


# ---------------------------------------------------------------------------------------- DS-FL


def test_ds_fl_is_a_plain_loop():
    before, after, _ = run("ds_fl")
    models, server = list(weights_of(before)), before.server.params["w"]
    for round in range(ROUNDS):
        rows = ALGORITHMS["ds_fl"].select(round, jax.random.key(0)).rows[PUBLIC][0]
        images = PUBLIC_IMAGES[np.asarray(rows)]
        assert len(np.unique(rows)) == 4
        models = [alone(w, client) for client, w in enumerate(models)]
        target = softmax(np.mean([softmax(images @ w) for w in models], axis=0) / 0.1)
        models = [descend(w, images, target) for w in models]
        server = descend(server, images, target)
    np.testing.assert_allclose(weights_of(after), models, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(after.server.params["w"], server, rtol=1e-6, atol=1e-8)


def entropy(p):
    return -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1)


@given(st.integers(2, 12), st.floats(0.51, 0.9))
@settings(max_examples=50, deadline=None)
def test_sharpening_lowers_the_entropy_of_peaked_probabilities(classes, peak):
    """At T = 0.1; at a large T nothing of the mean is left."""
    mean = np.full(classes, (1 - peak) / (classes - 1))
    mean[-1] = peak
    found = np.asarray(sharpened(jnp.asarray(mean), 0.1))
    assert entropy(found) < entropy(mean)
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-6)
    flat = np.asarray(sharpened(jnp.asarray(mean), 1e9))
    np.testing.assert_allclose(flat, 1 / classes, rtol=1e-6)


# ------------------------------------------------------------------------------------------ FML


def test_fml_is_a_plain_loop():
    before, after, _ = run("fml")
    hyper = ALGORITHMS["fml"].hyper
    models, meme = list(weights_of(before)), before.meme.params["w"]
    for _ in range(ROUNDS):
        memes = []
        for client in range(3):
            images, labels = examples_of(client)
            own, fork, targets = models[client], meme, np.eye(CLASSES)[labels]
            for _ in range(EPOCHS):
                p, q = softmax(images @ own), softmax(images @ fork)
                slope_own = hyper.own_weight * (p - targets) + (1 - hyper.own_weight) * (p - q)
                slope = hyper.meme_weight * (q - targets) + (1 - hyper.meme_weight) * (q - p)
                own = own - RATE * images.T @ slope_own / len(images)
                fork = fork - RATE * images.T @ slope / len(images)
            models[client] = own
            memes.append(fork)
        meme = np.mean(memes, axis=0)
    np.testing.assert_allclose(weights_of(after), models, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(after.meme.params["w"], meme, rtol=1e-6, atol=1e-8)


def test_fml_of_labels_alone_is_fed_avg_and_training_alone():
    before, after, _ = run("fml", FMLHyper(RATE, 1.0, 1.0))
    meme = before.meme.params["w"]
    for _ in range(ROUNDS):
        meme = np.mean([alone(meme, client) for client in range(3)], axis=0)
    np.testing.assert_allclose(after.meme.params["w"], meme, rtol=1e-6, atol=1e-8)
    own = [alone(w, c, ROUNDS * EPOCHS) for c, w in enumerate(weights_of(before))]
    np.testing.assert_allclose(weights_of(after), own, rtol=1e-6, atol=1e-8)


def test_equal_models_do_not_pull_at_each_other():
    """At the first step, where both are the same, only labels count."""
    pair = both(MODEL, MODEL)
    w = jnp.asarray(GENERATOR.normal(size=(FEATURES, CLASSES)))
    images, labels = examples_of(0)
    batch = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}

    def gradient(own_weight, meme_weight):
        def loss(params):
            outputs, _ = pair.apply(Variables(params, {OWN: {}, MEME: {}}), batch, train=True)
            return jnp.mean(mutual_loss(MODEL, MODEL, own_weight, meme_weight)(outputs, batch))

        return jax.grad(loss)({OWN: {"w": w}, MEME: {"w": w}})

    halves, whole = gradient(0.5, 0.5), gradient(1.0, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, atol=1e-7), halves, whole)


# -------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", ["ds_fl"])
def test_devices_share_the_parties(name):
    expected, found = run(name)[1], run(name, devices=2)[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), found, expected
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fd({"a": Group(linear(4), [0])}, 3), r"groups must have models of 3 outputs"),
        (lambda: fd(GROUPS, 3, hyper=FDHyper(temperature=0)), "temperature must be .*above 0"),
        (lambda: fd(GROUPS, 3, hyper=FDHyper(weight=-1)), "weight must be .*at least 0"),
        (lambda: fd(GROUPS, 3, TRAINING._replace(epochs=0)), "training.epochs must be at least 1"),
        (
            lambda: ds_fl(GROUPS, MODEL, 5, open_size=6),
            "open_size must be at most the 5 public examples, got 6",
        ),
        (
            lambda: ds_fl(GROUPS, MODEL, 5, open_size=5, aggregation="x"),
            "aggregation must be 'era' or 'sa'",
        ),
        (lambda: ds_fl(GROUPS, linear(4), 5), "groups must have models of 4 outputs"),
        (lambda: fml(GROUPS, linear(2)), "groups must have models of 2 outputs"),
        (
            lambda: fml(GROUPS, MODEL, hyper=FMLHyper(own_weight=2)),
            "own_weight must be .*at most 1",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
