"""LG-FedAvg and FedGen, whose parties share heads: rounds against plain loops, limits, bytes, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.parties import head_generator
from fedcodist.algorithms.parties.fed_gen import FedGenHyper, FedGenState, fed_gen, shares_of
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.head_generator import Generator
from fedcodist.algorithms.parties.lg_fed_avg import LGFedAvgHyper, lg_fed_avg
from fedcodist.algorithms.parties.party import PartiesResult
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Inputs, Round
from fedcodist.core.layer_outputs import LayerOutputs, of_logits
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.embedding_generator import diversity
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTH = (5, 2, 7), 3, 4, 2
RATE, EPOCHS, ROUNDS = 0.3, 2, 3
DRAWN = head_generator.drawn
GENERATOR = np.random.default_rng(0)
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


@pytest.fixture(scope="module", autouse=True)
def without_chance():
    """Labels and noise are the same in every draw, so that a plain loop has them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_generator, "drawn", not_drawn)
        yield


def not_drawn(key, label_shares, count, noise):
    """Labels in turn, of those that there are; noise that is different in every place."""
    labels = jnp.argsort(label_shares <= 0, stable=True)
    places = jnp.arange(count)
    kinds = jnp.sum(label_shares > 0)
    return labels[places % kinds], jnp.sin(1.0 + jnp.arange(count * noise)).reshape(count, noise)


def embedding(params, images):
    """Of both architectures: with a hidden layer, and linear."""
    hidden = jnp.tanh(images @ params["u"]) if "u" in params else images
    return hidden @ params["v"]


def logits_of(params, images):
    return embedding(params, images) @ params["head"]["kernel"] + params["head"]["bias"]


def network(hidden=None, width=WIDTH) -> Model:
    def init(key):
        keys = jax.random.split(key, 4)
        params = {"v": jax.random.normal(keys[0], (hidden or FEATURES, width))}
        if hidden:
            params["u"] = jax.random.normal(keys[1], (FEATURES, hidden))
        kernel = jax.random.normal(keys[2], (width, CLASSES))
        params["head"] = {"kernel": kernel, "bias": jax.random.normal(keys[3], (CLASSES,))}
        return Variables(params, {})

    def apply(variables, batch, **_):
        params, images = variables.params, batch["image"]
        outputs = LayerOutputs(logits_of(params, images), (embedding(params, images),))
        return outputs, variables.mutable

    metrics = {"accuracy": of_logits(accuracy())}
    return Model(init, apply, of_logits(cross_entropy), metrics, CLASSES)


GROUPS = {
    "hidden": PartyGroup(network(3), np.array([2, 0])),
    "linear": PartyGroup(network(), np.array([1])),
}
GENERATOR_STEPS = 3
SMALL = Generator(2, 5, GENERATOR_STEPS, 6, lambda rate: optax.sgd(rate, momentum=0.9), 4)
GEN_HYPER = FedGenHyper(RATE, 0.2, 0.7, 0.5)

ALGORITHMS = {
    "lg": lambda: lg_fed_avg(GROUPS, TRAINING, hyper=LGFedAvgHyper(RATE)),
    "lg, plain mean": lambda: lg_fed_avg(GROUPS, TRAINING, False, LGFedAvgHyper(RATE)),
    "lg, vmap": lambda: lg_fed_avg(
        GROUPS, TRAINING, hyper=LGFedAvgHyper(RATE), execution=Execution("vmap")
    ),
    "gen": lambda: fed_gen(GROUPS, TRAINING, SMALL, hyper=GEN_HYPER),
    "gen, weighted": lambda: fed_gen(GROUPS, TRAINING, SMALL, True, 1, GEN_HYPER),
    "gen, vmap": lambda: fed_gen(
        GROUPS, TRAINING, SMALL, hyper=GEN_HYPER, execution=Execution("vmap")
    ),
}


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    algorithm = ALGORITHMS[name]()
    return algorithm, build_programs(algorithm, ROUNDS, mesh), mesh


def run(name, hyper=None, devices=None, rounds=ROUNDS):
    """(first state, last state, metrics) of the first seed."""
    algorithm, programs, mesh = programs_of(name, devices)
    put = functools.partial(replicate, mesh=mesh)
    data = resident_data(FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES])))
    seeds = put(np.zeros(1, np.uint32))
    before = jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper or algorithm.hyper)
    after, _, metrics = programs.train(
        *put((before, {}, seeds, np.int32(0), np.int32(rounds), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after, metrics))


# ---------------------------------------------------------------------------------- plain loops


def examples_of(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return COLUMNS["image"][rows], COLUMNS["label"][rows]


def mean_cross_entropy(logits, labels):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


def descended(params, loss, steps=1):
    slope = jax.jit(jax.grad(loss))
    for _ in range(steps):
        params = jax.tree.map(
            lambda p, g: np.asarray(p) - RATE * np.asarray(g), params, slope(params)
        )
    return params


def alone(params, client, steps=EPOCHS):
    images, labels = examples_of(client)
    loss = lambda params: mean_cross_entropy(logits_of(params, images), labels)
    return descended(params, loss, steps)


def params_of(models):
    """Every party's parameters, in the order of parties."""
    found = {}
    for name, group in GROUPS.items():
        for index, client in enumerate(sorted(group.clients.tolist())):
            found[client] = jax.tree.map(lambda leaf, i=index: leaf[i], models[name].params)
    return [found[client] for client in range(len(SIZES))]


def mean_of(trees, weights):
    weights = np.asarray(weights, np.float64) / np.sum(weights)
    return jax.tree.map(
        lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)), *trees
    )


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ------------------------------------------------------------------------------------ LG-FedAvg


@pytest.mark.parametrize(("name", "weights"), [("lg", SIZES), ("lg, plain mean", (1, 1, 1))])
def test_lg_fed_avg_is_a_plain_loop(name, weights):
    before, after, _ = run(name)
    models = params_of(before)
    for _ in range(ROUNDS):
        models = [alone(params, client) for client, params in enumerate(models)]
        head = mean_of([params["head"] for params in models], weights)
        models = [params | {"head": head} for params in models]
    assert_close(params_of(after), models)


def test_all_begin_with_one_head_and_own_representations():
    before, _, _ = run("lg")
    first, *others = params_of(before)
    for params in others:
        assert_close(params["head"], first["head"], rtol=0)
    assert not np.allclose(first["v"], params_of(before)[2]["v"])


def test_one_party_trains_alone():
    """Its mean is its own head, and rounds are only longer training."""
    groups = {"linear": PartyGroup(network(), np.array([0]))}
    ALGORITHMS["lg, one party"] = lambda: lg_fed_avg(groups, TRAINING, hyper=LGFedAvgHyper(RATE))
    before, after, _ = run("lg, one party")
    start, found = (
        jax.tree.map(lambda leaf: leaf[0], models["linear"].params) for models in (before, after)
    )
    assert_close(found, alone(start, 0, ROUNDS * EPOCHS))


def test_vmap_is_scan():
    assert_close(run("lg, vmap")[1], run("lg")[1], atol=1e-12)


@pytest.mark.slow
def test_devices_share_the_parties():
    assert_close(run("lg", devices=2)[1], run("lg")[1], atol=1e-9)


def test_lg_fed_avg_sends_heads_alone():
    for party in ("hidden_0", "linear"):
        about = ALGORITHMS["lg"]().communication[party]
        # Parameters are float64 here.
        assert about.up == about.down == 8 * (WIDTH + 1) * CLASSES


def test_every_party_reports_its_training():
    _, _, metrics = run("lg")
    assert metrics["linear/client_examples"].tolist() == [EPOCHS * SIZES[1]] * ROUNDS
    assert metrics["linear/finite"].all()


# --------------------------------------------------------------------------------------- FedGen


def generated(generator, count, labels):
    """Embeddings of a generator [count, width], their labels, and the noise."""
    noise = np.sin(1.0 + np.arange(count * 2)).reshape(count, 2)
    y = np.array(labels)[np.arange(count) % len(labels)]
    x = np.concatenate([noise, np.eye(CLASSES)[y]], axis=1)
    first, last = generator["Dense_0"], generator["Dense_1"]
    hidden = jnp.maximum(x @ first["kernel"] + first["bias"], 0)
    return hidden @ last["kernel"] + last["bias"], y, noise


def of_head(head, z):
    return z @ head["kernel"] + head["bias"]


@pytest.mark.parametrize(("name", "weights"), [("gen", (1, 1, 1)), ("gen, weighted", SIZES)])
def test_fed_gen_is_a_plain_loop(name, weights):
    """The generator learns from the mean of all heads' logits, head by head, and with momentum."""
    before, after, _ = run(name)
    models, generator = params_of(before.models), before.generator
    weights, velocity = np.array(weights) / sum(weights), None
    for round in range(ROUNDS):
        for client in range(3):
            images, labels = examples_of(client)
            z, y, _ = generated(generator, 4, range(CLASSES))
            warm = 0.0 if round == 0 and name == "gen, weighted" else GEN_HYPER.generated_weight

            def local(params, images=images, labels=labels, z=z, y=y, warm=warm):
                loss = mean_cross_entropy(logits_of(params, images), labels)
                return loss + warm * mean_cross_entropy(of_head(params["head"], z), y)

            models[client] = descended(models[client], local, EPOCHS)
        heads = [params["head"] for params in models]

        def teaching(generator, heads=heads):
            z, y, noise = generated(generator, 6, range(CLASSES))
            logits = sum(w * of_head(head, z) for w, head in zip(weights, heads, strict=True))
            apart = np.array([[np.mean((a - b) ** 2) for b in noise] for a in noise])
            pairs = jnp.stack([jnp.mean(jnp.abs(z - row), axis=1) for row in z])
            diverse = jnp.exp(-jnp.mean(apart * pairs))
            return mean_cross_entropy(logits, y) + GEN_HYPER.diversity_weight * diverse

        for _ in range(GENERATOR_STEPS):
            gradient = jax.jit(jax.grad(teaching))(generator)
            old = velocity or jax.tree.map(jnp.zeros_like, gradient)
            velocity = jax.tree.map(lambda v, g: 0.9 * v + g, old, gradient)
            generator = jax.tree.map(lambda p, v: p - 0.2 * v, generator, velocity)
        head = mean_of(heads, weights)
        models = [params | {"head": head} for params in models]
    assert_close(params_of(after.models), models)
    assert_close(after.generator, generator)
    counts = np.bincount(COLUMNS["label"], minlength=CLASSES)
    assert_close(after.label_shares, counts / counts.sum())


def plainly(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_every_step_of_the_generator_draws_anew(monkeypatch):
    drawn = []

    def watched(settings, params, head, label_shares, count, key, diversity_weight):
        drawn.append(plainly(key))
        return params**2

    monkeypatch.setattr(head_generator, "generated_loss", watched)
    optimizer = optax.sgd(0.2)
    settings = SMALL._replace(optimizer=optax.sgd)
    start = (jnp.ones(()), optimizer.init(jnp.ones(())))
    with jax.disable_jit():  # so that the keys of a loop's steps have values
        head_generator.train_generator(settings, start, {}, None, GEN_HYPER, jax.random.key(0))
    assert len(set(drawn)) == len(drawn) == GENERATOR_STEPS


def test_the_generator_has_another_key_in_every_round(monkeypatch):
    """Parties that have nothing to train."""
    given, head = [], (jnp.zeros(1), jnp.ones(CLASSES))

    def watched(settings, start, head, label_shares, hyper, key):
        given.append(plainly(key))
        return start, jnp.zeros(1)

    module = "fedcodist.algorithms.parties.fed_gen"
    monkeypatch.setattr(f"{module}.train_generator", watched)
    none = PartiesResult(head, {}, {}, {})
    monkeypatch.setattr(f"{module}.run_parties", lambda *_: none)
    algorithm = ALGORITHMS["gen"]()
    state = FedGenState({}, None, None, jnp.ones(CLASSES) / CLASSES)
    for index in range(3):
        round = Round(jnp.int32(index), jax.random.key(0), Inputs({}, {}))
        algorithm.round(state, {}, round, algorithm.hyper)
    assert len(set(given)) == len(given) == 3


def test_fed_gen_without_generated_embeddings_is_lg_fed_avg():
    _, found, _ = run("gen", GEN_HYPER._replace(generated_weight=0.0))
    _, expected, _ = run("lg, plain mean")
    assert_close(params_of(found.models), params_of(expected))


def test_generated_embeddings_need_a_key_in_training_alone():
    model = head_generator.with_generated_loss(network(), lambda head, key: jnp.zeros(()))
    variables, batch = model.init(jax.random.key(0)), {"image": COLUMNS["image"][:2]}
    assert model.apply(variables, batch)[0].logits.shape == (2, CLASSES)
    with pytest.raises(ValueError, match="key must be given in training"):
        model.apply(variables, batch, train=True)


def test_a_label_that_nobody_has_is_not_drawn():
    shares = jnp.array([0.25, 0.0, 0.75])
    labels, noise = DRAWN(jax.random.key(0), shares, 4000, 3)
    np.testing.assert_allclose(np.bincount(labels, minlength=3) / 4000, shares, atol=0.03)
    assert noise.shape == (4000, 3)
    assert abs(float(noise.mean())) < 0.03 and float(noise.std()) == pytest.approx(1, abs=0.03)


def test_shares_of_noised_counts_are_a_distribution():
    """Noise in a reduction makes sums negative. Without positive counts no label is known."""
    np.testing.assert_allclose(shares_of(jnp.array([6.0, 2.0, -0.5])), [0.75, 0.25, 0], rtol=1e-6)
    for counts in (jnp.zeros(3), jnp.array([-1.0, 0, -2])):
        np.testing.assert_allclose(shares_of(counts), np.full(3, 1 / 3), rtol=1e-6)


def test_embeddings_that_differ_are_more_diverse():
    noise = jnp.asarray(GENERATOR.normal(size=(6, 2)))
    same = jnp.ones((6, WIDTH))
    assert float(diversity(noise, same)) == pytest.approx(1)
    far = jnp.asarray(GENERATOR.normal(size=(6, WIDTH)))
    assert float(diversity(noise, 10 * far)) < float(diversity(noise, far)) < 1


def test_fed_gen_on_vmap_is_on_scan():
    assert_close(run("gen, vmap")[1], run("gen")[1], atol=1e-12)


@pytest.mark.slow
def test_devices_share_the_parties_of_fed_gen():
    assert_close(run("gen", devices=2)[1], run("gen")[1], atol=1e-9)


def test_fed_gen_sends_heads_label_counts_and_the_generator():
    about = ALGORITHMS["gen"]().communication["linear"]
    head, labels = 8 * (WIDTH + 1) * CLASSES, 4 * CLASSES
    generator = 8 * ((2 + CLASSES + 1) * 5 + (5 + 1) * WIDTH)
    assert about.up == head + labels and about.down == about.up + generator


# ------------------------------------------------------------------------------------ bad input


def headless() -> Model:
    model = network()
    return model._replace(init=lambda key: Variables({"w": jnp.zeros((FEATURES, CLASSES))}, {}))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: lg_fed_avg({"a": PartyGroup(headless(), [0])}),
            "groups must have models with a linear head",
        ),
        (
            lambda: lg_fed_avg(
                {"a": PartyGroup(network(), [0]), "b": PartyGroup(network(width=3), [1])}
            ),
            "groups must have models whose heads have one shape",
        ),
        (lambda: lg_fed_avg(GROUPS, TRAINING._replace(epochs=0)), "training.epochs must be"),
        (lambda: lg_fed_avg(GROUPS, hyper=LGFedAvgHyper(-1)), "learning_rate must be .*at least 0"),
        (lambda: lg_fed_avg(GROUPS, weighted="no"), "weighted must be True or False"),
        (
            lambda: fed_gen(GROUPS, generator=Generator(noise=0)),
            "generator.noise must be at least 1",
        ),
        (
            lambda: fed_gen(GROUPS, generator=Generator(generated=0)),
            "generator.generated must be at least 1",
        ),
        (
            lambda: fed_gen(GROUPS, generator=Generator(optimizer=optax.adam(0.1))),
            "generator.optimizer must be a function of the learning rate",
        ),
        (lambda: fed_gen(GROUPS, warm_up=-1), "warm_up must be at least 0"),
        (
            lambda: fed_gen(GROUPS, hyper=FedGenHyper(diversity_weight=-1)),
            "diversity_weight must be .*at least 0",
        ),
        (
            lambda: fed_gen({"a": PartyGroup(headless(), [0])}),
            "groups must have models with a linear head",
        ),
        (lambda: lg_fed_avg({}), "groups must hold at least one architecture"),
        (lambda: fed_gen({"server": PartyGroup(network(), [0])}), "'server'"),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
