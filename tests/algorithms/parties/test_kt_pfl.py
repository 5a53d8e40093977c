"""KT-pFL: rounds against plain NumPy, what they must reduce to, and what they exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, in_client_order
from fedcodist.algorithms.parties.knowledge_coefficients import Coefficients, updated_coefficients
from fedcodist.algorithms.parties.kt_pfl import KTpFLHyper, KTpFLState, kt_pfl
from fedcodist.algorithms.parties.open_examples import OpenExamples
from fedcodist.algorithms.parties.party import PartiesResult
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Cohort, Examples, Inputs, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import PARTIES
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, HIDDEN = (5, 2, 7), 3, 4, 2
EPOCHS, DISTILLATION_EPOCHS, ROUNDS, OPEN = 2, 2, 3, 4
GENERATOR = np.random.default_rng(0)
PUBLIC_IMAGES = GENERATOR.normal(size=(6, FEATURES))
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    "label": np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 2, 2, 1, 0, 2], np.int32),
}
# Whole batches, so that the order of examples does not matter to the plain loop.
LOCAL = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)
DISTILLATION = LocalTraining(optax.sgd, batch_size=OPEN, epochs=DISTILLATION_EPOCHS)
HYPER = KTpFLHyper(0.3, 0.8, 0.5, 0.1, 2.0, 5.0)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def network(hidden) -> Model:
    def init(key):
        keys = jax.random.split(key)
        params = {"w": jax.random.normal(keys[0], (HIDDEN if hidden else FEATURES, CLASSES))}
        if hidden:
            params["u"] = jax.random.normal(keys[1], (FEATURES, HIDDEN))
        return Variables(params, {})

    def apply(variables, batch, **_):
        images = batch["image"]
        if hidden:
            images = jnp.tanh(images @ variables.params["u"])
        return images @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, CLASSES)


GROUPS = {
    "hidden": PartyGroup(network(True), np.array([2, 0])),
    "linear": PartyGroup(network(False), np.array([1])),
}
ONE = {"linear": PartyGroup(network(False), np.array([0]))}
RELEASED = Coefficients("mse", "softmax", first=True)


def make(groups=GROUPS, coefficients=Coefficients(), execution=Execution()):
    examples = OpenExamples(len(PUBLIC_IMAGES), OPEN)
    return kt_pfl(groups, examples, LOCAL, DISTILLATION, coefficients, HYPER, execution)


ALGORITHMS = {
    "paper": make(),
    "released": make(coefficients=RELEASED),
    "one party": make(ONE),
    "vmap": make(execution=Execution("vmap")),
}


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(ALGORITHMS[name], ROUNDS, mesh), mesh


def run(name, hyper=HYPER, devices=None):
    """(first state, last state, metrics) of the first seed."""
    programs, mesh = programs_of(name, devices)
    put = functools.partial(replicate, mesh=mesh)
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    before = jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper)
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
    return (np.tanh(images @ params["u"]) if "u" in params else images) @ params["w"]


def descend(params, images, slope, rate):
    """One step; `slope` [examples, classes] is the gradient of each example's loss by its logits."""
    slope = slope / len(images)
    if "u" not in params:
        return {"w": params["w"] - rate * images.T @ slope}
    active = np.tanh(images @ params["u"])
    back = (slope @ params["w"].T) * (1 - active**2)
    return {
        "u": params["u"] - rate * images.T @ back,
        "w": params["w"] - rate * active.T @ slope,
    }


def alone(params, client, steps=EPOCHS):
    images, labels = examples_of(client)
    for _ in range(steps):
        slope = softmax(logits_of(params, images)) - np.eye(CLASSES)[labels]
        params = descend(params, images, slope, HYPER.learning_rate)
    return params


def nearest_weights(row):
    """The nearest point whose entries are no less than 0 and sum to 1, by bisection."""
    low, high = row.min() - 1, row.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(row - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(row - low, 0)


def stepped(c, s, released):
    """The knowledge coefficients [n, m] after a step, example by example; s [m, examples, classes]."""
    count, gradient = len(c), np.zeros_like(c)
    for n in range(count):
        mixture = sum(c[n, m] * s[m] for m in range(count))
        for m in range(count):
            if released:
                gradient[n, m] = 2 * np.mean((mixture - s[n]) * s[m])
                gradient[n, m] += HYPER.uniform_weight * 2 * (c[n, m] - 1 / count) / count
            else:
                by_example = np.sum(s[m] * (np.log(mixture) + 1 - np.log(s[n])), axis=-1)
                gradient[n, m] = SIZES[n] / sum(SIZES) * np.mean(by_example)
                gradient[n, m] += 2 * HYPER.uniform_weight * (c[n, m] - 1 / count)
    c = c - HYPER.coefficient_rate * gradient
    return softmax(HYPER.sharpness * c) if released else np.stack([nearest_weights(r) for r in c])


def params_of(state):
    """Every party's parameters, in the order of parties."""
    found = {}
    for name, group in GROUPS.items():
        for index, client in enumerate(sorted(group.clients.tolist())):
            leaves = state.models[name].params
            found[client] = {k: leaf[index] for k, leaf in leaves.items()}
    return [found[client] for client in range(len(SIZES))]


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ---------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("name", ["paper", "released"])
def test_kt_pfl_is_a_plain_loop(name):
    before, after, metrics = run(name)
    models, c, shown = params_of(before), np.full((3, 3), 1 / 3), []
    for round in range(ROUNDS):
        rows = ALGORITHMS[name].select(round, jax.random.key(0)).examples[PUBLIC][0]
        images = PUBLIC_IMAGES[np.asarray(rows)]
        models = [alone(params, client) for client, params in enumerate(models)]
        t = HYPER.temperature
        s = np.stack([softmax(logits_of(params, images) / t) for params in models])
        new_c = stepped(c, s, name == "released")
        used = new_c if name == "released" else c
        for n in range(3):
            mixture = sum(used[n, m] * s[m] for m in range(3))
            for _ in range(DISTILLATION_EPOCHS):
                slope = (softmax(logits_of(models[n], images) / t) - mixture) / t
                models[n] = descend(models[n], images, slope, HYPER.distillation_learning_rate)
        c = new_c
        shown.append(used[1])
    assert_close(params_of(after), models)
    assert_close(after.coefficients, c)
    assert_close(metrics["linear/coefficients"], np.stack(shown))
    assert not np.allclose(c, 1 / 3, atol=1e-3)


@pytest.mark.parametrize("name", ["paper", "released"])
def test_mixtures_have_the_coefficients_before_the_step_or_after_it(monkeypatch, name):
    """Parties that have nothing to train, and a step from `before` to `stepped`."""
    predictions = softmax(np.random.default_rng(1).normal(size=(3, OPEN, CLASSES)))
    before, stepped = np.eye(3), np.full((3, 3), 1 / 3)
    groups = check_groups(GROUPS)
    reports = {n: jnp.asarray(predictions[group.clients]) for n, group in groups.items()}
    passes = []

    def run_parties(groups, update, message, states, *_):
        passes.append(states)
        return PartiesResult(None, dict.fromkeys(groups), reports, {})

    module = "fedcodist.algorithms.parties.kt_pfl"
    monkeypatch.setattr(f"{module}.run_parties", run_parties)
    monkeypatch.setattr(f"{module}.updated_coefficients", lambda *_: jnp.asarray(stepped))
    everyone = Cohort({}, jnp.arange(3), jnp.zeros(3, int), jnp.array(SIZES), max(SIZES))
    open_ones = Examples({}, jnp.zeros((1, OPEN), int))
    round = Round(jnp.int32(0), jax.random.key(0), Inputs({PARTIES: everyone}, {PUBLIC: open_ones}))
    state = KTpFLState(dict.fromkeys(groups), jnp.asarray(before))
    after, _, metrics = ALGORITHMS[name].round(state, {}, round, HYPER)
    used = stepped if name == "released" else before
    _, pupils = passes
    for n, group in groups.items():
        expected = np.tensordot(used[group.clients], predictions, axes=1)
        assert_close(pupils[n][1], expected)
    assert_close(metrics["linear/coefficients"], used[1])
    assert_close(after.coefficients, stepped)


def test_without_distillation_every_party_trains_alone():
    before, after, _ = run("paper", HYPER._replace(distillation_learning_rate=0.0))
    expected = [alone(params, c, ROUNDS * EPOCHS) for c, params in enumerate(params_of(before))]
    assert_close(params_of(after), expected)


def test_one_party_has_nobody_to_learn_from():
    """Its mixture is its own prediction, and distillation has no gradient."""
    before, after, _ = run("one party")
    start, found = (
        {k: leaf[0] for k, leaf in state.models["linear"].params.items()}
        for state in (before, after)
    )
    assert_close(found, alone(start, 0, ROUNDS * EPOCHS))
    assert after.coefficients.tolist() == [[1.0]]


def test_coefficients_that_do_not_move_stay_equal():
    _, after, _ = run("paper", HYPER._replace(coefficient_rate=0.0))
    assert_close(after.coefficients, np.full((3, 3), 1 / 3))


def test_vmap_is_scan():
    assert_close(run("vmap")[1], run("paper")[1], atol=1e-12)


@pytest.mark.slow
def test_devices_share_the_parties():
    assert_close(run("paper", devices=2)[1], run("paper")[1], atol=1e-9)


# ----------------------------------------------------------------------------------- coefficients


@pytest.mark.parametrize("settings", [Coefficients(), RELEASED])
def test_the_step_draws_a_party_to_those_who_predict_as_it_does(settings):
    """Parties 0 and 1 agree, party 2 does not; nothing draws to equal weights."""
    s = jnp.array([[[0.9, 0.1]], [[0.9, 0.1]], [[0.1, 0.9]]])
    hyper = HYPER._replace(uniform_weight=0.0)
    c = updated_coefficients(jnp.full((3, 3), 1 / 3), s, jnp.array([1, 1, 1]), settings, hyper)
    np.testing.assert_allclose(c.sum(axis=1), 1, rtol=1e-6)
    assert c[0, 0] == pytest.approx(float(c[0, 1])) and c[0, 0] > c[0, 2]
    assert c[2, 2] > c[2, 0]


def test_a_strong_pull_makes_coefficients_equal():
    s = jnp.asarray(softmax(GENERATOR.normal(size=(3, 4, CLASSES))))
    hyper = HYPER._replace(uniform_weight=1e6, coefficient_rate=0.5e-6)
    c = updated_coefficients(jnp.eye(3), s, jnp.array(SIZES), Coefficients(), hyper)
    np.testing.assert_allclose(c, np.full((3, 3), 1 / 3), atol=1e-5)


def test_probabilities_of_nothing_have_a_finite_step():
    s = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    c = updated_coefficients(jnp.eye(2), s, jnp.array([1, 1]), Coefficients(), HYPER)
    assert np.isfinite(c).all()


def test_groups_come_in_the_order_of_clients():
    groups = check_groups(GROUPS)
    values = {"hidden": jnp.array([0.0, 2.0]), "linear": jnp.array([1.0])}
    assert in_client_order(groups, values).tolist() == [0.0, 1.0, 2.0]


# ------------------------------------------------------------------------ exchange and bad input


def test_kt_pfl_sends_soft_predictions_and_which_examples_they_are_of():
    about = ALGORITHMS["paper"].communication["linear"]
    assert about.up == 4 * OPEN * CLASSES and about.down == about.up + 4 * OPEN
    everything = kt_pfl(GROUPS, OpenExamples(6, None)).communication["linear"]
    assert everything.up == everything.down == 4 * 6 * CLASSES
    assert ALGORITHMS["paper"].data_set_sizes == {PUBLIC: len(PUBLIC_IMAGES)}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kt_pfl(GROUPS, OpenExamples(5, 6)), "open_size must be at most the 5"),
        (
            lambda: kt_pfl(GROUPS, OpenExamples(5, 5), coefficients=Coefficients("l2")),
            "coefficients.loss must be 'kl' or 'mse', got 'l2'",
        ),
        (
            lambda: kt_pfl(GROUPS, OpenExamples(5, 5), coefficients=Coefficients(rows="any")),
            "coefficients.rows must be 'simplex' or 'softmax', got 'any'",
        ),
        (
            lambda: kt_pfl(GROUPS, OpenExamples(5, 5), hyper=KTpFLHyper(temperature=0)),
            "temperature must be .*above 0",
        ),
        (
            lambda: kt_pfl(GROUPS, OpenExamples(5, 5), hyper=KTpFLHyper(uniform_weight=-1)),
            "uniform_weight must be .*at least 0",
        ),
        (
            lambda: kt_pfl(
                GROUPS | {"a": PartyGroup(network(True)._replace(num_classes=4), [3])},
                OpenExamples(5, 5),
            ),
            r"groups must have models of groups\['hidden'\]\.model\.num_classes=3",
        ),
        (
            lambda: kt_pfl(GROUPS, OpenExamples(5, 5), LOCAL._replace(epochs=0)),
            "local.epochs must be at least 1",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
