"""FedMD against plain NumPy in float64, and the properties of its exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.parties import fed_md as fed_md_module
from fedcodist.algorithms.parties.alignment import Alignment, message_of_scores
from fedcodist.algorithms.parties.digest_and_revisit import mean_absolute_error
from fedcodist.algorithms.parties.fed_md import fed_md, keras_adam
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups
from fedcodist.algorithms.parties.party import PARTIES, PartyResult, _client_update, run_parties
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.core.shuffling import stratified_sample
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.fed_md import FedMDNetwork
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, HIDDEN = (5, 2, 7, 3), 4, 3, 2
PUBLIC_ROWS, ALIGNED = 20, 9
RATES = (0.05, 0.1)  # digest, revisit
GENERATOR = np.random.default_rng(0)
PUBLIC_IMAGES = GENERATOR.normal(size=(PUBLIC_ROWS, FEATURES))
PUBLIC_LABELS = np.repeat(np.arange(2), (8, 12))
IMAGES = GENERATOR.normal(size=(sum(SIZES), FEATURES))
LABELS = GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32)
# Whole batches, so that the order of examples does not matter to the plain loop.
DIGEST = LocalTraining(keras_adam, batch_size=ALIGNED, epochs=2)
REVISIT = LocalTraining(keras_adam, batch_size=max(SIZES), epochs=3)
PENALTY = 1e-3  # of the squares of the last layer, part of every loss
MOMENTUM, EPSILON = 0.9, 1e-3  # of the hidden layer's normalisation


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def linear(classes=CLASSES) -> Model:
    def init(key):
        return Variables({"w": jax.random.normal(key, (FEATURES, classes)), "b": jnp.zeros(())}, {})

    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"] + variables.params["b"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, classes)


def hidden() -> Model:
    """With a normalised hidden layer: by the batch in training, else by its running averages."""

    def init(key):
        keys = jax.random.split(key)
        u = jax.random.normal(keys[0], (FEATURES, HIDDEN))
        running = {"mean": jnp.zeros(HIDDEN), "variance": jnp.ones(HIDDEN)}
        return Variables({"u": u, "v": jax.random.normal(keys[1], (HIDDEN, CLASSES))}, running)

    def apply(variables, batch, train=False, mask=None, **_):
        before = batch["image"] @ variables.params["u"]
        used = running = variables.mutable
        if train:
            share = (mask / jnp.maximum(mask.sum(), 1))[:, None]
            mean = jnp.sum(share * before, axis=0)
            used = {"mean": mean, "variance": jnp.sum(share * (before - mean) ** 2, axis=0)}
            running = {k: MOMENTUM * running[k] + (1 - MOMENTUM) * used[k] for k in used}
        normal = (before - used["mean"]) / jnp.sqrt(used["variance"] + EPSILON)
        return jnp.tanh(normal) @ variables.params["v"], running

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, CLASSES)


def dropping() -> Model:
    """Linear, and in training half of the images' features are dropped."""

    def apply(variables, batch, train=False, key=None, **_):
        images = batch["image"]
        if train:
            images = jnp.where(jax.random.bernoulli(key, 0.5, images.shape), 2 * images, 0)
        return linear().apply(variables, batch | {"image": images})

    return linear()._replace(apply=apply)


def penalised(gradient, params):
    last = "w" if "w" in params else "v"
    return gradient | {last: gradient[last] + 2 * PENALTY * params[last]}


TWO = {
    "linear": PartyGroup(linear(), np.array([0, 2])),
    "hidden": PartyGroup(hidden(), np.array([3, 1])),
}
ALIKE = {"linear": PartyGroup(linear(), np.arange(4))}
DROPPING = {"linear": PartyGroup(dropping(), np.arange(4))}


@functools.cache
def algorithm(groups="two", digest=DIGEST, revisit=REVISIT, **options):
    aligned = dict(alignment_size=ALIGNED)
    for field in ("alignment_size", "exchanged", "inference_batch_size"):
        if field in options:
            aligned[field] = options.pop(field)
    alignment = Alignment(PUBLIC_LABELS, **aligned)
    options = dict(gradient_hook=penalised) | options
    hyper = fed_md_module.FedMDHyper(*RATES)
    chosen = {"two": TWO, "alike": ALIKE, "dropping": DROPPING}[groups]
    return fed_md(chosen, alignment, CLASSES, digest, revisit, hyper=hyper, **options)


@functools.cache
def programs_of(devices=None, **options):
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(algorithm(**options), 4, mesh), mesh


def start(seed=0, **options):
    """The initial state on the host, [seeds, ...]."""
    return jax.tree.map(np.asarray, programs_of(**options)[0].init(np.array([seed], np.uint32)))


def run(
    state,
    rounds=1,
    images=IMAGES,
    labels=LABELS,
    hyper=None,
    sizes=SIZES,
    **options,
):
    """(state, metrics) after some rounds, for the first seed."""
    programs, mesh = programs_of(**options)
    put = functools.partial(replicate, mesh=mesh)
    columns = {"image": images, "label": labels}
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    hyper = hyper or algorithm(**{k: v for k, v in options.items() if k != "devices"}).hyper
    hyper = jax.tree.map(lambda value: np.asarray(value, np.float64), hyper)
    seeds = np.zeros(1, np.uint32)
    state, _, metrics = programs.train(
        *put((state, {}, seeds, np.int32(0), np.int32(rounds), hyper, data))
    )
    first = jax.tree.map(lambda leaf: np.asarray(leaf)[0], (state, metrics))
    return first[0], {name: values[:rounds] for name, values in first[1].items()}


def models_of(state):
    """client -> Variables."""
    found = {}
    for name, group in (TWO if "hidden" in state else ALIKE).items():
        for index, client in enumerate(sorted(group.clients.tolist())):
            own = lambda leaf, index=index: leaf[index]
            found[client] = jax.tree.map(own, state[name].variables)
    return found


def params_of(state):
    """client -> parameters."""
    return {client: variables.params for client, variables in models_of(state).items()}


def assert_close(left, right, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), left, right)


# ---------------------------------------------------------------------------------- plain NumPy


def statistics(before):
    return {"mean": before.mean(0), "variance": before.var(0)}


def logits_of(params, images, running):
    """Normalises by running averages if given, otherwise by the batch's statistics."""
    if "w" in params:
        return images @ params["w"] + params["b"]
    before = images @ params["u"]
    used = running or statistics(before)
    normal = (before - used["mean"]) / np.sqrt(used["variance"] + EPSILON)
    return np.tanh(normal) @ params["v"]


def gradient_of(params, images, slope):
    """Gradient by the parameters; `slope` [examples, classes] is the loss's gradient by the logits."""
    if "w" in params:
        gradient = {"w": images.T @ slope, "b": slope.sum()}
        return gradient | {"w": gradient["w"] + 2 * PENALTY * params["w"]}
    before = images @ params["u"]
    scale = np.sqrt(statistics(before)["variance"] + EPSILON)
    normal = (before - before.mean(0)) / scale
    active = np.tanh(normal)
    back = (slope @ params["v"].T) * (1 - active**2)
    # The batch's mean and variance depend on u, too.
    back = (back - back.mean(0) - normal * (back * normal).mean(0)) / scale
    return {"u": images.T @ back, "v": active.T @ slope + 2 * PENALTY * params["v"]}


def after_step(running, params, images):
    """The running averages after a step on a batch."""
    new = statistics(images @ params["u"]) if running else {}
    return {k: MOMENTUM * running[k] + (1 - MOMENTUM) * new[k] for k in running}


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


class Adam:
    """Adam with Keras' epsilon; an instance has its moments over all its steps."""

    def __init__(self, params, rate):
        self.rate, self.steps = rate, 0
        self.first = {k: np.zeros_like(v) for k, v in params.items()}
        self.second = {k: np.zeros_like(v) for k, v in params.items()}

    def step(self, params, gradient):
        self.steps += 1
        new = {}
        for k, g in gradient.items():
            self.first[k] = 0.9 * self.first[k] + 0.1 * g
            self.second[k] = 0.999 * self.second[k] + 0.001 * g**2
            first = self.first[k] / (1 - 0.9**self.steps)
            second = self.second[k] / (1 - 0.999**self.steps)
            new[k] = params[k] - self.rate * first / (np.sqrt(second) + 1e-7)
        return new


def plain(models, rounds, weights, temperature=None):
    """`models` by client, after some rounds; at a temperature where probabilities are exchanged."""
    params = {client: own.params for client, own in models.items()}
    running = {client: own.mutable for client, own in models.items()}
    optimizers = {c: (Adam(p, RATES[0]), Adam(p, RATES[1])) for c, p in params.items()}
    scores = (lambda logits: logits) if temperature is None else lambda z: softmax(z / temperature)

    def step(client, optimizer, images, slope):
        gradient = gradient_of(params[client], images, slope)
        running[client] = after_step(running[client], params[client], images)
        params[client] = optimizer.step(params[client], gradient)

    for round in range(rounds):
        selection = algorithm().select(round, jax.random.key(0))
        images = PUBLIC_IMAGES[np.asarray(selection.examples[PUBLIC])[0]]
        everybody = [scores(logits_of(params[c], images, running[c])) for c in sorted(params)]
        consensus = np.average(everybody, axis=0, weights=weights)
        for client in params:
            digest, revisit = optimizers[client]
            for _ in range(DIGEST.epochs):
                own = scores(logits_of(params[client], images, None))
                slope = np.sign(own - consensus) / consensus.size
                if temperature is not None:
                    slope = own * (slope - (slope * own).sum(-1, keepdims=True)) / temperature
                step(client, digest, images, slope)
            rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
            for _ in range(REVISIT.epochs):
                probabilities = softmax(logits_of(params[client], IMAGES[rows], None))
                slope = (probabilities - np.eye(CLASSES)[LABELS[rows]]) / SIZES[client]
                step(client, revisit, IMAGES[rows], slope)
    return {client: Variables(params[client], running[client]) for client in params}


@pytest.mark.parametrize(
    "options, temperature",
    [
        (dict(), None),
        pytest.param(
            *(dict(exchanged="probabilities", groups="alike"), 1.0), marks=pytest.mark.slow
        ),
        (dict(exchanged="probabilities", groups="alike"), 2.5),
    ],
    ids=str,
)
def test_rounds_are_a_plain_loop(options, temperature):
    """Two architectures, weights, running averages, a penalty, and optimizers that go on; three
    rounds in one program."""
    weights = np.array([0.1, 0.4, 0.2, 0.3])
    hyper = algorithm(**options).hyper._replace(weights=weights)
    if temperature is not None:
        hyper = hyper._replace(temperature=temperature)
    before = start(**options)
    after, _ = run(before, 3, hyper=hyper, **options)
    first = models_of(jax.tree.map(lambda leaf: leaf[0], before))
    assert_close(models_of(after), plain(first, 3, weights, temperature), rtol=1e-6, atol=1e-8)


# --------------------------------------------------------------------------- how it is executed


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(devices=8), marks=pytest.mark.slow),
        dict(devices=3, execution=Execution("vmap", 2)),
    ],
    ids=str,
)
def test_scan_vmap_and_devices_agree(options):
    before = start()
    expected, metrics = run(before, 2)
    state, other = run(before, 2, **options)
    assert_close((state, other), (expected, metrics), rtol=1e-6, atol=1e-9)


def test_one_program_serves_all_rounds_and_all_floats():
    programs, _ = programs_of()
    before = start()
    run(before, 1)
    compiled = programs.train._cache_size()
    run(before, 4, hyper=algorithm().hyper._replace(weights=np.array([1.0, 0, 0, 0])))
    run(before, 3, hyper=algorithm().hyper._replace(digest_learning_rate=0.5))
    assert programs.train._cache_size() == compiled == 1


def test_epochs_and_batches_are_no_longer_program():
    """Steps of digest and revisit are loops in the program, not unrolled copies."""

    def program(epochs, size):
        both = [each._replace(epochs=epochs, batch_size=size) for each in (DIGEST, REVISIT)]
        chosen = fed_md(TWO, Alignment(PUBLIC_LABELS, ALIGNED), CLASSES, *both)
        private = FederatedData.from_arrays(
            {"image": IMAGES, "label": LABELS}, offsets=np.cumsum([0, *SIZES])
        )
        data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
        key = jax.random.key(0)

        def round_(state):
            inputs = jax.tree.map(jnp.asarray, data).read(chosen.select(0, key))
            hyper = jax.tree.map(jnp.asarray, chosen.hyper)
            return chosen.round(state, {}, Round(0, key, inputs), hyper)[0]

        return str(jax.make_jaxpr(round_)(jax.eval_shape(chosen.init, key)))

    few, many, large_batches = program(1, 2), program(28, 2), program(1, 5)
    loops = {text.count("while[") for text in (few, many, large_batches)}
    assert len(loops) == 1 and 0 not in loops
    assert many.count("\n") == few.count("\n")
    # Batches of 2 do not divide the parties' examples, so their padding is masked.
    assert few.count("\n") < 1.1 * large_batches.count("\n")


# ------------------------------------------------------------------------------- the properties

DIGEST_ONLY = dict(
    groups="alike",
    digest=LocalTraining(optax.sgd, batch_size=ALIGNED),
    revisit=LocalTraining(optax.sgd, epochs=0),
)


def test_equal_models_have_nothing_to_digest():
    """The loss is exactly 0, and the gradient is the penalty's alone."""
    state = start(**DIGEST_ONLY)
    params = state["linear"].variables.params
    alike = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:, :1], leaf.shape), params)
    state["linear"] = state["linear"]._replace(variables=Variables(alike, {}))
    after, metrics = run(state, **DIGEST_ONLY)
    for party in range(4):
        assert (metrics[f"linear_{party}/digest_loss"] == 0).all()
    shrunk = (1 - RATES[0] * 2 * PENALTY) * alike["w"][0]
    np.testing.assert_allclose(after["linear"].variables.params["w"], shrunk, rtol=1e-12)


def test_the_digest_is_in_training_mode_and_the_consensus_is_not():
    """Alike parties with dropout agree, and have an error all the same: the digest's features drop.

    Were senders' dropped too, the consensus would have errors of its own.
    """
    options = DIGEST_ONLY | dict(groups="dropping")
    state = start(**options)
    params = state["linear"].variables.params
    alike = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:, :1], leaf.shape), params)
    state["linear"] = state["linear"]._replace(variables=Variables(alike, {}))
    rounds = 60
    still = algorithm(**options).hyper._replace(digest_learning_rate=0.0)
    _, metrics = run(state, rounds, hyper=still, **options)
    losses = np.stack([metrics[f"linear_{party}/digest_loss"] for party in range(4)])
    assert len(set(losses[:, 0])) == 4
    w = alike["w"][0, 0]
    signs = (
        2.0 * np.indices((2,) * FEATURES).reshape(FEATURES, -1).T - 1
    )  # a feature is x + x or x - x
    expected = []
    for round in range(rounds):
        rows = np.asarray(algorithm(**options).select(round, jax.random.key(0)).examples[PUBLIC])[0]
        parts = PUBLIC_IMAGES[rows, :, None] * w
        errors = np.einsum("sf,rfc->src", signs, parts)
        expected.append(np.abs(errors).mean())
    # Independent errors of four senders would add about an eighth.
    assert np.mean(losses) == pytest.approx(np.mean(expected), rel=0.05)


def test_a_consensus_of_one_draws_the_others_to_it():
    state = start(**DIGEST_ONLY)
    rows = np.asarray(algorithm(**DIGEST_ONLY).select(0, jax.random.key(0)).examples[PUBLIC])[0]
    for k in range(4):
        weights = np.eye(4)[k]
        hyper = algorithm(**DIGEST_ONLY).hyper._replace(weights=weights)
        after, _ = run(state, hyper=hyper, **DIGEST_ONLY)
        before = state["linear"].variables.params
        logits = lambda params, j: PUBLIC_IMAGES[rows] @ params["w"][j] + params["b"][j]
        own = jax.tree.map(lambda leaf: leaf[0], before)
        target = logits(own, k)
        for j in set(range(4)) - {k}:
            distance = [
                np.abs(logits(params, j) - target).mean()
                for params in (own, after["linear"].variables.params)
            ]
            assert distance[1] < distance[0]


def test_without_a_digest_parties_are_independent():
    """Another party's examples change nothing, to the last bit."""
    options = dict(digest=DIGEST._replace(epochs=0))
    before = start(**options)
    others = IMAGES.copy()
    others[: SIZES[0]] += 1.0
    ours, theirs = (
        params_of(run(before, 2, images=each, **options)[0]) for each in (IMAGES, others)
    )
    for client in (1, 2, 3):
        jax.tree.map(np.testing.assert_array_equal, ours[client], theirs[client])
    assert np.abs(ours[0]["w"] - theirs[0]["w"]).max() > 1e-3
    with_digest = params_of(run(before, 2, images=others)[0])
    assert np.abs(with_digest[2]["w"] - params_of(run(before, 2)[0])[2]["w"]).max() > 1e-6


def test_permuting_parties_permutes_results():
    """Parties 0 and 2, of one architecture, change places: models, examples and weights."""
    before = start()
    swapped = dict(before)
    swapped["linear"] = jax.tree.map(lambda leaf: leaf[:, ::-1], before["linear"])
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    order = np.concatenate([parts[c] for c in (2, 1, 0, 3)])
    sizes = tuple(SIZES[c] for c in (2, 1, 0, 3))
    weights = np.array([0.1, 0.4, 0.2, 0.3])
    ours, _ = run(before, 2, hyper=algorithm().hyper._replace(weights=weights))
    hyper = algorithm().hyper._replace(weights=weights[[2, 1, 0, 3]])
    permuted = dict(images=IMAGES[order], labels=LABELS[order], sizes=sizes)
    theirs, _ = run(swapped, 2, hyper=hyper, **permuted)
    theirs["linear"] = jax.tree.map(lambda leaf: leaf[::-1], theirs["linear"])
    assert_close(theirs, ours, rtol=1e-6, atol=1e-9)


def test_only_the_proportions_of_weights_count():
    before = start()
    results = [
        run(before, 2, hyper=algorithm().hyper._replace(weights=factor * np.array([1.0, 2, 3, 4])))[
            0
        ]
        for factor in (1.0, 8.0)
    ]
    assert_close(*results, rtol=1e-6, atol=1e-9)
    hyper = fed_md_module.FedMDHyper(weights=(2, 4, 6, 8))
    given = fed_md(TWO, Alignment(PUBLIC_LABELS, 3), CLASSES, hyper=hyper).hyper.weights
    np.testing.assert_allclose(given, [0.1, 0.2, 0.3, 0.4], rtol=1e-6)


def test_a_constant_added_to_a_partys_logits_moves_everybody():
    """A constant in all logits of a party does not change its softened scores, but exchanged logits."""
    state = start(**DIGEST_ONLY)
    shifted = start(**DIGEST_ONLY)
    params = shifted["linear"].variables.params
    params["b"] = params["b"] + np.array([[7.0, 0, 0, 0]])
    predictor = algorithm(**DIGEST_ONLY).predictors["linear"]
    predicted = [
        predictor.predict(
            Variables({k: v[0, 0] for k, v in each["linear"].variables.params.items()}, {}),
            {"image": jnp.asarray(IMAGES)},
        ).argmax(-1)
        for each in (state, shifted)
    ]
    np.testing.assert_array_equal(*predicted)
    losses = [run(each, **DIGEST_ONLY)[1] for each in (state, shifted)]
    for party in range(4):
        change = losses[1][f"linear_{party}/digest_loss"] - losses[0][f"linear_{party}/digest_loss"]
        assert np.abs(change).min() > 0.1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=10)
def test_the_digests_loss_is_a_mean_over_classes(rows, classes, seed):
    left, right = np.random.default_rng(seed).normal(size=(2, rows, classes))
    found = mean_absolute_error(jnp.asarray(left), jnp.asarray(right))
    np.testing.assert_allclose(found, np.abs(left - right).mean(-1), rtol=1e-6)


# ----------------------------------------------------------------------------- what is exchanged


def test_the_alignment_subset_of_cifar10_has_500_of_every_class():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    drawn = jax.jit(jax.vmap(lambda key: stratified_sample(key, labels, 5000)))(
        jax.random.split(jax.random.key(0), 2)
    )
    for rows in np.asarray(drawn):
        assert len(set(rows.tolist())) == 5000
        assert np.bincount(labels[rows]).tolist() == [500] * 10
    assert len(set(drawn[0].tolist()) & set(drawn[1].tolist())) < 1000


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
@settings(max_examples=8)
def test_a_stratified_sample_has_rounded_shares(labels, data):
    labels = np.array(labels)
    count = data.draw(st.integers(1, len(labels)))
    rows = np.asarray(stratified_sample(jax.random.key(count), labels, count))
    assert len(set(rows.tolist())) == len(rows) == count
    for label in set(labels.tolist()):
        share = count * np.mean(labels == label)
        assert np.floor(share) <= np.sum(labels[rows] == label) <= np.ceil(share)


def test_every_row_is_drawn_as_often():
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1])
    draw = jax.jit(jax.vmap(lambda key: stratified_sample(key, labels, 3)))
    rows = np.asarray(draw(jax.random.split(jax.random.key(1), 3000)))
    # Each of nine examples is drawn about 1000 times, with a standard deviation of about 26.
    assert np.abs(np.bincount(rows.ravel(), minlength=9) - 1000).max() < 120


def test_alignment_subsets_are_fresh_each_round_and_the_same_for_all():
    select = algorithm().select
    first, again, second = (
        np.asarray(select(n, jax.random.key(0)).examples[PUBLIC]) for n in (0, 0, 1)
    )
    assert first.shape == (1, ALIGNED)
    np.testing.assert_array_equal(first, again)
    assert set(first[0].tolist()) != set(second[0].tolist())
    everybody = algorithm().select(0, jax.random.key(0)).clients
    assert {name: c.tolist() for name, c in everybody.items()} == {PARTIES: [0, 1, 2, 3]}


def test_nothing_but_scores_leaves_a_party():
    """With 5,000 examples and 16 classes a party sends [5000, 16] floats and no other array."""
    model = linear(16)
    images = jax.ShapeDtypeStruct((5000, FEATURES), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    data = ClientData({"image": images}, scalar, scalar, scalar, 5000, False)
    with jax.enable_x64(False):
        variables = jax.eval_shape(model.init, jax.random.key(0))
        say = lambda variables, data: message_of_scores(model, variables, 1.0, data, DIGEST, 500)
        result = jax.eval_shape(say, variables, data)
    leaves = jax.tree.leaves(result._replace(weight=None))
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((5000, 16), jnp.float32)]
    about = fed_md(
        {"linear": PartyGroup(model, np.arange(3))}, Alignment(np.zeros(5000, int), 5000), 16
    ).communication
    assert {name: each.up for name, each in about.items()} == {
        f"linear_{k}": 320_000 for k in range(3)
    }
    assert about["linear_0"].down == 320_000 + 20_000
    whole = fed_md(
        {"linear": PartyGroup(model, np.arange(3))}, Alignment(np.zeros(7, int), None), 16
    )
    assert whole.communication["linear_0"].down == 7 * 16 * 4


def test_a_round_sends_scores_and_then_nothing(monkeypatch):
    """All that leaves the parties in the two passes of a round is the sum of their scores."""
    sums, real = [], run_parties

    def watched(*arguments):
        result = real(*arguments)
        sums.append(jax.tree.map(lambda leaf: leaf.shape, result.combined))
        assert not jax.tree.leaves(result.reports)
        return result

    monkeypatch.setattr(fed_md_module, "run_parties", watched)
    private = FederatedData.from_arrays(
        {"image": IMAGES, "label": LABELS}, offsets=np.cumsum([0, *SIZES])
    )
    data = jax.tree.map(jnp.asarray, resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}}))
    chosen, key = algorithm(), jax.random.key(0)

    def round_(state):
        hyper = jax.tree.map(jnp.asarray, chosen.hyper)
        return chosen.round(state, {}, Round(0, key, data.read(chosen.select(0, key))), hyper)[0]

    jax.eval_shape(round_, jax.eval_shape(chosen.init, key))
    assert sums == [(ALIGNED, CLASSES), None]


def test_what_is_sent_is_of_evaluation_mode():
    """In evaluation mode: by running averages, which do not change, and without dropout."""
    shape = (6, 6, 1)
    model = from_flax_linen(FedMDNetwork((3, 4), 0.5, CLASSES), jnp.zeros((1, *shape)))
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    variables = jax.tree.map(lambda leaf: jnp.asarray(draw.uniform(0.5, 1.5, leaf.shape)), shapes)
    batch = {"image": jnp.asarray(draw.normal(size=(7, *shape)))}
    count = jnp.asarray(7)
    data = ClientData(batch, jnp.asarray(0), count, count, 7, False)
    found = message_of_scores(model, variables, 1.0, data, DIGEST, batch_size=3)
    expected = model.apply(variables, batch, train=False)[0]
    np.testing.assert_allclose(found.sends, expected, rtol=1e-6)
    in_training = model.apply(
        variables, batch, train=True, key=jax.random.key(0), mask=jnp.ones(7)
    )[0]
    assert np.abs(found.sends - in_training).max() > 0.1
    # Nothing in place of what the party has.
    assert found.state is None


def test_the_whole_public_set():
    """Then no subset is drawn: the result equals that of a subset of all examples, up to their order."""
    digest = DIGEST_ONLY["digest"]._replace(batch_size=PUBLIC_ROWS)
    everything = DIGEST_ONLY | dict(alignment_size=None, digest=digest)
    subset = everything | dict(alignment_size=PUBLIC_ROWS)
    before = start(**DIGEST_ONLY)
    ours, theirs = (run(before, 2, **options)[0] for options in (everything, subset))
    assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------- bad input


def build(
    groups=TWO, labels=PUBLIC_LABELS, alignment_size=5, exchanged="logits", weights=None, **options
):
    alignment = Alignment(labels, alignment_size, exchanged)
    options = dict(hyper=fed_md_module.FedMDHyper(weights=weights)) | options
    return fed_md(groups, alignment, CLASSES, **options)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: build({}), "groups must hold at least one architecture"),
        (lambda: check_groups({"a": 3}), r"groups\['a'\] must be a PartyGroup, got 3"),
        (
            lambda: build({"a": PartyGroup(linear(), np.array([], int))}),
            r"groups\['a'\].clients must not",
        ),
        (
            lambda: build({"a": PartyGroup(linear(), [0, 1]), "b": PartyGroup(linear(), [1])}),
            "party 1 is in 'a' and 'b'",
        ),
        (
            lambda: build({"a": PartyGroup(linear(), [0]), "b": PartyGroup(linear(3), [1])}),
            r"groups must have models of num_classes=4 outputs, .* got \{'b': 3\}",
        ),
        (
            lambda: build(alignment_size=21),
            "alignment_size must be at most the 20 public examples, got 21",
        ),
        (lambda: build(alignment_size=0), "alignment_size must be at least 1, got 0"),
        (lambda: build(labels=np.zeros(0, int)), "public_labels must not be empty"),
        (lambda: build(weights=(1, 2)), "hyper.weights must be 4 numbers, one per party"),
        (lambda: build(weights=3.0), "hyper.weights must be 4 numbers, one per party, got 3.0"),
        (
            lambda: build(weights=(1, 2, -1, 1)),
            "hyper.weights must be at least 0, finite and not all 0",
        ),
        (
            lambda: build(weights=(0, 0, 0, 0)),
            "hyper.weights must be at least 0, finite and not all 0",
        ),
        (lambda: build(exchanged="z"), "exchanged must be 'logits' or 'probabilities', got 'z'"),
        (
            lambda: build(digest=DIGEST._replace(batch_size=0)),
            "digest.batch_size must be at least 1",
        ),
        (lambda: build(revisit=REVISIT._replace(epochs=-1)), "revisit.epochs must be at least 0"),
        (
            lambda: build(revisit=REVISIT._replace(optimizer=optax.sgd(0.1))),
            "revisit.optimizer must be a function of the learning rate",
        ),
        (
            lambda: build(hyper=fed_md_module.FedMDHyper(temperature=0)),
            "hyper.temperature must be .*above 0",
        ),
        (
            lambda: build(hyper=fed_md_module.FedMDHyper(digest_learning_rate=np.nan)),
            "hyper.digest_learning_rate must be finite and at least 0",
        ),
        (
            lambda: build(hyper=fed_md_module.FedMDHyper(1e-3, -1)),
            "hyper.revisit_learning_rate must be at least 0",
        ),
        (lambda: build(weights=("a", 1, 1, 1)), "hyper.weights must be numbers, one per party"),
        (
            lambda: build(labels=np.full(20, 4)),
            "public_labels must be classes of the joint label space, 0 to 3, got 4 to 4",
        ),
        (
            lambda: build(labels=np.zeros(20)),
            r"public_labels must be integers \[examples\], got float64",
        ),
        (
            lambda: build(labels=np.zeros((20, 1), int)),
            r"public_labels must be integers \[examples\], got int64 \[20, 1\]",
        ),
        (lambda: build(labels=None), r"public_labels must be integers \[examples\], got None"),
        (lambda: build(labels=3), r"public_labels must be integers \[examples\], got int64 \[\]"),
        (
            lambda: build(labels=[[1], [1, 2]]),
            r"public_labels must be integers \[examples\], got \[\[",
        ),
        (
            lambda: build({"a": PartyGroup(linear(), [0, 1]), "a_0": PartyGroup(linear(), [2])}),
            "names that tell models apart, 'a' and 'a_0' both have one called 'a_0'",
        ),
        (
            lambda: build({"a": PartyGroup(linear(), np.array([0.0, 1.5]))}),
            r"groups\['a'\].clients must be integers",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_public_labels_are_those_of_the_public_examples():
    """With more labels than examples the draw would give indices of examples that do not exist."""
    assert algorithm().data_set_sizes == {PUBLIC: len(PUBLIC_LABELS)}


def test_a_party_without_private_examples():
    columns = {"image": np.zeros((2, 3)), "label": np.zeros(2, np.int32)}
    with pytest.raises(ValueError, match="client '1' has no examples"):
        FederatedData.from_arrays(columns, offsets=[0, 2, 2])
    empty = FederatedData.from_arrays(columns, offsets=[0, 2, 2], allow_empty=True)
    with pytest.raises(ValueError, match="at least one example, client '1' has none"):
        resident_data(empty)


def test_a_party_has_one_weight():
    """Values per example would be read as values per class where both have the same number."""

    def update(model, message, state, data, key):
        return PartyResult(None, {}, jnp.ones((CLASSES, CLASSES)), jnp.ones(CLASSES))

    data = ClientData({}, jnp.int32(0), jnp.int32(1), jnp.int32(1), 1, False)
    with pytest.raises(AssertionError, match="shape"):
        _client_update(update, None, None, (None, None), data, None)
