"""FD, DS-FL and FML: rounds against plain NumPy, what they must reduce to, and what they exchange."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.parties.ds_fl import DSFLHyper, ds_fl, entropy_reduction
from fedcodist.algorithms.parties.fd import FDHyper, FDVariant, LabelMeans, fd, of_others
from fedcodist.algorithms.parties.fml import MEME, OWN, FMLHyper, both, fml, mutual_loss
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.open_examples import OpenExamples
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, HIDDEN = (5, 2, 7), 3, 4, 2
RATE, EPOCHS, ROUNDS = 0.3, 2, 2
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


def hidden() -> Model:
    def init(key):
        keys = jax.random.split(key)
        u = jax.random.normal(keys[0], (FEATURES, HIDDEN))
        return Variables({"u": u, "v": jax.random.normal(keys[1], (HIDDEN, CLASSES))}, {})

    def apply(variables, batch, **_):
        active = jnp.tanh(batch["image"] @ variables.params["u"])
        return active @ variables.params["v"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, CLASSES)


MODEL = linear()
GROUPS = {
    "hidden": PartyGroup(hidden(), np.array([2, 0])),
    "linear": PartyGroup(MODEL, np.array([1])),
}


def open_examples(aggregation="era"):
    return ds_fl(
        GROUPS,
        MODEL,
        OpenExamples(len(PUBLIC_IMAGES), 4),
        TRAINING,
        LocalTraining(optax.sgd, batch_size=4, epochs=1),
        aggregation=aggregation,
        hyper=DSFLHyper(RATE, RATE, 0.1),
    )


ALGORITHMS = {
    "fd": fd(GROUPS, CLASSES, TRAINING, FDHyper(RATE, 0.7, 2.0)),
    "fd, in training": fd(
        GROUPS,
        CLASSES,
        TRAINING,
        FDHyper(RATE, 0.7, 2.0),
        variant=FDVariant("in_training", own_share=True, divergence="mse"),
    ),
    "ds_fl": open_examples(),
    "ds_fl, sa": open_examples("sa"),
    "fml": fml(GROUPS, MODEL, TRAINING, FMLHyper(RATE, 0.3, 0.6)),
}


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(ALGORITHMS[name], ROUNDS, mesh), mesh


def run(name, hyper=None, devices=None, state=None, columns=COLUMNS, sizes=SIZES):
    """(first state, last state, metrics) of the first seed."""
    algorithm = ALGORITHMS[name]
    programs, mesh = programs_of(name, devices)
    put = functools.partial(replicate, mesh=mesh)
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    before = state or jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper or algorithm.hyper)
    after, _, metrics = programs.train(
        *put((before, {}, seeds, np.int32(0), np.int32(ROUNDS), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after, metrics))


# --------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def examples_of(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return COLUMNS["image"][rows], COLUMNS["label"][rows]


def logits_of(params, images):
    if "w" in params:
        return images @ params["w"]
    return np.tanh(images @ params["u"]) @ params["v"]


def descend(params, images, slope):
    """One step; `slope` [examples, classes] is the gradient of each example's loss by its logits."""
    slope = slope / len(images)
    if "w" in params:
        return {"w": params["w"] - RATE * images.T @ slope}
    active = np.tanh(images @ params["u"])
    back = (slope @ params["v"].T) * (1 - active**2)
    return {
        "u": params["u"] - RATE * images.T @ back,
        "v": params["v"] - RATE * active.T @ slope,
    }


def learn(params, images, target):
    """One step on the mean cross-entropy with a target."""
    return descend(params, images, softmax(logits_of(params, images)) - target)


def alone(params, client, epochs=EPOCHS):
    images, labels = examples_of(client)
    for _ in range(epochs):
        params = learn(params, images, np.eye(CLASSES)[labels])
    return params


def params_of(state):
    """Every party's parameters, in the order of parties."""
    found = {}
    for name, group in GROUPS.items():
        models = state.models[name]
        params = getattr(models, "variables", models).params
        for index, client in enumerate(sorted(group.clients.tolist())):
            found[client] = {k: leaf[index] for k, leaf in params.items()}
    return [found[client] for client in range(len(SIZES))]


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ------------------------------------------------------------------------------------------- FD


def test_fd_is_a_plain_loop():
    before, after, _ = run("fd")
    hyper, models = ALGORITHMS["fd"].hyper, params_of(before)
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
            for _ in range(EPOCHS):
                logits = logits_of(models[client], images)
                slope = softmax(logits) - np.eye(CLASSES)[labels]
                for row, y in enumerate(labels.tolist()):
                    if y in others:
                        t = hyper.temperature
                        pull = softmax(logits[row] / t) - softmax(others[y] / t)
                        slope[row] += hyper.weight * t * pull
                models[client] = descend(models[client], images, slope)
            logits = logits_of(models[client], images)
            new_means.append({y: logits[labels == y].mean(0) for y in set(labels.tolist())})
        means = new_means
    assert_close(params_of(after), models, rtol=1e-5, atol=1e-7)


def test_fd_as_htfllib_averages_it_is_a_plain_loop():
    """Means of training outputs, over all who have a label; drawn to them by squared differences."""
    before, after, _ = run("fd, in training")
    hyper, models = ALGORITHMS["fd, in training"].hyper, params_of(before)
    means = [{} for _ in SIZES]
    for _ in range(ROUNDS):
        new_means = []
        for client in range(3):
            images, labels = examples_of(client)
            having = {y: [m[y] for m in means if y in m] for y in range(CLASSES)}
            target = {y: np.mean(found, axis=0) for y, found in having.items() if found}
            seen = []
            for _ in range(EPOCHS):
                logits = logits_of(models[client], images)
                seen.append(logits)
                slope = softmax(logits) - np.eye(CLASSES)[labels]
                for row, y in enumerate(labels.tolist()):
                    if y in target:
                        slope[row] += hyper.weight * 2 * (logits[row] - target[y]) / CLASSES
                models[client] = descend(models[client], images, slope)
            mean = np.mean(seen, axis=0)
            new_means.append({y: mean[labels == y].mean(0) for y in set(labels.tolist())})
        means = new_means
    assert_close(params_of(after), models, rtol=1e-5, atol=1e-7)


def test_fd_without_its_regulariser_is_training_alone():
    before, after, _ = run("fd", FDHyper(RATE, 0.0, 2.0))
    expected = [alone(params, c, ROUNDS * EPOCHS) for c, params in enumerate(params_of(before))]
    assert_close(params_of(after), expected)


def test_a_single_party_has_no_others():
    """Whatever it has sent: the regulariser is undefined and left out."""
    means = LabelMeans(jnp.asarray(GENERATOR.normal(size=(3, 3))), jnp.array([1.0, 0.0, 1.0]))
    others = of_others(means, means)
    assert not others.has_label.any()
    assert not others.logits.any()


def test_fd_sends_a_square_of_classes():
    about = ALGORITHMS["fd"].communication["hidden_0"]
    assert about.up == about.down == 4 * CLASSES * (CLASSES + 1)


# ---------------------------------------------------------------------------------------- DS-FL


def test_ds_fl_sends_probabilities_and_which_examples_they_are_of():
    about = ds_fl(GROUPS, MODEL, OpenExamples(6, 4)).communication["linear"]
    assert about.up == 4 * 4 * CLASSES
    assert about.down == about.up + 4 * 4
    everything = ds_fl(GROUPS, MODEL, OpenExamples(6, None)).communication["linear"]
    assert everything.up == everything.down == 4 * 6 * CLASSES


@pytest.mark.parametrize("name", ["ds_fl", pytest.param("ds_fl, sa", marks=pytest.mark.slow)])
def test_ds_fl_is_a_plain_loop(name):
    before, after, _ = run(name)
    models, server = params_of(before), before.server.params
    for round in range(ROUNDS):
        rows = ALGORITHMS[name].select(round, jax.random.key(0)).examples[PUBLIC][0]
        images = PUBLIC_IMAGES[np.asarray(rows)]
        assert len(np.unique(rows)) == 4
        models = [alone(params, client) for client, params in enumerate(models)]
        target = np.mean([softmax(logits_of(params, images)) for params in models], axis=0)
        if name == "ds_fl":
            target = softmax(target / 0.1)
        models = [learn(params, images, target) for params in models]
        server = learn(server, images, target)
    assert_close(params_of(after), models)
    assert_close(after.server.params, server)


def test_permuting_parties_permutes_ds_fl():
    """Parties 0 and 2, of one architecture, change places: models and examples."""
    before, expected, _ = run("ds_fl")
    swapped = before._replace(models=before.models | {"hidden": exchanged(before)})
    order = np.concatenate(np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])[::-1])
    columns = {name: column[order] for name, column in COLUMNS.items()}
    state = jax.tree.map(lambda leaf: leaf[None], swapped)
    _, found, _ = run("ds_fl", state=state, columns=columns, sizes=SIZES[::-1])
    assert_close(found._replace(models=found.models | {"hidden": exchanged(found)}), expected)


def exchanged(state):
    return jax.tree.map(lambda leaf: leaf[::-1], state.models["hidden"])


def entropy(p):
    return -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1)


@given(st.sampled_from([2, 3, 12]), st.floats(0.51, 0.9))
@settings(max_examples=50)
def test_sharpening_lowers_the_entropy_of_peaked_probabilities(classes, peak):
    """At T = 0.1 the mean is sharpened; at a large T it becomes uniform."""
    mean = np.full(classes, (1 - peak) / (classes - 1))
    mean[-1] = peak
    found = np.asarray(entropy_reduction(jnp.asarray(mean), 0.1))
    assert entropy(found) < entropy(mean)
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-6)
    flat = np.asarray(entropy_reduction(jnp.asarray(mean), 1e9))
    np.testing.assert_allclose(flat, 1 / classes, rtol=1e-6)


# ------------------------------------------------------------------------------------------ FML


def test_fml_is_a_plain_loop():
    before, after, _ = run("fml")
    hyper = ALGORITHMS["fml"].hyper
    models, meme = params_of(before), before.meme.params
    for _ in range(ROUNDS):
        memes = []
        for client in range(3):
            images, labels = examples_of(client)
            own, fork, targets = models[client], meme, np.eye(CLASSES)[labels]
            for _ in range(EPOCHS):
                p, q = (softmax(logits_of(params, images)) for params in (own, fork))
                slope_own = hyper.own_weight * (p - targets) + (1 - hyper.own_weight) * (p - q)
                slope = hyper.meme_weight * (q - targets) + (1 - hyper.meme_weight) * (q - p)
                own, fork = descend(own, images, slope_own), descend(fork, images, slope)
            models[client] = own
            memes.append(fork["w"])
        meme = {"w": np.mean(memes, axis=0)}
    assert_close(params_of(after), models)
    assert_close(after.meme.params, meme)


def test_fml_of_labels_alone_is_fed_avg_and_training_alone():
    before, after, _ = run("fml", FMLHyper(RATE, 1.0, 1.0))
    meme = before.meme.params
    for _ in range(ROUNDS):
        meme = {"w": np.mean([alone(meme, client)["w"] for client in range(3)], axis=0)}
    assert_close(after.meme.params, meme)
    own = [alone(params, c, ROUNDS * EPOCHS) for c, params in enumerate(params_of(before))]
    assert_close(params_of(after), own)


def test_equal_models_do_not_pull_at_each_other():
    """At the first step both models are the same, so only the labels matter."""
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


def test_ds_fls_number_of_open_examples_is_that_of_the_public_ones():
    """With a larger number it would draw indices of examples that do not exist."""
    assert ALGORITHMS["ds_fl"].data_set_sizes == {PUBLIC: len(PUBLIC_IMAGES)}


def test_fmls_optimizer_has_momentum_and_weight_decay():
    optimizer = inspect.signature(fml).parameters["training"].default.optimizer(0.01)
    params, gradient = jnp.array(2.0), jnp.array(3.0)
    state, velocity = optimizer.init(params), 0.0
    for _ in range(3):
        update, state = optimizer.update(gradient, state, params)
        velocity = 0.9 * velocity + 3 + 5e-4 * float(params)
        assert float(update) == pytest.approx(-0.01 * velocity, rel=1e-6)
        params = params + update


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ds_fl", "fd", "fml"])
def test_devices_share_the_parties(name):
    expected, found = run(name)[1], run(name, devices=2)[1]
    assert_close(found, expected, atol=1e-9)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: fd({"a": PartyGroup(linear(4), [0])}, 3),
            "groups must have models of num_classes=3 outputs",
        ),
        (lambda: fd(GROUPS, 3, hyper=FDHyper(temperature=0)), "temperature must be .*above 0"),
        (lambda: fd(GROUPS, 3, hyper=FDHyper(weight=-1)), "weight must be .*at least 0"),
        (lambda: fd(GROUPS, 3, TRAINING._replace(epochs=0)), "training.epochs must be at least 1"),
        (
            lambda: fd(GROUPS, 3, variant=FDVariant("later")),
            "variant.averaged must be 'after_training' or 'in_training', got 'later'",
        ),
        (
            lambda: fd(GROUPS, 3, variant=FDVariant(divergence="l2")),
            "variant.divergence must be 'kl' or 'mse', got 'l2'",
        ),
        (
            lambda: fd(GROUPS, 3, variant=FDVariant(own_share=1)),
            "variant.own_share must be True or False",
        ),
        (
            lambda: ds_fl(GROUPS, MODEL, OpenExamples(5, 6)),
            "open_size must be at most the 5 public examples, got 6",
        ),
        (
            lambda: ds_fl(GROUPS, MODEL, OpenExamples(5, 5), aggregation="x"),
            "aggregation must be 'era' or 'sa'",
        ),
        (
            lambda: ds_fl(GROUPS, linear(4), OpenExamples(5, 5)),
            "groups must have models of server.num_classes=4 outputs",
        ),
        (lambda: fml(GROUPS, linear(2)), "groups must have models of meme.num_classes=2 outputs"),
        (
            lambda: ds_fl({"server": PartyGroup(MODEL, [0])}, MODEL, OpenExamples(5, 5)),
            "'server' and 'server' both have one called 'server'",
        ),
        (
            lambda: fml(GROUPS, MODEL, hyper=FMLHyper(own_weight=2)),
            "own_weight must be .*at most 1",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
