"""MOON against plain NumPy in float64, and against what it must reduce to."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.moon import MoonHyper, contrast, moon
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import LayerOutputs, of_logits, with_layers
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.models.headed import headed
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTH = (5, 2, 7, 3), 3, 4, 6
RATE, EPOCHS, ROUNDS = 0.3, 3, 4
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
COLUMNS = random_clients(SIZES, FEATURES, CLASSES).columns


def first_weights():
    draws = np.random.default_rng(7)
    shapes = {"body": (FEATURES, WIDTH), "head": (WIDTH, CLASSES)}
    return {name: draws.normal(size=shape) for name, shape in shapes.items()}


def linear(changed=lambda outputs: outputs):
    """Two matrices, the embedding between them."""

    def init(key):
        return Variables(jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), first_weights()), {})

    def apply(variables, batch, **_):
        embedding = batch["image"] @ variables.params["body"]
        return changed(LayerOutputs(embedding @ variables.params["head"], (embedding,))), {}

    return Model(init, apply, of_logits(cross_entropy), {}, CLASSES)


MODEL = linear()


def contrasted(weight=2.0, temperature=0.5, model=MODEL):
    return moon(model, TRAINING, hyper=MoonHyper(RATE, 1.0, weight, temperature))


def run(method, rounds=ROUNDS, execution=Execution()):
    """The weights after the last round, and the cohorts."""
    data = random_clients(SIZES, FEATURES, CLASSES)
    pool = Pool(method, np.arange(len(SIZES)), 3)
    algorithm = independent_pools({"pool": pool}, data.columns, execution)
    experiment = Experiment(algorithm, resident_data(data, {}), {"train": data}, rounds)
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    return jax.tree.map(lambda leaf: leaf[0], trained.variables["pool"].params), cohorts


def test_a_network_that_is_undefined_at_zeros_is_trained():
    """An embedding of length 1. Before its first participation a client's previous model is zeros."""

    def unit(outputs):
        embedding = outputs.hidden[-1]
        embedding = embedding / jnp.linalg.norm(embedding, axis=-1, keepdims=True)
        return LayerOutputs(outputs.logits, (embedding,))

    found, _ = run(contrasted(model=linear(unit)), rounds=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@functools.cache
def averaged(rounds=ROUNDS):
    return run(fed_avg(MODEL, TRAINING, hyper=FedAvgHyper(RATE, 1.0)), rounds)[0]


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def cosine_and_slope(rows, others):
    length, other = (np.linalg.norm(each, axis=1, keepdims=True) for each in (rows, others))
    cosine = np.sum(rows * others, 1, keepdims=True) / (length * other)
    return cosine, (others / other - cosine * rows / length) / length


def plain_loop(cohorts, weight, temperature):
    w, previous = first_weights(), {}
    for cohort in cohorts:
        results = []
        for c in cohort:
            rows = slice(sum(SIZES[:c]), sum(SIZES[: c + 1]))
            images = COLUMNS["image"][rows].astype(np.float64)
            labels = np.eye(CLASSES)[COLUMNS["label"][rows]]
            own = w
            for _ in range(EPOCHS):
                embedding = images @ own["body"]
                slope = softmax(embedding @ own["head"]) - labels
                pull = slope @ own["head"].T
                if c in previous:
                    near, to_near = cosine_and_slope(embedding, images @ w["body"])
                    far, to_far = cosine_and_slope(embedding, images @ previous[c]["body"])
                    odds = 1 / (1 + np.exp((near - far) / temperature))
                    pull = pull + weight * odds * (to_far - to_near) / temperature
                gradient = {"body": images.T @ pull, "head": embedding.T @ slope}
                own = {name: own[name] - RATE * gradient[name] / len(images) for name in own}
            previous[c] = own
            results.append(own)
        weights = [SIZES[c] for c in cohort]
        w = {name: np.average([r[name] for r in results], axis=0, weights=weights) for name in w}
    return w


def same(left, right, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), left, right)


@pytest.mark.parametrize("execution", [Execution(), Execution("vmap", 2)])
def test_rounds_are_a_plain_loop(execution):
    found, cohorts = run(contrasted(), execution=execution)
    assert len(set(map(tuple, cohorts))) > 1  # somebody's previous model is of an earlier round
    same(found, plain_loop(cohorts, 2.0, 0.5), rtol=1e-4, atol=1e-5)
    assert np.abs(found["body"] - plain_loop(cohorts, 0.0, 0.5)["body"]).max() > 1e-3


def test_without_a_weight_it_is_fed_avg():
    same(run(contrasted(weight=0.0))[0], averaged(), rtol=1e-6)


def test_who_has_not_trained_has_nothing_to_be_contrasted_with():
    same(run(contrasted(weight=5.0), rounds=1)[0], averaged(rounds=1), rtol=1e-6)


def test_the_contrast_is_the_papers():
    z, near, far = np.random.default_rng(1).normal(size=(3, 4, 5))
    near_cosine, far_cosine = (cosine_and_slope(z, each)[0][:, 0] for each in (near, far))
    first, second = np.exp(near_cosine / 0.5), np.exp(far_cosine / 0.5)
    found = contrast(*map(jnp.asarray, (z, near, far)), 0.5)
    np.testing.assert_allclose(found, -np.log(first / (first + second)), rtol=1e-5)


def test_embeddings_of_16_bits_are_compared_in_float32():
    near = (1 + 0.1 * np.random.default_rng(1).normal(size=(3, 4, 5))).astype(jnp.bfloat16)
    of_both = jax.jit(lambda *both: [contrast(*embeddings, 0.5) for embeddings in both])
    found, expected = of_both(near, near.astype(np.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


def test_embeddings_of_zeros_have_a_gradient():
    zeros, ones = jnp.zeros((1, 3)), jnp.ones((1, 3))
    for z, near, far in ((zeros, ones, zeros), (ones, zeros, zeros), (zeros, zeros, zeros)):
        value, slope = jax.value_and_grad(lambda z, *o: jnp.sum(contrast(z, *o, 0.5)))(z, near, far)
        assert np.isfinite(value) and np.all(np.isfinite(slope))
    np.testing.assert_allclose(contrast(zeros, ones, ones, 0.5), np.log(2.0), rtol=1e-6)


def test_a_client_keeps_its_trained_model():
    method = contrasted()
    first = method.init_client_state()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(first))
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(first.previous) == shapes(MODEL.init(jax.random.key(0)))


def test_the_others_are_in_evaluation_mode():
    modes = []

    def apply(variables, batch, *, train=False, key=None, **_):
        modes.append((train, key is not None))
        return MODEL.apply(variables, batch)

    communication_of(contrasted(model=MODEL._replace(apply=apply)), COLUMNS)
    assert set(modes) == {(True, True), (False, False)}


def test_a_client_exchanges_what_fed_avgs_does():
    plain = communication_of(fed_avg(MODEL, TRAINING), COLUMNS)
    assert communication_of(contrasted(), COLUMNS) == plain


@pytest.mark.parametrize(
    "make",
    [
        lambda example: headed(nn.Dense(5), example, CLASSES),
        lambda example: with_layers(
            nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(CLASSES)]), example, ["layers_0"]
        ),
    ],
)
def test_networks_of_flax_have_embeddings(make):
    found = communication_of(contrasted(model=make(jnp.zeros((1, FEATURES)))), COLUMNS)
    assert found.down == 4 * (5 * (FEATURES + 1) + CLASSES * 6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weight=-1.0), r"hyper\.contrast_weight must be .*at least 0, got -1.0"),
        (dict(temperature=0.0), r"hyper\.temperature must be .*above 0, got 0.0"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        contrasted(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "model, message",
    [
        (
            softmax_regression(FEATURES, CLASSES),
            "an embedding beside its logits, .* it returns none",
        ),
        (linear(lambda outputs: outputs._replace(hidden=())), "it returns none"),
        (
            linear(lambda outputs: outputs._replace(hidden=(outputs.logits[:, None],))),
            r"must return an embedding \[batch, width\], got \(\d, 1, 3\)",
        ),
    ],
)
def test_networks_without_an_embedding(model, message):
    with pytest.raises(TypeError, match=message) as error:
        communication_of(contrasted(model=model), COLUMNS)
    assert "\n" not in str(error.value)
