"""FedBE against plain NumPy in float64, and against what it must reduce to."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.fed_be import (
    SAMPLINGS,
    FedBEHyper,
    fed_be,
    mean_of_all,
    sharpened,
)
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.client_states import device_client_states
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.distillation.loop import distill
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged
from fedcodist.models.digits import BatchNormMLP
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 4, 6), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 3, 3
STEPS, BATCH, TEACHING_RATE, TEMPERATURE = 5, 5, 0.7, 0.5
IMAGES = np.random.default_rng(1).normal(size=(11, FEATURES)).astype(np.float32)
DISTILLATION = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0)
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)
MODEL = softmax_regression(FEATURES, CLASSES, several_starts=True)
METHOD = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
POOLS = {
    "even": Pool(METHOD, np.array([0, 2, 4]), 2),
    "odd": Pool(METHOD, np.array([1, 3, 5]), 3),
}
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


def algorithm(pools=POOLS, distillation=DISTILLATION, **options):
    rate = options.pop("learning_rate", TEACHING_RATE)
    hyper = FedBEHyper(rate, options.pop("temperature", TEMPERATURE))
    options = dict(samples=0, averaging=WeightAveraging(2, 2)) | options
    columns = federated().columns
    return fed_be(pools, columns, len(IMAGES), distillation, hyper=hyper, **options)


def trained(method, rounds=ROUNDS, devices=None):
    """Pool -> weights after the last round, and the Selection of every round."""
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(method, rounds, mesh)
    data = put(resident_data(federated(), {UNLABELLED: {"image": IMAGES}}))
    seeds, rows = put(np.zeros(1, np.uint32)), put(device_client_states(method.client_states, 1))
    hyper = put(jax.tree.map(np.float32, method.hyper))
    state, _, metrics = programs.train(programs.init(seeds), rows, seeds, 0, rounds, hyper, data)
    assert all(np.all(v) for name, v in metrics.items() if "finite" in name)
    root = jax.random.key(0)
    selections = [jax.tree.map(np.asarray, method.select(n, root)) for n in range(rounds)]
    return {n: np.asarray(server.params["w"][0]) for n, server in state.items()}, selections


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def local(w, client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    targets = np.eye(CLASSES)[federated().columns["label"][rows]]
    for _ in range(EPOCHS):
        w = w - RATE * images.T @ (softmax(images @ w) - targets) / len(images)
    return w


def plain(selections, with_clients, counted):
    start = algorithm().init(jax.random.key(0))
    models = {n: np.asarray(start[n].params["w"], np.float64) for n in POOLS}
    images = IMAGES.astype(np.float64)
    for selection in selections:
        clients = {n: selection.clients[n].tolist() for n in POOLS}
        found = {n: [local(models[n], c) for c in clients[n]] for n in POOLS}
        means = {
            n: np.average(found[n], axis=0, weights=[SIZES[c] for c in clients[n]]) for n in POOLS
        }
        teachers = [w for n in POOLS for w in [means[n], *(found[n] if with_clients else [])]]
        target = np.mean([softmax(images @ w) for w in teachers], axis=0) ** (1 / TEMPERATURE)
        target /= target.sum(-1, keepdims=True)
        for n in POOLS:
            w, kept = means[n], []
            for step, rows in enumerate(selection.examples[UNLABELLED], start=1):
                slope = (softmax(images[rows] @ w) - target[rows]) / CLASSES
                w = w - TEACHING_RATE * images[rows].T @ slope / len(rows)
                kept += [w] if step in counted else []
            models[n] = np.mean(kept, axis=0)
    return models


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({}, (2, 4)),
        pytest.param({"with_clients": False, "averaging": None}, (STEPS,), marks=pytest.mark.slow),
    ],
    ids=["averaged", "alone, last"],
)
def test_fed_be_is_a_plain_loop(options, counted):
    found, selections = trained(algorithm(**options))
    expected = plain(selections, options.get("with_clients", True), counted)
    for name in POOLS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_devices_share_the_work():
    method = algorithm(samples=2)
    one, _ = trained(method, rounds=2)
    three, _ = trained(method, rounds=2, devices=3)
    for name in POOLS:
        np.testing.assert_allclose(three[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_samples_around_a_single_client():
    """Every Dirichlet sample is its model; Gaussian ones lie near it."""
    alone = {"pool": Pool(METHOD, np.array([2]), 1)}
    none = trained(algorithm(alone))[0]["pool"]
    same = trained(algorithm(alone, samples=4, sampling="dirichlet"))[0]["pool"]
    near = trained(algorithm(alone, samples=4))[0]["pool"]
    np.testing.assert_allclose(same, none, rtol=1e-4, atol=1e-5)
    assert 1e-7 < np.abs(near - none).max() < 1e-2
    apart = [trained(algorithm(samples=4, sampling=each))[0]["odd"] for each in SAMPLINGS]
    assert np.abs(apart[0] - apart[1]).max() > 1e-4


@pytest.mark.parametrize(
    ("sampling", "clients"), [("gaussian", (2, 3)), ("gaussian", (0, 0)), ("dirichlet", (2, 3))]
)
def test_teachers_are_a_pools_average_its_clients_and_samples(monkeypatch, sampling, clients):
    counts = []

    def watched(models, ensembles, batch):
        counts.append(tuple(ensembles[name].weights.size for name in POOLS))
        return mean_of_all(models, ensembles, batch)

    monkeypatch.setattr("fedcodist.algorithms.pools.fed_be.mean_of_all", watched)
    method = algorithm(samples=4, sampling=sampling, with_clients=any(clients))
    data = jax.tree.map(jnp.asarray, resident_data(federated(), {UNLABELLED: {"image": IMAGES}}))

    def one_round(state, key):
        inputs = data.read(method.select(0, key))
        return method.round(state, dict.fromkeys(POOLS), Round(0, key, inputs), method.hyper)[0]

    # Shapes alone: nothing is compiled.
    key = jax.random.key(0)
    jax.eval_shape(one_round, jax.eval_shape(method.init, key), key)
    assert set(counts) == {tuple(1 + count + 4 for count in clients)}


@pytest.mark.slow
def test_without_steps_it_is_fed_avg():
    none = algorithm(distillation=DISTILLATION._replace(steps=0), samples=2)
    found = trained(none)[0]
    expected = trained(independent_pools(POOLS, federated().columns))[0]
    for name in POOLS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


@given(st.integers(0, 1000), st.floats(0.1, 0.9))
@settings(max_examples=25)
def test_sharpening_lowers_the_entropy_and_keeps_the_order(seed, temperature):
    p = softmax(np.random.default_rng(seed).normal(size=(4, 5)))
    found = np.asarray(sharpened(jnp.asarray(p, jnp.float32), temperature))
    entropy = lambda q: -(q * np.log(np.maximum(q, 1e-30))).sum(-1)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    assert np.all(entropy(found) < entropy(p))
    assert np.all(found.argmax(-1) == p.argmax(-1))
    np.testing.assert_allclose(sharpened(jnp.asarray(p, jnp.float32), 1.0), p, rtol=1e-4)
    assert sharpened(jnp.array([1.0, 0.0]), 0.5).tolist() == [1.0, 0.0]


@pytest.mark.slow
def test_a_mean_of_students_has_statistics_of_its_own():
    """The statistics after one more pass over the batches, with the mean of the students."""
    model = from_flax_linen(BatchNormMLP(hidden=(6,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    students = {"a": model.init(jax.random.key(0))}
    indices = jnp.arange(STEPS * BATCH).reshape(STEPS, BATCH) % len(IMAGES)
    arguments = dict(
        models={"a": model},
        students=students,
        teachers={"t": lambda batch: jnp.eye(CLASSES)[jnp.arange(BATCH) % CLASSES]},
        targets=lambda _, outputs: outputs["t"],
        unlabelled=Examples({"image": jnp.asarray(IMAGES)}, indices),
        key=jax.random.key(1),
        learning_rates={"a": 0.5},
        settings=DISTILLATION,
    )
    for start in (0, STEPS + 1):
        with pytest.raises(
            ValueError, match=f"averaging.start must be between 1 and .* got {start}"
        ):
            distill_averaged(WeightAveraging(start, 3), len(IMAGES), **arguments)
    found = distill_averaged(WeightAveraging(2, 3), len(IMAGES), **arguments)
    on_the_way = []
    for steps in (2, 5):
        cut = arguments | {
            "settings": DISTILLATION._replace(steps=steps),
            "unlabelled": Examples({"image": jnp.asarray(IMAGES)}, indices[:steps]),
        }
        on_the_way.append(distill(**cut).students["a"])
    last = distill(**arguments)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *(each.params for each in on_the_way))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found.students["a"].params,
        mean,
    )
    mutable = last.students["a"].mutable
    for rows in indices[: -(-len(IMAGES) // BATCH)]:
        variables = students["a"]._replace(params=mean, mutable=mutable)
        _, mutable = model.apply(
            variables, {"image": jnp.asarray(IMAGES)[rows]}, train=True, mask=jnp.ones(BATCH)
        )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found.students["a"].mutable,
        mutable,
    )
    assert found.first_loss["a"] == last.first_loss["a"]
    assert found.last_loss["a"] == last.last_loss["a"] != found.first_loss["a"]


def test_many_students_of_16_bits_are_averaged():
    """A sum of 16 bits stops to grow at 256 ones."""
    network = nn.Dense(CLASSES, param_dtype=jnp.bfloat16, kernel_init=nn.initializers.ones)
    model = from_flax_linen(network, jnp.zeros((1, FEATURES)))
    students, steps = {"a": model.init(jax.random.key(0))}, 300
    averaged = distill_averaged(
        WeightAveraging(1, 1),
        len(IMAGES),
        models={"a": model},
        students=students,
        teachers={"t": lambda batch: jnp.eye(CLASSES)[jnp.arange(BATCH) % CLASSES]},
        targets=lambda _, outputs: outputs["t"],
        unlabelled=Examples({"image": jnp.asarray(IMAGES)}, jnp.zeros((steps, BATCH), jnp.int32)),
        key=jax.random.key(1),
        learning_rates={"a": 0.0},
        settings=DISTILLATION._replace(steps=steps),
    )
    jax.tree.map(np.testing.assert_array_equal, averaged.students["a"].params, students["a"].params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "swag"}, "sampling must be one of .*'gaussian', 'dirichlet'.*, got 'swag'"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"samples": 2.5}, "samples must be an integer of at least 0, got 2.5"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
        (
            {"samples": 0, "with_clients": False, "pools": {"only": next(iter(POOLS.values()))}},
            "samples must be at least 1 with one pool and with_clients=False",
        ),
        ({"averaging": WeightAveraging(0, 5)}, "averaging.start must be at least 1, got 0"),
        (
            {"averaging": WeightAveraging(6, 1)},
            r"averaging\.start must be at most distillation\.steps=5, got 6",
        ),
        ({"averaging": WeightAveraging(5, 0)}, "averaging.every must be at least 1, got 0"),
        (
            {"distillation": DISTILLATION._replace(mixup_beta=1.0)},
            r"distillation\.mixup_beta must be 0",
        ),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        algorithm(**options)
    assert "\n" not in str(error.value)


def test_images_are_answered_once_and_so_not_augmented():
    def flipped(batch, key, positions):
        return batch | {"image": batch["image"] * jax.random.rademacher(key, (), jnp.float32)}

    random = algorithm(distillation=DISTILLATION._replace(preprocess=flipped))
    with pytest.raises(ValueError, match="preprocess must not be random where answers are cached"):
        trained(random, 1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_streamed_images_give_the_same(steps):
    """Of which only a round's own are answered, and statistics are of one pass all the same."""
    model = from_flax_linen(BatchNormMLP(hidden=(6,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    method = fed_avg(model, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    pools = {"pool": Pool(method, np.arange(6), 2)}
    own = DISTILLATION._replace(steps=steps)
    found = []
    for source in (resident_data, StreamedData):
        data = source(federated(), {UNLABELLED: {"image": IMAGES}})
        chosen = algorithm(pools, own, averaging=WeightAveraging(2, 2))
        experiment = Experiment(chosen, data, {"train": federated()}, rounds=1)
        found.append(run_experiment(experiment, show_progress=False).variables["pool"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *found)
