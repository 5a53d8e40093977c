"""FedNTD against plain NumPy in float64, and against what it must reduce to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_ntd import FedNTDHyper, fed_ntd, not_true_divergence
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.readout import Readout
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3), 4, 4
RATE, EPOCHS, ROUNDS = 0.3, 3, 3
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
MODEL = softmax_regression(FEATURES, CLASSES)


def taught(weight=0.7, temperature=2.0, model=MODEL):
    return fed_ntd(model, TRAINING, hyper=FedNTDHyper(RATE, 1.0, weight, temperature))


def run(method, execution=Execution(), classes=CLASSES):
    """The weights after the last round, and the cohorts."""
    data = random_clients(SIZES, FEATURES, classes)
    pool = Pool(method, np.arange(len(SIZES)), 3)
    algorithm = independent_pools({"pool": pool}, data.columns, execution)
    experiment = Experiment(algorithm, resident_data(data, {}), {"train": data}, ROUNDS)
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(ROUNDS)]
    return trained.variables["pool"].params["w"][0], cohorts


@functools.cache
def averaged(classes=CLASSES):
    model = softmax_regression(FEATURES, classes)
    return run(fed_avg(model, TRAINING, hyper=FedAvgHyper(RATE, 1.0)), classes=classes)[0]


def softmax(logits, counts=1.0):
    shares = counts * np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def plain_loop(cohorts, weight, temperature):
    columns = random_clients(SIZES, FEATURES, CLASSES).columns
    w = np.asarray(MODEL.init(None).params["w"], np.float64)
    for cohort in cohorts:
        results = []
        for c in cohort:
            rows = slice(sum(SIZES[:c]), sum(SIZES[: c + 1]))
            images = columns["image"][rows].astype(np.float64)
            true = np.eye(CLASSES)[columns["label"][rows]]
            target = softmax(images @ w / temperature, 1 - true)
            own = w
            for _ in range(EPOCHS):
                # d/dz of tau^2 KL(q || softmax(z / tau)) is tau (softmax(z / tau) - q).
                pull = temperature * (softmax(images @ own / temperature, 1 - true) - target)
                slope = softmax(images @ own) - true + weight * pull
                own = own - RATE * images.T @ slope / len(images)
            results.append(own)
        w = np.average(results, axis=0, weights=[SIZES[c] for c in cohort])
    return w


@pytest.mark.parametrize("execution", [Execution(), Execution("vmap", 2)])
def test_rounds_are_a_plain_loop(execution):
    w, cohorts = run(taught(), execution)
    np.testing.assert_allclose(w, plain_loop(cohorts, 0.7, 2.0), rtol=1e-4, atol=1e-6)
    assert np.abs(w - plain_loop(cohorts, 0.0, 2.0)).max() > 1e-3


def test_without_a_weight_it_is_fed_avg():
    np.testing.assert_allclose(run(taught(weight=0.0))[0], averaged(), rtol=1e-6)


def test_of_two_classes_one_is_left_and_it_is_fed_avg():
    ours, _ = run(taught(weight=5.0, model=softmax_regression(FEATURES, 2)), classes=2)
    np.testing.assert_allclose(ours, averaged(classes=2), rtol=1e-5)


def test_the_divergence_does_not_see_the_true_class():
    draws = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    labels = jnp.array([0, 4, 2])
    found = not_true_divergence(*draws, labels, 2.0)
    for row, label in enumerate(labels.tolist()):
        p, q = (softmax(np.delete(each[row], label)[None] / 2.0)[0] for each in draws)
        np.testing.assert_allclose(found[row], 2.0**2 * np.sum(q * np.log(q / p)), rtol=1e-5)
    changed = jnp.asarray(draws).at[:, jnp.arange(3), labels].set(jnp.array([[1e4], [-1e4]]))
    slope = jax.grad(lambda z: jnp.sum(not_true_divergence(z, changed[1], labels, 2.0)))(changed[0])
    np.testing.assert_allclose(not_true_divergence(*changed, labels, 2.0), found, rtol=1e-6)
    np.testing.assert_array_equal(slope[jnp.arange(3), labels], 0)
    assert np.all(np.isfinite(slope))


def test_the_teacher_is_in_evaluation_mode():
    modes = []

    def apply(variables, batch, *, train=False, key=None, **_):
        modes.append((train, key is not None))
        return MODEL.apply(variables, batch)

    communication_of(
        taught(model=MODEL._replace(apply=apply)), random_clients(SIZES, FEATURES, CLASSES).columns
    )
    assert set(modes) == {(True, True), (False, False)}


def test_a_client_exchanges_what_fed_avgs_does():
    columns = random_clients(SIZES, FEATURES, CLASSES).columns
    plain = communication_of(fed_avg(MODEL, TRAINING), columns)
    assert communication_of(taught(), columns) == plain


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weight=-1.0), r"hyper\.not_true_weight must be .*at least 0, got -1.0"),
        (dict(temperature=0.0), r"hyper\.temperature must be .*above 0, got 0.0"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        taught(**options)
    assert "\n" not in str(error.value)


def test_models_of_text_have_no_logits():
    def apply(variables, batch, **_):
        return Readout(batch["image"][:, None], variables.params["w"], None, None), {}

    with pytest.raises(TypeError, match=r"must return logits .*, got a Readout"):
        run(taught(model=MODEL._replace(apply=apply)))
