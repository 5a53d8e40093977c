"""FedProto, FedGH and FedTGP: rounds against plain JAX, what they reduce to, and what they exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.parties.fed_gh import FedGHHyper, clipped_momentum, fed_gh
from fedcodist.algorithms.parties.fed_proto import FedProtoHyper, fed_proto, half_momentum
from fedcodist.algorithms.parties.fed_tgp import (
    FedTGPHyper,
    contrastive_loss,
    euclidean,
    fed_tgp,
    generated,
    margin_between,
)
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, in_client_order
from fedcodist.algorithms.parties.nearest_prototype import nearness
from fedcodist.algorithms.parties.prototypes import ClassSums, Prototypes, prototypes_of
from fedcodist.algorithms.parties.training_on_prototypes import ServerTraining, as_examples
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import LayerOutputs, of_logits
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import all_client_models
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTH, HIDDEN = (5, 2, 7), 4, 4, 3, 5
RATE, EPOCHS, ROUNDS, LAMBDA = 0.3, 2, 3, 0.7
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    # Party 1 has label 0 only, label 2 is party 2's alone, and nobody has label 3.
    "label": np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 2, 2, 1, 0, 2], np.int32),
}
# Whole batches, so that the order of examples does not matter to the plain loop.
TRAINING = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def headed_model(hidden, width=WIDTH, classes=CLASSES) -> Model:
    """A network in float64 of an embedding, of one or two layers, and a head."""
    shapes = {"u": (FEATURES, HIDDEN), "v": (HIDDEN, width)} if hidden else {"v": (FEATURES, width)}

    def init(key):
        draws = jax.random.split(key, 3)
        draw = lambda key, shape: jax.random.normal(key, shape)
        params = {
            name: draw(k, shape) for k, (name, shape) in zip(draws, shapes.items(), strict=False)
        }
        bias = jnp.zeros(classes)
        return Variables(
            params | {"head": {"kernel": draw(draws[2], (width, classes)), "bias": bias}}, {}
        )

    def apply(variables, batch, **_):
        embedding = embed(variables.params, batch["image"])
        return LayerOutputs(logits_of(variables.params, batch["image"]), (embedding,)), {}

    metrics = {"accuracy": of_logits(accuracy())}
    return Model(init, apply, of_logits(cross_entropy), metrics, classes)


GROUPS = {
    "hidden": PartyGroup(headed_model(True), np.array([2, 0])),
    "linear": PartyGroup(headed_model(False), np.array([1])),
}
SERVER_RATE, SERVER_EPOCHS = 0.2, 3
ALL_AT_ONCE = ServerTraining(batch_size=12, epochs=SERVER_EPOCHS)
ALGORITHMS = {
    "fed_proto": fed_proto(GROUPS, CLASSES, TRAINING, hyper=FedProtoHyper(RATE, LAMBDA)),
    "fed_proto, parties": fed_proto(
        GROUPS,
        CLASSES,
        TRAINING,
        weighting="parties",
        predict_by="prototype",
        hyper=FedProtoHyper(RATE, LAMBDA),
    ),
    "fed_gh": fed_gh(GROUPS, CLASSES, TRAINING, ALL_AT_ONCE, hyper=FedGHHyper(RATE, SERVER_RATE)),
    "fed_tgp": fed_tgp(
        GROUPS,
        CLASSES,
        TRAINING,
        ALL_AT_ONCE,
        hyper=FedTGPHyper(RATE, LAMBDA, SERVER_RATE, margin_threshold=100.0),
    ),
}


# Parties beside one another in place of one after another.
AT_ONCE = {"fed_proto, vmap": fed_proto, "fed_gh, vmap": fed_gh, "fed_tgp, vmap": fed_tgp}
for _name, _make in AT_ONCE.items():
    _same = ALGORITHMS[_name.partition(",")[0]]
    _own = {} if _make is fed_proto else {"server_training": ALL_AT_ONCE}
    ALGORITHMS[_name] = _make(
        GROUPS, CLASSES, TRAINING, hyper=_same.hyper, execution=Execution("vmap", 2), **_own
    )


@functools.cache
def programs_of(name, devices):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(ALGORITHMS[name], ROUNDS, mesh), mesh


def run(name, hyper=None, devices=None, start=None):
    """(first state, last state, metrics) of the first seed; from another state if it is given."""
    programs, mesh = programs_of(name, devices)
    put = functools.partial(replicate, mesh=mesh)
    data = resident_data(FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES])))
    seeds = put(np.zeros(1, np.uint32))
    before = jax.tree.map(np.asarray, programs.init(seeds))
    if start is not None:
        before = jax.tree.map(lambda leaf: np.asarray(leaf)[None], start)
    hyper = jax.tree.map(lambda v: np.asarray(v, np.float64), hyper or ALGORITHMS[name].hyper)
    after, _, metrics = programs.train(
        *put((before, {}, seeds, np.int32(0), np.int32(ROUNDS), hyper, data))
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (before, after, metrics))


# ---------------------------------------------------------------------------------- plain JAX


def embed(params, images):
    return jnp.tanh(images @ params["u"]) @ params["v"] if "u" in params else images @ params["v"]


embedded = jax.jit(embed)


def logits_of(params, images):
    return embed(params, images) @ params["head"]["kernel"] + params["head"]["bias"]


def examples_of(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return COLUMNS["image"][rows], COLUMNS["label"][rows]


def label_loss(logits, labels):
    log_shares = logits - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))
    return -jnp.mean(log_shares[jnp.arange(len(labels)), labels])


@functools.partial(jax.jit, static_argnums=0)
def slope(loss, params, *about):
    return jax.grad(loss)(params, *about)


def descend(loss, params, *about, rate=RATE, steps=EPOCHS):
    for _ in range(steps):
        step = lambda w, g: np.asarray(w) - rate * np.asarray(g)
        params = jax.tree.map(step, params, slope(loss, params, *about))
    return params


def drawn_loss(params, images, labels, targets, pulls, weight):
    gap = embed(params, images) - targets
    distance = jnp.mean(pulls * jnp.mean(gap**2, axis=1))
    return label_loss(logits_of(params, images), labels) + weight * distance


def drawn(params, client, prototypes, weight=LAMBDA):
    """Local training towards prototypes, label -> vector."""
    images, labels = examples_of(client)
    pulls = np.array([label in prototypes for label in labels.tolist()], float)
    targets = np.stack([prototypes.get(label, np.zeros(WIDTH)) for label in labels.tolist()])
    return descend(drawn_loss, params, images, labels, targets, pulls, weight)


def means_of(params, client):
    """Label -> (mean embedding, number of examples)."""
    images, labels = examples_of(client)
    embedding = np.asarray(embedded(params, images))
    return {y: (embedding[labels == y].mean(0), np.sum(labels == y)) for y in set(labels.tolist())}


def params_of(state):
    """Every party's parameters, in the order of parties."""
    found = {}
    for name, group in GROUPS.items():
        for index, client in enumerate(sorted(group.clients.tolist())):
            found[client] = jax.tree.map(lambda w, i=index: w[i], state.models[name].params)
    return [found[client] for client in range(len(SIZES))]


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# ----------------------------------------------------------------------------------- FedProto


@pytest.mark.parametrize("name", ["fed_proto", "fed_proto, parties"])
def test_fed_proto_is_a_plain_loop(name):
    before, after, _ = run(name)
    models, prototypes = params_of(before), {}
    for _ in range(ROUNDS):
        models = [drawn(params, client, prototypes) for client, params in enumerate(models)]
        sent = [means_of(params, client) for client, params in enumerate(models)]
        prototypes = {}
        for label in range(CLASSES):
            own = [means[label] for means in sent if label in means]
            weights = [n if name == "fed_proto" else 1 for _, n in own]
            if own:
                prototypes[label] = np.average([m for m, _ in own], axis=0, weights=weights)
    assert_close(params_of(after), models)
    assert after.prototypes.has_class.tolist() == [1, 1, 1, 0]
    for label, vector in prototypes.items():
        assert_close(after.prototypes.vectors[label], vector)
    assert not after.prototypes.vectors[3].any()


def test_fed_proto_without_its_pull_is_training_alone():
    before, after, _ = run("fed_proto", FedProtoHyper(RATE, 0.0))
    models = params_of(before)
    for _ in range(ROUNDS):
        models = [drawn(params, client, {}) for client, params in enumerate(models)]
    assert_close(params_of(after), models)


def test_parties_that_answer_by_prototypes_choose_the_nearest():
    _, after, _ = run("fed_proto, parties")
    images = COLUMNS["image"]
    predictor = ALGORITHMS["fed_proto, parties"].predictors["linear"]
    one = jax.tree.map(lambda leaf: leaf[0], predictor.variables(after))
    outputs = predictor.predict(one, {"image": jnp.asarray(images)})
    embedding = embed(params_of(after)[1], images)
    far = jnp.linalg.norm(embedding[:, None] - after.prototypes.vectors[:3], axis=-1)
    np.testing.assert_array_equal(outputs.logits.argmax(-1), far.argmin(-1))
    assert (outputs.logits[:, 3] < outputs.logits[:, :3].min(-1)).all()


def test_without_prototypes_the_head_answers():
    before, _, _ = run("fed_proto, parties")
    by_head = ALGORITHMS["fed_proto"].predictors["linear"]
    by_prototype = ALGORITHMS["fed_proto, parties"].predictors["linear"]
    batch = {"image": jnp.asarray(COLUMNS["image"])}
    answers = [
        p.predict(jax.tree.map(lambda leaf: leaf[0], p.variables(before)), batch).logits
        for p in (by_head, by_prototype)
    ]
    assert_close(*answers)


def test_the_nearest_prototype_is_the_largest_logit():
    found = nearness(
        jnp.zeros((1, 2)), Prototypes(jnp.array([[3.0, 4.0], [1.0, 0.0]]), jnp.ones(2))
    )
    assert_close(found, [[-25.0, -1.0]])


def test_fed_proto_sends_a_vector_per_class_and_whose_it_is():
    about = ALGORITHMS["fed_proto"].communication["hidden_0"]
    assert about.up == about.down == 4 * CLASSES * (WIDTH + 1)


def test_fed_protos_optimizer_has_momentum_a_half():
    optimizer, params = half_momentum(0.1), jnp.array(2.0)
    state = optimizer.init(params)
    first, state = optimizer.update(jnp.array(1.0), state, params)
    second, _ = optimizer.update(jnp.array(1.0), state, params)
    assert_close((first, second), (-0.1, -0.15))


# -------------------------------------------------------------------------------------- FedGH


def sent_by(models):
    """All parties' prototypes and their labels, [sent, width] and [sent]."""
    pairs = [
        (vector, label)
        for client, params in enumerate(models)
        for label, (vector, _) in means_of(params, client).items()
    ]
    return np.stack([vector for vector, _ in pairs]), np.array([label for _, label in pairs])


def head_loss(head, vectors, labels):
    return label_loss(vectors @ head["kernel"] + head["bias"], labels)


def test_fed_gh_is_a_plain_loop():
    before, after, _ = run("fed_gh")
    models, head = params_of(before), before.head
    for round in range(ROUNDS):
        if round:  # until then the server has trained nothing
            models = [params | {"head": head} for params in models]
        models = [drawn(params, client, {}) for client, params in enumerate(models)]
        vectors, labels = sent_by(models)
        head = descend(head_loss, head, vectors, labels, rate=SERVER_RATE, steps=SERVER_EPOCHS)
    assert_close(params_of(after), models)
    assert_close(after.head, head)


def test_fed_gh_evaluates_a_partys_own_head_or_the_global_one():
    _, after, _ = run("fed_gh")
    by_global = fed_gh(GROUPS, CLASSES, TRAINING, predict_by="global_head")
    own, shared = (
        algorithm.predictors["hidden"].variables(after).params
        for algorithm in (ALGORITHMS["fed_gh"], by_global)
    )
    assert_close(own, after.models["hidden"].params)
    for party in range(2):
        assert_close(jax.tree.map(lambda w, i=party: w[i], shared["head"]), after.head)
    assert_close(shared["u"], own["u"])


def test_a_server_that_does_not_learn_sends_the_head_it_began_with():
    before, after, _ = run("fed_gh", FedGHHyper(RATE, 0.0))
    assert_close(after.head, before.head)


def test_fed_gh_goes_on_with_a_head_that_was_trained_before():
    """A round with index 0 of another run: parties get the head, as in a later round."""
    before, after, _ = run("fed_gh")
    assert not np.any(before.is_trained) and np.all(after.is_trained)
    starts = [after, after._replace(is_trained=before.is_trained)]
    models = [run("fed_gh", start=start)[1].models["linear"] for start in starts]
    again, other = (jax.tree.leaves(model.params)[0] for model in models)
    assert not np.allclose(again, other)


def test_fed_gh_sends_means_and_receives_a_head():
    about = ALGORITHMS["fed_gh"].communication["linear"]
    assert about.up == 4 * CLASSES * (WIDTH + 1)
    assert about.down == 4 * CLASSES * (WIDTH + 1)


def test_fed_ghs_optimizer_clips_decays_and_has_momentum():
    optimizer, params = clipped_momentum(0.1), jnp.array(2.0)
    state, velocity = optimizer.init(params), 0.0
    for gradient in (3.0, 400.0):
        update, state = optimizer.update(jnp.array(gradient), state, params)
        velocity = 0.9 * velocity + min(gradient, 50.0) + 1e-3 * float(params)
        assert_close(update, -0.1 * velocity)
        params = params + update


# ------------------------------------------------------------------------------------- FedTGP


def far(ones, others):
    return jnp.sqrt(jnp.sum((ones[:, None] - others[None]) ** 2, axis=-1))


def prototypes_made_by(params):
    hidden = jnp.maximum(
        params["vectors"] @ params["hidden"]["kernel"] + params["hidden"]["bias"], 0
    )
    return hidden @ params["output"]["kernel"] + params["output"]["bias"]


def margin_loss(generator, vectors, labels, delta):
    distances = far(vectors, prototypes_made_by(generator))
    return label_loss(-distances - delta * jnp.eye(CLASSES)[labels], labels)


def test_fed_tgp_is_a_plain_loop():
    before, after, _ = run("fed_tgp")
    models, generator, prototypes = params_of(before), before.generator, {}
    for _ in range(ROUNDS):
        models = [drawn(params, client, prototypes) for client, params in enumerate(models)]
        vectors, labels = sent_by(models)
        centres = np.stack([vectors[labels == y].mean(0) for y in sorted(set(labels.tolist()))])
        spread = np.linalg.norm(centres[:, None] - centres, axis=-1)
        delta = min(spread.max(), 100.0)
        generator = descend(
            margin_loss, generator, vectors, labels, delta, rate=SERVER_RATE, steps=SERVER_EPOCHS
        )
        prototypes = dict(enumerate(np.asarray(prototypes_made_by(generator))))
    assert_close(params_of(after), models)
    assert_close(after.generator, generator)
    assert_close(
        after.prototypes, Prototypes(np.stack(list(prototypes.values())), np.ones(CLASSES))
    )


def test_fed_tgp_without_its_pull_is_training_alone():
    before, after, _ = run("fed_tgp", FedTGPHyper(RATE, 0.0, SERVER_RATE))
    models = params_of(before)
    for _ in range(ROUNDS):
        models = [drawn(params, client, {}) for client, params in enumerate(models)]
    assert_close(params_of(after), models)


def test_the_margin_is_of_all_distances_or_of_nearest_ones():
    # Class 1 is on average at (0, 3), class 2 at (4, 0); class 3 is nobody's.
    vectors = np.zeros((2, 4, 2))
    vectors[0, 1], vectors[1, 1], vectors[1, 2] = (0, 2), (0, 4), (4, 0)
    has_class = np.array([[1, 1, 0, 0], [0, 1, 1, 0.0]])
    prototypes = Prototypes(jnp.asarray(vectors), jnp.asarray(has_class))
    assert_close(margin_between(prototypes, "largest"), 5.0)
    assert_close(margin_between(prototypes, "nearest"), 4.0)
    alone = Prototypes(prototypes.vectors[:1, 1:2], prototypes.has_class[:1, 1:2])
    assert margin_between(alone, "largest") == margin_between(alone, "nearest") == 0


def test_a_margin_asks_for_more_than_being_nearest():
    distances, labels = jnp.array([[1.0, 3.0]]), jnp.array([0])
    plain, asked = (contrastive_loss(distances, labels, margin)[0] for margin in (0.0, 5.0))
    assert_close((plain, asked), (np.log(1 + np.exp(-2)), np.log(1 + np.exp(3))))


def test_a_distance_of_zero_has_a_gradient():
    found = jax.grad(lambda v: jnp.sum(euclidean(v, jnp.zeros((1, 2)))))(jnp.zeros((1, 2)))
    assert_close(found, np.zeros((1, 2)))


def test_global_prototypes_are_what_the_servers_network_makes():
    _, after, _ = run("fed_tgp")
    assert_close(generated(after.generator), after.prototypes.vectors)


def test_fed_tgp_sends_means_and_receives_prototypes_of_all_classes():
    about = ALGORITHMS["fed_tgp"].communication["linear"]
    assert about.up == 4 * CLASSES * (WIDTH + 1)
    assert about.down == 4 * CLASSES * WIDTH


# ---------------------------------------------------------------------------- what they share


def test_a_class_without_examples_has_no_prototype():
    found = prototypes_of(ClassSums(jnp.array([[2.0, 4.0], [0.0, 0.0]]), jnp.array([2.0, 0.0])))
    assert_close(found, Prototypes(np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([1.0, 0.0])))


def test_prototypes_as_examples_are_those_that_there_are():
    vectors = jnp.arange(12.0).reshape(2, 3, 2)
    has_class = jnp.array([[1, 0, 1], [0, 1, 1.0]])
    examples = as_examples(Prototypes(vectors, has_class))
    assert int(examples.size) == 4 and examples.capacity == 6
    assert examples.columns["label"][:4].tolist() == [0, 2, 1, 2]
    expected = [vectors[0, 0], vectors[0, 2], vectors[1, 1], vectors[1, 2]]
    assert_close(examples.columns["embedding"][:4], np.stack(expected))


def test_parties_are_put_in_the_order_of_clients():
    by_group = {"hidden": jnp.array([10, 12]), "linear": jnp.array([11])}
    assert in_client_order(check_groups(GROUPS), by_group).tolist() == [10, 11, 12]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed_proto", "fed_gh", "fed_tgp"])
def test_devices_share_the_parties(name):
    assert_close(run(name, devices=2)[1], run(name)[1], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_ONCE)
def test_parties_may_be_computed_at_once(name):
    expected = run(name.partition(",")[0])[1]
    assert_close(run(name)[1], expected, atol=1e-9)


NARROW = {**GROUPS, "linear": PartyGroup(headed_model(False, width=2), [1])}
BARE = {"bare": PartyGroup(headed_model(True)._replace(init=lambda key: Variables({}, {})), [0])}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fed_proto(NARROW, CLASSES), "groups must have models whose heads have one shape"),
        (lambda: fed_proto(BARE, CLASSES), "groups must have models with a linear head"),
        (lambda: fed_proto(GROUPS, 3), "groups must have models of num_classes=3 outputs"),
        (
            lambda: fed_proto(GROUPS, CLASSES, weighting="x"),
            r"weighting must be one of \['examples', 'parties'\], got 'x'",
        ),
        (
            lambda: fed_proto(GROUPS, CLASSES, predict_by="x"),
            r"predict_by must be one of \['head', 'prototype'\], got 'x'",
        ),
        (
            lambda: fed_proto(GROUPS, CLASSES, hyper=FedProtoHyper(weight=-1)),
            "weight must be .*at least 0",
        ),
        (
            lambda: fed_proto(GROUPS, CLASSES, TRAINING._replace(epochs=0)),
            "training.epochs must be at least 1",
        ),
        (lambda: fed_gh(NARROW, CLASSES), "groups must have models whose heads have one shape"),
        (
            lambda: fed_gh(GROUPS, CLASSES, predict_by="head"),
            r"predict_by must be one of \['own_head', 'global_head'\], got 'head'",
        ),
        (
            lambda: fed_gh(GROUPS, CLASSES, server_training=ServerTraining(epochs=0)),
            "server_training.epochs must be at least 1",
        ),
        (
            lambda: fed_gh(GROUPS, CLASSES, hyper=FedGHHyper(server_learning_rate=-1)),
            "server_learning_rate must be .*at least 0",
        ),
        (
            lambda: fed_tgp(GROUPS, CLASSES, margin="x"),
            r"margin must be one of \['largest', 'nearest'\], got 'x'",
        ),
        (
            lambda: fed_tgp(GROUPS, CLASSES, hyper=FedTGPHyper(margin_threshold=-1)),
            "margin_threshold must be .*at least 0",
        ),
        (
            lambda: fed_tgp(GROUPS, CLASSES, server_training=ServerTraining(batch_size=0)),
            "server_training.batch_size must be at least 1",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fed_proto, parties", "fed_proto"])
def test_every_party_can_be_evaluated_on_its_own_examples(name):
    of_clients = all_client_models(ALGORITHMS[name])
    assert {key: each.clients.tolist() for key, each in of_clients.items()} == {
        key: sorted(group.clients.tolist()) for key, group in GROUPS.items()
    }
