"""Parties that train alone: on their own examples, on shared ones, and until they stop gaining."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_model import linear_model

from fedcodist.algorithms.parties import groups
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import (
    SHARED,
    LocalOnlyHyper,
    LocalOnlyParty,
    local_only,
)
from fedcodist.algorithms.parties.party import PartyResult
from fedcodist.algorithms.parties.patience import Patience, stopping_early
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Examples, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.core.restart import restarted
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.validation import VALIDATION, ValidationData, validation_indices
from fedcodist.run.evaluation import evaluation_split
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, RATE, ROUNDS = (5, 2, 7), 3, 4, 0.3, 5
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)).astype(np.float32),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
}
TESTS = {
    "image": GENERATOR.normal(size=(30, FEATURES)).astype(np.float32),
    "label": GENERATOR.integers(0, CLASSES, 30).astype(np.int32),
}
TRAINING = LocalTraining(lambda rate: optax.sgd(rate, momentum=0.9), batch_size=sum(SIZES))
PATIENCE = Patience(ValidationData(30), 1, 0.0, "test data")


GROUPS = {
    "pair": PartyGroup(linear_model(FEATURES, CLASSES), np.array([0, 2])),
    "single": PartyGroup(linear_model(FEATURES, CLASSES), np.array([1])),
}


@functools.cache
def trained(devices=None, shared=False, **options):
    """(weights by client [rounds, ...], state, metrics); every number of rounds in one program."""
    count = sum(SIZES) if shared else None
    algorithm = local_only(GROUPS, TRAINING, count, hyper=LocalOnlyHyper(RATE), **options)
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(algorithm, ROUNDS, mesh)
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {SHARED: COLUMNS, VALIDATION: TESTS})
    seeds = put(np.zeros(1, np.uint32))
    hyper = jax.tree.map(np.float32, algorithm.hyper)
    weights = []
    for rounds in range(ROUNDS + 1):
        state, _, metrics = programs.train(
            *put((programs.init(seeds), {}, seeds, np.int32(0), np.int32(rounds), hyper, data))
        )
        state = jax.tree.map(lambda leaf: np.asarray(leaf)[0], state)
        weights.append(by_client(lambda name, index, state=state: params(state, name)[index]))
    assert programs.train._cache_size() == 1
    return weights, state, jax.tree.map(lambda leaf: np.asarray(leaf)[0], metrics)


def params(state, name):
    return state[name].variables.params["w"]


def by_client(value):
    return {0: value("pair", 0), 1: value("single", 0), 2: value("pair", 1)}


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def plain(w, rows, rounds):
    """Momentum goes on from round to round."""
    velocity = 0.0
    images, targets = (
        COLUMNS["image"][rows].astype(np.float64),
        np.eye(CLASSES)[COLUMNS["label"][rows]],
    )
    for _ in range(rounds):
        gradient = images.T @ (softmax(images @ w) - targets) / len(images)
        velocity = 0.9 * velocity + gradient
        w = w - RATE * velocity
    return w


def rows_of(client, shared):
    return slice(None) if shared else slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_party_trains_as_if_it_were_alone(shared):
    weights, _, metrics = trained(shared=shared)
    for client in range(3):
        expected = plain(weights[0][client], rows_of(client, shared), ROUNDS)
        np.testing.assert_allclose(weights[ROUNDS][client], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(weights[0][0] - weights[0][2]).max() > 0.1  # their own initial models
    assert metrics["pair_0/finite"].all()


@pytest.mark.slow
def test_devices_and_chunks_change_nothing():
    expected = trained(shared=True)[0][ROUNDS]
    found = trained(shared=True, devices=2, execution=Execution("vmap", 2))[0][ROUNDS]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def accuracy_of(w):
    return np.mean((TESTS["image"] @ w).argmax(-1) == TESTS["label"])


def keras(weights, patience, min_delta):
    """(the last round in which the party trains, its best accuracy, rounds since then)."""
    best, waited = -np.inf, 0
    for round in range(1, ROUNDS + 1):
        now = accuracy_of(weights[round])
        if now - min_delta > best:
            best, waited = now, 0
        else:
            waited += 1
        if waited == patience:
            break
    return round, best, waited


def test_a_gain_must_be_larger_than_the_least_one():
    """The rounds' models label 5, 6, 7, 8 and 9 of ten validation examples rightly."""
    patience = Patience(ValidationData(10), 2, 0.15, "test data")
    columns = {"image": jnp.eye(10), "label": jnp.zeros(10, jnp.int32)}
    examples = Examples(columns, validation_indices(patience.data))

    def update(model, right, party, data, key):
        w = jnp.where(jnp.arange(10)[:, None] < right, jnp.array([1.0, 0]), jnp.array([0, 1.0]))
        return PartyResult(party._replace(variables=Variables({"w": w}, {})), {})

    patient = functools.partial(stopping_early(update, patience, examples), linear_model(10, 2))
    start = Variables({"w": jnp.zeros((10, 2))}, {})
    party = LocalOnlyParty(start, None, jnp.float32(-jnp.inf), jnp.int32(0))
    size = jnp.int32(1)
    data = ClientData(columns, jnp.int32(0), size, size, capacity=1, ragged=False)
    jitted, course = jax.jit(patient), []
    for right in (5, 6, 7, 8, 9):
        party = jitted(right, party, data, jax.random.key(0)).state
        course.append((round(10 * float(party.best)), int(party.waited)))
    assert course == [(5, 0), (5, 1), (7, 0), (7, 1), (9, 0)]


@pytest.mark.parametrize(
    "patience, min_delta",
    [
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(3, 0.0, marks=pytest.mark.slow),
        (2, 0.08),
    ],
)
def test_a_party_stops_when_it_no_longer_gains(patience, min_delta):
    """As in Keras: each party stops by itself, and has the last weights, not the best."""
    free, _, _ = trained()
    stopped, state, _ = trained(patience=PATIENCE._replace(patience=patience, min_delta=min_delta))
    ends = []
    for client in range(3):
        course = [free[round][client] for round in range(ROUNDS + 1)]
        end, best, waited = keras(course, patience, min_delta)
        for round in range(ROUNDS + 1):
            found, expected = stopped[round][client], course[min(round, end)]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        ends.append((end, keras(course, patience, 0.0)[0], keras(course, 1, min_delta)[0]))
        left = by_client(lambda name, index: (state[name].best[index], state[name].waited[index]))
        np.testing.assert_allclose(left[client], (best, waited), rtol=1e-6)
    found, without_delta, without_patience = zip(*ends, strict=True)
    assert min(found) < ROUNDS
    # For each of both settings there is a party that it affects.
    assert (found != without_delta) == (min_delta > 0)
    assert (found != without_patience) == (patience > 1)


@pytest.mark.parametrize("own_patience", [None, PATIENCE])
def test_parties_that_stopped_go_on_in_another_run(own_patience):
    """Its validation data may be others, and its rounds count anew."""
    best, waited = np.float32([[0.9, 0.9]]), np.int32([[7, 7]])
    algorithm = local_only(GROUPS, TRAINING, patience=own_patience)
    first = algorithm.init(jax.random.key(0))
    stopped = jax.tree.map(lambda leaf: np.asarray(leaf)[None] + 1, first)
    stopped["pair"] = stopped["pair"]._replace(best=best, waited=waited)
    again = restarted(algorithm, stopped)["pair"]
    assert np.all(again.best == -np.inf) and not again.waited.any()
    expected = stopped["pair"]._replace(best=again.best, waited=again.waited)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), again, stopped["pair"])


def test_rounds_without_a_step_have_no_loss():
    """A party that has stopped would otherwise pull the mean loss over rounds towards 0."""
    _, _, metrics = trained(patience=PATIENCE._replace(patience=2, min_delta=0.08))
    for party in ("pair_0", "pair_2", "single"):
        has_trained = metrics[f"{party}/num_steps"] > 0
        np.testing.assert_array_equal(np.isfinite(metrics[f"{party}/loss"]), has_trained)
    assert not all(metrics[f"{party}/num_steps"].all() for party in ("pair_0", "pair_2", "single"))


def test_a_round_leaves_the_types_that_it_was_given():
    """A start from an earlier state then needs no second compilation."""
    for options in (dict(), dict(patience=PATIENCE)):
        state = jax.eval_shape(local_only(GROUPS, TRAINING, **options).init, jax.random.key(0))
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def program(parties_of_a=1, parties_of_b=1, training=TRAINING):
    """One round of two architectures, traced, as text."""
    ends = np.cumsum([parties_of_a, parties_of_b])
    a, b = np.arange(ends[0]), np.arange(ends[0], ends[1])
    algorithm = local_only(
        {
            "a": PartyGroup(linear_model(FEATURES, CLASSES), a),
            "b": PartyGroup(linear_model(FEATURES, CLASSES), b),
        },
        training,
    )
    private = FederatedData.from_arrays(
        {name: column[: ends[1]] for name, column in COLUMNS.items()},
        offsets=np.arange(ends[1] + 1),
    )
    data = resident_data(private)
    key = jax.random.key(0)

    def round_(state):
        inputs = jax.tree.map(jnp.asarray, data).read(algorithm.select(0, key))
        return algorithm.round(state, {}, Round(0, key, inputs), algorithm.hyper)[0]

    return str(jax.make_jaxpr(round_)(jax.eval_shape(algorithm.init, key)))


def test_parties_of_one_architecture_are_compiled_once():
    """A program holds a network's training once, however many parties have the network."""
    loops = [program(*parties).count("while[") for parties in ((1, 1), (4, 3), (8, 1))]
    assert loops[0] == loops[1] == loops[2] > 0


def test_epochs_and_batches_are_no_longer_program():
    """Steps are a loop in the program, not unrolled copies."""
    few, many = (
        program(training=TRAINING._replace(epochs=epochs, batch_size=size))
        for epochs, size in ((1, 5), (7, 2))
    )
    assert few.count("while[") == many.count("while[") > 0
    assert many.count("\n") < 1.05 * few.count("\n")


@pytest.mark.parametrize(
    ("name", "before"),
    [("local_only", "isolated"), ("centralised training", "pooled training")],
)
def test_a_method_that_was_renamed_draws_the_batches_that_it_drew_before(name, before):
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = jax.tree.map(jnp.asarray, resident_data(private))
    key = jax.random.key(0)

    @functools.partial(jax.jit, static_argnums=0)
    def after_a_round(name):
        algorithm = local_only(GROUPS, TRAINING._replace(batch_size=1), name=name)
        round = Round(jnp.int32(0), key, data.read(algorithm.select(0, key)))
        state, _, _ = algorithm.round(algorithm.init(key), {}, round, algorithm.hyper)
        return state["pair"].variables.params

    same, other = after_a_round(before), after_a_round("another")
    jax.tree.map(np.testing.assert_array_equal, after_a_round(name), same)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (same, other)), strict=True))


def test_the_name_says_what_was_looked_at():
    assert (
        local_only(GROUPS, TRAINING, patience=PATIENCE).name == "local_only, stopped on test data"
    )
    assert local_only(GROUPS, TRAINING).name == "local_only"


def test_models_by_party_become_models_by_architecture():
    names = groups.party_names(GROUPS)
    assert names == {"pair": ("pair_0", "pair_2"), "single": ("single",)}
    models = {
        own: Variables({"w": np.full((2, 3), place)}, {})
        for place, own in enumerate(("pair_0", "pair_2", "single"))
    }
    stacked = groups.stacked(GROUPS, models)
    assert stacked["pair"].params["w"].shape == (2, 2, 3)
    assert (stacked["pair"].params["w"][:, 1] == 1).all()
    assert stacked["single"].params["w"].shape == (2, 1, 3)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(training=TRAINING._replace(epochs=0)), "training.epochs must be at least 1"),
        (dict(num_shared=0), "num_shared must be at least 1, got 0"),
        (
            dict(patience=PATIENCE._replace(data=ValidationData(0))),
            "patience.data.num_examples must be",
        ),
        (
            dict(patience=PATIENCE._replace(data=ValidationData(30, 0))),
            "patience.data.batch_size must be",
        ),
        (dict(patience=PATIENCE._replace(patience=0)), "patience.patience must be at least 1"),
        (dict(patience=PATIENCE._replace(min_delta=-1.0)), "patience.min_delta must be"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        local_only(GROUPS, **(dict(training=TRAINING) | options))
    assert "\n" not in str(error.value)


def test_a_number_is_no_validation_data():
    with pytest.raises(TypeError, match=r"patience\.data must be .*ValidationData, got 30"):
        local_only(GROUPS, TRAINING, patience=PATIENCE._replace(data=30))


def test_evaluation_is_by_party():
    """One program evaluates all parties of an architecture; results are by the parties' names."""
    algorithm = local_only(GROUPS, TRAINING)
    programs = build_programs(algorithm, 1)
    state = programs.init(np.zeros(2, np.uint32))
    split = FederatedData.from_arrays(TESTS, offsets=[0, 30])
    found = programs.evaluate(state, {"test": evaluation_split(split)})["test"]
    assert set(found) == {"pair_0", "pair_2", "single"}
    for name, weights in (
        ("pair_2", params(state, "pair")[:, 1]),
        ("single", params(state, "single")[:, 0]),
    ):
        logits = jnp.einsum("rf,sfc->src", TESTS["image"], weights)
        expected = np.mean(logits.argmax(-1) == TESTS["label"], axis=-1)
        np.testing.assert_allclose(found[name]["accuracy"], expected, rtol=1e-6)
