"""Fed-ET: rounds against a plain loop, the consensus, what it must reduce to, mistakes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fetch_sgd import fetch_sgd
from fedcodist.algorithms.pools.fed_et import SERVER, FedETHyper, consensus_targets, fed_et
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.headed import headed
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTH = (5, 2, 7, 3, 4), 3, 4, 3
RATE, LARGE_RATE, EPOCHS, ROUNDS, STEPS, BATCH = 0.3, 0.5, 2, 2, 3, 4
GENERATOR = np.random.default_rng(0)
UNLABELLED_IMAGES = GENERATOR.normal(size=(9, FEATURES))
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
}
TRAINING = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def network(hidden, width=WIDTH, classes=CLASSES):
    backbone = nn.Sequential([nn.Dense(hidden), nn.tanh])
    return headed(backbone, jnp.zeros((1, FEATURES)), classes, width)


def pools_of(**models):
    clients = {"a": [0, 2, 4], "b": [1, 3, 4]}
    return {
        name: Pool(
            fed_avg(model, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0)), clients[name], 2
        )
        for name, model in models.items()
    }


POOLS = pools_of(a=network(2), b=network(5))
LARGE = network(8)
DISTILLATION = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0)
build = functools.partial(
    fed_et, POOLS, COLUMNS, len(UNLABELLED_IMAGES), LARGE, DISTILLATION, FedETHyper(LARGE_RATE, 0.4)
)
ALGORITHM = build()


@functools.cache
def programs_of(devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(ALGORITHM, ROUNDS, mesh), mesh


def run(hyper=None, devices=None):
    """(first state, last state) of the first seed."""
    programs, mesh = programs_of(devices)
    put = functools.partial(replicate, mesh=mesh)
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {UNLABELLED: {"image": UNLABELLED_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    before = jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(np.float64, hyper or ALGORITHM.hyper)
    after, *_ = programs.train(
        *put((before, dict.fromkeys(POOLS), seeds, np.int32(0), np.int32(ROUNDS), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after))


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ----------------------------------------------------------------------------------- plain loop


def logits(params, images):
    (dense,) = params["backbone"].values()
    hidden = jnp.tanh(images @ dense["kernel"] + dense["bias"])
    hidden = hidden @ params["embedding"]["kernel"] + params["embedding"]["bias"]
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def cross_entropy(logits, targets):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1))


def labels_loss(params, images, targets):
    return cross_entropy(logits(params, images), targets)


def consensus_loss(params, images, labels, softs, differs, diversity):
    log_p = jax.nn.log_softmax(logits(params, images))
    away = differs * jnp.sum(softs * (jnp.log(softs) - log_p), axis=-1)
    return labels_loss(params, images, labels) + diversity * jnp.mean(away)


@functools.cache
def slope_of(loss):
    return jax.jit(jax.grad(loss))


def descend(loss, params, rate, *about):
    gradient = slope_of(loss)(params, *about)
    return jax.tree.map(lambda p, g: np.asarray(p) - rate * np.asarray(g), params, gradient)


def local(params, client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images, targets = COLUMNS["image"][rows], np.eye(CLASSES)[COLUMNS["label"][rows]]
    for _ in range(EPOCHS):
        params = descend(labels_loss, params, RATE, images, targets)
    return params


def mean(trees, weights=None):
    return jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=weights), *trees)


def plain_targets(members, images):
    """Example by example: (consensus one-hot, soft target of those who differ, whether any do)."""
    all_answers = np.stack([np.asarray(logits(params, images)) for params in members], axis=1)
    for answers in all_answers:
        confidence = answers.var(axis=1)
        label = np.argmax(confidence @ answers / confidence.sum())
        others = [i for i, answer in enumerate(answers) if answer.argmax() != label]
        soft = np.ones(CLASSES) / CLASSES
        if others:
            said = confidence[others] @ answers[others] / confidence[others].sum()
            soft = np.exp(said) / np.exp(said).sum()
        yield np.eye(CLASSES)[label], soft, float(bool(others))


def test_fed_et_is_a_plain_loop():
    before, after = run()
    hyper = ALGORITHM.hyper
    large = before.server.params
    models = {name: before.pools[name].params for name in POOLS}
    differing = 0
    for round in range(ROUNDS):
        selection = ALGORITHM.select(round, jax.random.key(0))
        members = []
        for name in POOLS:
            cohort = np.asarray(selection.clients[name]).tolist()
            trained = [local(models[name], client) for client in cohort]
            models[name] = mean(trained, [SIZES[client] for client in cohort])
            members += trained
        large = {**large, "head": mean([params["head"] for params in members])}
        for rows in np.asarray(selection.examples[UNLABELLED]):
            images = UNLABELLED_IMAGES[rows]
            labels, softs, differs = map(
                np.array, zip(*plain_targets(members, images), strict=True)
            )
            differing += differs.sum()
            about = (images, labels, softs, differs, hyper.diversity)
            large = descend(consensus_loss, large, LARGE_RATE, *about)
        models = {name: {**params, "head": large["head"]} for name, params in models.items()}
    assert 0 < differing < ROUNDS * STEPS * BATCH
    # Flax's parameters are float32.
    assert_close(after.server.params, large, rtol=1e-4, atol=1e-6)
    for name in POOLS:
        assert_close(after.pools[name].params, models[name], rtol=1e-4, atol=1e-6)


def test_small_models_have_the_large_ones_head():
    _, after = run()
    for name in POOLS:
        assert_close(after.pools[name].params["head"], after.server.params["head"])


def test_a_large_model_that_does_not_learn_gives_back_the_mean_head():
    before, after = run(ALGORITHM.hyper._replace(learning_rate=0.0))
    rest = lambda params: {name: part for name, part in params.items() if name != "head"}
    assert_close(rest(after.server.params), rest(before.server.params))
    assert not np.allclose(
        after.server.params["head"]["kernel"], before.server.params["head"]["kernel"]
    )


@pytest.mark.slow
def test_devices_share_the_work():
    _, one = run()
    _, two = run(devices=2)
    assert_close(two, one)


# ------------------------------------------------------------------------------------ consensus


def test_confident_clients_decide():
    """A sure one outvotes two that are hardly sure of another class."""
    answers = jnp.array([[[9.0, 0, 0]], [[0, 1.0, 0]], [[0, 1.0, 0]]])
    target = consensus_targets(answers, 0.5)
    soft = jax.nn.softmax(jnp.array([0, 1.0, 0]))
    assert_close(np.asarray(target[0]), np.asarray(jnp.array([1.0, 0, 0]) + 0.5 * soft))


def test_without_disagreement_or_diversity_the_label_is_all():
    agreed = jnp.array([[[2.0, 0, 0]], [[1.0, 0, 0.5]]])
    assert_close(np.asarray(consensus_targets(agreed, 0.5)), np.array([[1.0, 0, 0]]))
    answers = jnp.asarray(GENERATOR.normal(size=(4, 6, 3)))
    target = np.asarray(consensus_targets(answers, 0.0))
    assert set(np.unique(target)) == {0.0, 1.0}
    assert_close(target.sum(-1), np.ones(6))


def test_clients_in_another_order_are_the_same_ensemble():
    answers = jnp.asarray(GENERATOR.normal(size=(4, 6, 3)))
    assert_close(
        np.asarray(consensus_targets(answers[::-1], 0.3)),
        np.asarray(consensus_targets(answers, 0.3)),
    )


# --------------------------------------------------------------------------- what it refuses


def test_bytes_are_those_of_the_small_models():
    small = 2 * (FEATURES + 1) + WIDTH * 3 + CLASSES * (WIDTH + 1)
    about = ALGORITHM.communication["a"]
    # Up goes the client's weight too.
    assert (about.down, about.up) == (4 * small, 4 * small + 4)
    assert set(ALGORITHM.predictors) == {"a", "b", SERVER}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(server=network(8, width=4)), r"server must have models whose heads have one shape"),
        (
            dict(pools=pools_of(a=network(2), b=network(2, 4))),
            r"pools must have models whose heads",
        ),
        (dict(hyper=FedETHyper(diversity=-1)), r"hyper\.diversity must be"),
        (dict(hyper=FedETHyper(-1.0)), r"hyper\.learning_rate must be"),
        (dict(num_unlabelled=0), "num_unlabelled must be"),
        (
            dict(distillation=DISTILLATION._replace(divergence="jensen_shannon")),
            r"distillation\.divergence and \.direction must be the defaults for fed_et",
        ),
        (dict(pools={SERVER: POOLS["a"]}), "pools must not have the name 'server'"),
        (
            dict(pools={"a": POOLS["a"]._replace(method=fetch_sgd(network(2)))}),
            r"pools\['a'\]\.method must send changes of whole models",
        ),
    ],
)
def test_bad_input_is_one_line(change, message):
    arguments = dict(
        pools=POOLS, columns=COLUMNS, num_unlabelled=9, server=LARGE, distillation=DISTILLATION
    )
    with pytest.raises(ValueError, match=message) as error:
        fed_et(**(arguments | change))
    assert "\n" not in str(error.value)
