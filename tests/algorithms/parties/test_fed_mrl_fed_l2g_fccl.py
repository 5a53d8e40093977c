"""FedMRL, FedL2G and FCCL: rounds against plain loops, what they must reduce to, what they exchange."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.parties.fccl import FCCLHyper, fccl
from fedcodist.algorithms.parties.fed_l2g import FedL2GHyper, fed_l2g
from fedcodist.algorithms.parties.fed_mrl import FedMRLHyper, fed_mrl
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.guiding_vectors import guiding_gradients, study_and_quiz
from fedcodist.algorithms.parties.public_correlation import PublicBatches, correlation_loss
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.compression.compressed_reduce import compressed_reduce
from fedcodist.compression.quantisation import quantisation
from fedcodist.core import keys
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.headed import headed
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTH, SMALL = (5, 3, 7), 3, 4, 4, 2
RATE, EPOCHS, ROUNDS = 0.3, 2, 2
GENERATOR = np.random.default_rng(0)
PUBLIC_IMAGES = GENERATOR.normal(size=(7, FEATURES))
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    # Party 1 has label 0 only, and label 2 is party 2's alone.
    "label": np.array([0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 2, 2, 1, 0, 2], np.int32),
}
# Whole batches, so that the order of examples does not matter to the plain loops.
TRAINING = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def network(kind, width=WIDTH, classes=CLASSES):
    backbone = nn.Dense(3) if kind == "linear" else nn.Sequential([nn.Dense(5), nn.tanh])
    return headed(backbone, jnp.zeros((1, FEATURES)), classes, width)


GROUPS = {
    "deep": PartyGroup(network("deep"), np.array([0, 2])),
    "linear": PartyGroup(network("linear"), np.array([1])),
}
GROUP_OF = {0: ("deep", 0), 1: ("linear", 0), 2: ("deep", 1)}
PUBLIC_BATCHES = PublicBatches(len(PUBLIC_IMAGES), 3, 2, optax.sgd)
L2G = dict(training=TRAINING, quiz_size=2)
ALGORITHMS = {
    "fed_mrl": fed_mrl(GROUPS, network("linear", SMALL), TRAINING, FedMRLHyper(RATE, 0.7, 0.4)),
    "fed_l2g": fed_l2g(GROUPS, CLASSES, **L2G, warm_up=1, hyper=FedL2GHyper(RATE, 0.2, 3.0, 0.6)),
    "fed_l2g, logits": fed_l2g(
        GROUPS, CLASSES, **L2G, guided="logits", warm_up=0, hyper=FedL2GHyper(RATE, 0.2, 3.0, 0.6)
    ),
    "fccl": fccl(GROUPS, CLASSES, PUBLIC_BATCHES, TRAINING, FCCLHyper(RATE, 0.05, 0.1, 0.7, 0.4)),
}


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(ALGORITHMS[name], ROUNDS, mesh), mesh


def run(name, hyper=None, devices=None, state=None):
    """(first state, last state, metrics) of the first seed."""
    algorithm = ALGORITHMS[name]
    programs, mesh = programs_of(name, devices)
    put = functools.partial(replicate, mesh=mesh)
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    before = state or jax.tree.map(np.asarray, programs.init(seeds))
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper or algorithm.hyper)
    after, _, metrics = programs.train(
        *put((before, {}, seeds, np.int32(0), np.int32(ROUNDS), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after, metrics))


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ---------------------------------------------------------------------------------- plain loops


def examples_of(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return jnp.asarray(COLUMNS["image"][rows]), COLUMNS["label"][rows]


def own(state, client, part="variables"):
    """A party's parameters."""
    name, place = GROUP_OF[client]
    value = getattr(state.models[name], part)
    return jax.tree.map(lambda leaf: leaf[place], getattr(value, "params", value))


def embedding(params, images):
    """What the head of one of our networks reads."""
    backbone = params["backbone"]
    if "kernel" in backbone:
        hidden = images @ backbone["kernel"] + backbone["bias"]
    else:
        (dense,) = backbone.values()
        hidden = jnp.tanh(images @ dense["kernel"] + dense["bias"])
    return hidden @ params["embedding"]["kernel"] + params["embedding"]["bias"]


def head(params, hidden):
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def logits(params, images):
    return head(params, embedding(params, images))


def cross_entropy(logits, labels):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


@functools.cache
def slope_of(loss):
    return jax.jit(jax.grad(loss))


def descend(loss, params, *about, rate=RATE):
    """One step on loss(params, *about)."""
    gradient = slope_of(loss)(params, *about)
    return jax.tree.map(lambda p, g: np.asarray(p) - rate * np.asarray(g), params, gradient)


def labels_loss(params, images, labels):
    return cross_entropy(logits(params, images), labels)


def alone(params, images, labels, steps):
    for _ in range(steps):
        params = descend(labels_loss, params, images, labels)
    return params


# --------------------------------------------------------------------------------------- FedMRL


def fused_loss(parts, images, labels, hyper):
    joined = jnp.concatenate([embedding(parts[n], images) for n in ("shared", "own")], axis=1)
    fused = joined @ parts["projector"]["kernel"] + parts["projector"]["bias"]
    of_own = cross_entropy(head(parts["own"], fused), labels)
    of_shared = cross_entropy(head(parts["shared"], fused[:, :SMALL]), labels)
    return hyper.own_weight * of_own + hyper.shared_weight * of_shared


def test_fed_mrl_is_a_plain_loop():
    before, after, _ = run("fed_mrl")
    hyper, shared = ALGORITHMS["fed_mrl"].hyper, before.shared.params
    parties = [{"own": own(before, c), "projector": own(before, c, "projector")} for c in range(3)]
    for _ in range(ROUNDS):
        smalls = []
        for client in range(3):
            images, labels = examples_of(client)
            parts = parties[client] | {"shared": shared}
            for _ in range(EPOCHS):
                parts = descend(fused_loss, parts, images, labels, hyper)
            smalls.append(parts.pop("shared"))
            parties[client] = parts
        mean = lambda *leaves: np.average(leaves, axis=0, weights=SIZES)
        shared = jax.tree.map(mean, *smalls)
    for client in range(3):
        found = {"own": own(after, client), "projector": own(after, client, "projector")}
        assert_close(found, parties[client])
    assert_close(after.shared.params, shared)


def test_a_party_predicts_by_its_own_head_over_the_newest_small_model():
    _, after, _ = run("fed_mrl")
    predictor = ALGORITHMS["fed_mrl"].predictors["deep"]
    variables = predictor.variables(after)
    images, _ = examples_of(2)
    one = jax.tree.map(lambda leaf: leaf[1], variables)
    found = predictor.predict(one, {"image": images}).logits
    params, projector = own(after, 2), own(after, 2, "projector")
    joined = [embedding(p, images) for p in (after.shared.params, params)]
    fused = jnp.concatenate(joined, axis=1) @ projector["kernel"] + projector["bias"]
    assert_close(np.asarray(found), np.asarray(head(params, fused)))


def test_fed_mrl_of_nothing_moves_nothing():
    before, after, _ = run("fed_mrl", FedMRLHyper(RATE, 0.0, 0.0))
    assert_close(after.models, before.models)
    assert_close(after.shared, before.shared)


def test_fed_mrl_starts_with_one_projector_and_sends_the_small_model():
    before, *_ = run("fed_mrl")
    assert_close(own(before, 0, "projector"), own(before, 1, "projector"))
    small = 3 * (FEATURES + 1) + SMALL * (3 + 1) + CLASSES * (SMALL + 1)
    about = ALGORITHMS["fed_mrl"].communication["linear"]
    assert about.up == about.down == 4 * small


# --------------------------------------------------------------------------------------- FedL2G


def guided_loss(by_logits, params, vectors, images, labels, weight):
    hidden = embedding(params, images)
    guided = head(params, hidden) if by_logits else hidden
    distance = jnp.mean((guided - vectors[labels]) ** 2)
    return cross_entropy(head(params, hidden), labels) + weight * distance


def held_out(client, key):
    """(study images, labels), (quiz images, labels) as the library divides them."""
    images, labels = examples_of(client)
    data = ClientData(
        {"image": images, "label": jnp.asarray(labels)},
        start=jnp.int32(0),
        size=jnp.int32(len(labels)),
        bound=jnp.int32(len(labels)),
        capacity=max(SIZES),
        ragged=True,
    )
    parts = study_and_quiz(data, 2, keys.derive(key, "quiz", client))
    rows = lambda part, name: np.asarray(part.columns[name])[: int(part.size)]
    return [(rows(part, "image"), rows(part, "label")) for part in parts]


def quiz_loss_after_a_step(loss, vectors, params, study, quiz, weight, rate):
    """Through the step, by automatic differentiation."""
    step = jax.grad(loss)(params, vectors, *study, weight)
    moved = jax.tree.map(lambda p, g: p - rate * g, params, step)
    return labels_loss(moved, *quiz)


@pytest.mark.parametrize("name", ["fed_l2g", "fed_l2g, logits"])
def test_fed_l2g_is_a_plain_loop(name):
    before, after, _ = run(name)
    hyper, by_logits = ALGORITHMS[name].hyper, "logits" in name
    loss = functools.partial(guided_loss, by_logits)
    after_step = functools.partial(quiz_loss_after_a_step, loss)
    vectors, models = before.vectors, [own(before, client) for client in range(3)]
    for round in range(ROUNDS):
        slopes, has_label = [], []
        for client in range(3):
            study, quiz = held_out(client, jax.random.key(0))
            for _ in range(EPOCHS if by_logits or round >= 1 else 0):
                models[client] = descend(loss, models[client], vectors, *study, hyper.weight)
            about = (models[client], study, quiz, hyper.weight, hyper.study_learning_rate)
            slopes.append(np.asarray(slope_of(after_step)(jnp.asarray(vectors), *about)))
            has_label.append(np.isin(np.arange(CLASSES), study[1]))
        count = np.maximum(np.sum(has_label, axis=0), 1)[:, None]
        vectors = vectors - hyper.server_learning_rate * np.sum(slopes, axis=0) / count
        assert np.abs(np.sum(slopes, axis=0)).max() > 1e-6
    for client in range(3):
        assert_close(own(after, client), models[client])
    assert_close(after.vectors, vectors)


def test_fed_l2g_only_warms_up_in_its_first_rounds():
    algorithm = ALGORITHMS["fed_l2g"]
    before = jax.tree.map(np.asarray, programs_of("fed_l2g", None)[0].init(np.zeros(1, np.uint32)))
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    hyper = jax.tree.map(np.float64, algorithm.hyper)
    after, *_ = programs_of("fed_l2g", None)[0].train(
        before, {}, np.zeros(1, np.uint32), 0, 1, hyper, resident_data(private)
    )
    assert_close(after.models, before.models)
    assert np.abs(after.vectors - before.vectors).max() > 1e-6


def test_unguided_fed_l2g_is_training_alone_on_the_study_set():
    before, after, _ = run("fed_l2g", FedL2GHyper(RATE, 0.2, 3.0, 0.0))
    assert_close(after.vectors, before.vectors)
    for client in range(3):
        study, _ = held_out(client, jax.random.key(0))
        assert_close(own(after, client), alone(own(before, client), *study, EPOCHS))


def test_a_party_without_a_quiz_has_no_slopes():
    """Normalisation of a batch of padding alone divides by zero."""
    model = network("linear")

    def apply(variables, batch, mask=None, **more):
        outputs, mutable = model.apply(variables, batch, mask=mask, **more)
        share = jnp.ones(()) if mask is None else jnp.sum(mask) / jnp.sum(mask)
        return jax.tree.map(lambda leaf: leaf * share, outputs), mutable

    data = ClientData(
        COLUMNS, start=jnp.int32(0), size=jnp.int32(1), bound=jnp.int32(1), capacity=4, ragged=True
    )
    key, vectors = jax.random.key(0), jnp.ones((CLASSES, CLASSES))
    slopes = guiding_gradients(
        model._replace(apply=apply),
        model.init(key),
        vectors,
        *study_and_quiz(data, 2, key),
        TRAINING,
        logits_of,
        0.5,
        RATE,
        key,
    )
    assert not any(leaf.any() for leaf in slopes)


def test_study_and_quiz_are_all_of_a_partys_examples():
    for client, size in enumerate(SIZES):
        (study, _), (quiz, _) = held_out(client, jax.random.key(3))
        assert (len(study), len(quiz)) == (size - min(2, size // 2), min(2, size // 2))
        rows = lambda images: {row.tobytes() for row in np.asarray(images)}
        assert rows(study) | rows(quiz) == rows(examples_of(client)[0])
        assert not rows(study) & rows(quiz)


def test_fed_l2g_sends_gradients_and_which_labels_they_are_of():
    about = ALGORITHMS["fed_l2g"].communication["linear"]
    assert (about.down, about.up) == (4 * CLASSES * WIDTH, 4 * CLASSES * (WIDTH + 1))
    about = ALGORITHMS["fed_l2g, logits"].communication["linear"]
    assert (about.down, about.up) == (4 * CLASSES * CLASSES, 4 * CLASSES * (CLASSES + 1))


# ----------------------------------------------------------------------------------------- FCCL


def correlations(a, b):
    """[classes, classes], by NumPy's own function."""
    return jnp.corrcoef(a.T, b.T)[: a.shape[1], a.shape[1] :]


def plain_correlation_loss(params, images, mean, off_diagonal):
    c = correlations(logits(params, images), mean)
    same, others = jnp.sum((1 - jnp.diag(c)) ** 2), (1 + c) ** 2
    return same + off_diagonal * (jnp.sum(others) - jnp.sum(jnp.diag(others)))


def plain_dual_loss(params, images, labels, last, first, hyper):
    log_p = jax.nn.log_softmax(logits(params, images))
    away = [jnp.mean(jnp.sum(t * (jnp.log(t) - log_p), -1)) for t in (last, first)]
    towards = hyper.last_weight * away[0] + hyper.first_weight * away[1]
    return labels_loss(params, images, labels) + towards


def test_fccl_is_a_plain_loop():
    before, after, _ = run("fccl")
    hyper = ALGORITHMS["fccl"].hyper
    models = [own(before, client) for client in range(3)]
    first, last = list(models), list(models)
    for round in range(ROUNDS):
        rows = np.asarray(ALGORITHMS["fccl"].select(round, jax.random.key(0)).examples[PUBLIC])
        assert rows.shape == (4, 3)
        assert all(len(set(epoch.ravel().tolist())) == 6 for epoch in rows.reshape(2, 2, 3))
        for indices in rows:
            images = jnp.asarray(PUBLIC_IMAGES[indices])
            mean = np.mean([logits(params, images) for params in models], axis=0)
            about, rate = (images, mean, hyper.off_diagonal), hyper.public_learning_rate
            models = [descend(plain_correlation_loss, m, *about, rate=rate) for m in models]
        for client in range(3):
            images, labels = examples_of(client)
            targets = [jax.nn.softmax(logits(m[client], images)) for m in (last, first)]
            for _ in range(EPOCHS):
                models[client] = descend(
                    plain_dual_loss, models[client], images, labels, *targets, hyper
                )
        last = list(models)
    # Flax's parameters are float32, and correlations over three examples make more of their rounding.
    for client in range(3):
        assert_close(own(after, client), models[client], rtol=1e-4, atol=1e-6)
        assert_close(own(after, client, "first"), first[client])
        assert_close(own(after, client, "last"), own(after, client))


def test_fccl_without_others_and_teachers_is_training_alone():
    before, after, _ = run("fccl", FCCLHyper(RATE, 0.0, 0.1, 0.0, 0.0))
    for client in range(3):
        assert_close(
            own(after, client), alone(own(before, client), *examples_of(client), ROUNDS * EPOCHS)
        )


def test_the_correlation_loss_is_least_for_equal_outputs_of_two_opposed_classes():
    a = jnp.asarray(GENERATOR.normal(size=(6, 1)))
    opposed = jnp.concatenate([a, -a], axis=1)
    assert correlation_loss(opposed, 3 * opposed + 1, 0.5) == pytest.approx(0, abs=1e-12)
    value, gradient = jax.value_and_grad(correlation_loss)(jnp.ones((6, 2)), opposed, 0.5)
    assert value == pytest.approx(2 + 0.5 * 2)
    assert np.all(np.isfinite(gradient))


def loss_in_float64(logits, mean, constant=()):
    """The correlation loss in NumPy; the correlations of constant classes are 0."""

    def unit(values):
        apart = values.astype(np.float64) - values.mean(0, dtype=np.float64)
        return apart / np.sqrt(np.maximum((apart**2).sum(0), 1e-30))

    correlations = unit(logits).T @ unit(mean)
    correlations[list(constant)] = 0
    others = ~np.eye(len(correlations), dtype=bool)
    return ((1 - np.diag(correlations)) ** 2).sum() + 0.1 * ((1 + correlations) ** 2)[others].sum()


@pytest.mark.parametrize("size", [64, 100, 1000])
def test_equal_logits_of_a_class_have_no_correlation(size):
    """The mean of equal numbers is rounded, and networks may round equal outputs differently."""
    logits, mean = np.random.default_rng(size).normal(size=(2, size, 4)).astype(np.float32)
    loss_and_gradient = jax.value_and_grad(correlation_loss)
    usual = np.abs(loss_and_gradient(jnp.asarray(logits), mean, 0.1)[1]).max()
    logits[:, 0] = -1.3
    logits[:, 1] = 0.7
    logits[::3, 1] = np.nextafter(np.float32(0.7), np.float32(1))
    value, gradient = loss_and_gradient(jnp.asarray(logits), mean, 0.1)
    np.testing.assert_array_equal(gradient[:, :2], 0)
    assert np.abs(gradient).max() < 3 * usual
    assert value == pytest.approx(loss_in_float64(logits, mean, constant=(0, 1)), rel=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_logits_that_differ_are_correlated_wherever_they_are(offset):
    logits, mean = np.random.default_rng(0).normal(size=(2, 100, 4))
    logits, mean = (logits + offset).astype(np.float32), mean.astype(np.float32)
    value = correlation_loss(jnp.asarray(logits), jnp.asarray(mean), 0.1)
    assert value == pytest.approx(loss_in_float64(logits, mean), rel=1e-4)


def test_fccl_exchanges_the_logits_of_all_public_batches():
    about, examples = ALGORITHMS["fccl"].communication["deep_0"], 2 * 2 * 3
    assert about.up == 4 * examples * CLASSES
    assert about.down == about.up + 4 * examples  # which images they are of


def test_fccl_may_send_compressed_logits_whose_bytes_are_summed_over_batches():
    reduce = compressed_reduce(quantisation(16))
    ALGORITHMS["fccl, compressed"] = fccl(
        GROUPS, CLASSES, PUBLIC_BATCHES, TRAINING, ALGORITHMS["fccl"].hyper, reduce=reduce
    )
    _, plain, before = run("fccl")
    _, found, metrics = run("fccl, compressed")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), found, plain)
    batches, examples = 2 * 2, 3
    for party, about in ALGORITHMS["fccl"].communication.items():
        assert f"{party}/client_bytes_up" not in before
        # Half of the floats, and the grid of each batch.
        sent = metrics[f"{party}/client_bytes_up"]
        assert np.all(sent > about.up / 2) and np.all(sent <= about.up / 2 + 16 * batches)
        assert about.up == 4 * batches * examples * CLASSES


# ------------------------------------------------------------------------------------- all three


@pytest.mark.parametrize("name", ["fed_mrl", "fed_l2g", "fccl"])
@pytest.mark.slow
def test_devices_share_the_parties(name):
    _, one, _ = run(name)
    _, two, _ = run(name, devices=2)
    assert_close(two, one)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fed_mrl(GROUPS, network("deep", 9)),
            r"small must have an embedding of at most the 4",
        ),
        (
            lambda: fed_mrl(GROUPS, network("deep", 2, 5)),
            r"small must have the 3 outputs .*, got 5",
        ),
        (lambda: fed_mrl(GROUPS, network("deep"), hyper=FedMRLHyper(own_weight=-1)), "own_weight"),
        (lambda: fed_l2g(GROUPS, 4), r"groups must have models of num_classes=4 outputs"),
        (lambda: fed_l2g(GROUPS, 3, guided="both"), r"guided must be one of .*, got 'both'"),
        (lambda: fed_l2g(GROUPS, 3, quiz_size=0), "quiz_size must be"),
        (lambda: fed_l2g(GROUPS, 3, warm_up=-1), "warm_up must be"),
        (
            lambda: fccl(GROUPS, 3, PublicBatches(5)),
            r"public_batch_size must be at most the 5 public",
        ),
        (lambda: fccl(GROUPS, 3, PublicBatches(5, 1)), "public_batch_size must be"),
        (
            lambda: fccl(GROUPS, 3, PublicBatches(5, 2), hyper=FCCLHyper(off_diagonal=-1)),
            "off_diag",
        ),
    ],
)
def test_bad_input_is_one_line(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)
