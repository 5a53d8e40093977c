"""FedAvg and PeriodicCodist among clients of a graph, and clients alone, against plain NumPy."""

import functools

import jax
import numpy as np
import optax
import pytest

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.centralised import centralised
from fedcodist.algorithms.graph.decentralised_fed_avg import decentralised_fed_avg
from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    DecentralisedPeriodicHyper,
    PublicAnswers,
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_only_steps
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import keys
from fedcodist.core.local_steps import CLIENT_STEPS, StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.core.shuffling import stream_positions
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.placement import replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, PUBLIC_ROWS, RATE = (5, 7, 6, 4), 3, 4, 12, 0.2
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(sum(SIZES), FEATURES)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32)
PUBLIC_IMAGES = GENERATOR.normal(size=(PUBLIC_ROWS, FEATURES)).astype(np.float32)
TRAINING = StepTraining(batch_size=3, steps=2)
TEACHING = LocalTraining(optax.sgd, batch_size=PUBLIC_ROWS)  # one step, of all examples


def linear() -> Model:
    def init(key):
        return Variables({"w": jax.random.normal(key, (FEATURES, CLASSES))}, {})

    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, CLASSES)


GROUPS = {
    "three": PartyGroup(linear(), np.array([0, 2, 3])),
    "one": PartyGroup(linear(), np.array([1])),
}


def trained(algorithm, rounds, devices=None, groups=GROUPS):
    """(weights by client, before and after; metrics)."""
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("clients",))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(algorithm, rounds, mesh)
    columns = {"image": IMAGES, "label": LABELS}
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}, SHARED: columns})
    seeds = np.zeros(1, np.uint32)
    first = jax.tree.map(np.asarray, programs.init(put(seeds)))
    hyper = jax.tree.map(np.float32, algorithm.hyper)
    state, _, metrics = programs.train(
        *put((first, {}, seeds, np.int32(0), np.int32(rounds), hyper, data))
    )
    return (
        by_client(first, groups),
        by_client(state, groups),
        jax.tree.map(lambda leaf: np.asarray(leaf)[0], metrics),
    )


def by_client(state, groups):
    return {
        int(client): np.asarray(state[name].variables.params["w"])[0, place]
        for name, group in groups.items()
        for place, client in enumerate(group.clients)
    }


def softmax(logits):
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


@functools.cache
def private_rows(client, step, count):
    """The indices of the examples that a client draws for a step."""
    own = keys.derive(jax.random.key(0), CLIENT_STEPS, client)
    return np.asarray(stream_positions(keys.derive(own, "private"), 3 * step, 3, count))


def private_steps(weights, velocity, client, round, rounds, rows=None):
    """A round of plain momentum descent; `rows` are other examples than the client's private ones."""
    first, count = (np.cumsum([0, *SIZES])[client], SIZES[client]) if rows is None else (0, rows)
    for index in range(TRAINING.steps):
        step = round * TRAINING.steps + index
        drawn = first + private_rows(client, step, count)
        images, labels = IMAGES[drawn], LABELS[drawn]
        slope = softmax(images @ weights) - np.eye(CLASSES)[labels]
        velocity = 0.9 * velocity + images.T @ slope / 3
        rate = RATE * (1 + np.cos(np.pi * step / (rounds * TRAINING.steps))) / 2
        weights = weights - rate * velocity
    return weights, velocity


def close(found, expected):
    for client in expected:
        np.testing.assert_allclose(found[client], expected[client], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [pytest.param(None, marks=pytest.mark.slow), sum(SIZES)])
def test_clients_alone_and_all_on_shared_examples(shared):
    rounds = 3
    algorithm = local_only_steps(GROUPS, rounds, TRAINING, shared, LocalOnlyStepsHyper(RATE))
    weights, found, metrics = trained(algorithm, rounds)
    for client in weights:
        velocity = np.zeros((FEATURES, CLASSES))
        for round in range(rounds):
            weights[client], velocity = private_steps(
                weights[client], velocity, client, round, rounds, shared
            )
    close(found, weights)
    assert metrics["one/client_examples"].tolist() == [6] * rounds


def test_after_the_last_round_the_learning_rate_does_not_rise_again():
    """The cosine is 0 at the end of the run, and would come back."""
    algorithm = local_only_steps(GROUPS, 1, TRAINING, None, LocalOnlyStepsHyper(RATE))
    (_, once, _), (_, longer, _) = trained(algorithm, 1), trained(algorithm, 3)
    for client, weights in once.items():
        np.testing.assert_array_equal(longer[client], weights)


def test_pooled_is_one_model_of_each_architecture_on_everybodys_examples():
    rounds, count = 3, sum(SIZES)
    algorithm = centralised(GROUPS, count, rounds, TRAINING, LocalOnlyStepsHyper(RATE))
    assert {name: tuple(cost) for name, cost in algorithm.communication.items()} == {
        "three": (0, 0),
        "one": (0, 0),
    }
    first = {name: group._replace(clients=group.clients[:1]) for name, group in GROUPS.items()}
    weights, found, _ = trained(algorithm, rounds, groups=first)
    assert set(found) == {0, 1}
    for client in weights:
        velocity = np.zeros((FEATURES, CLASSES))
        for round in range(rounds):
            weights[client], velocity = private_steps(
                weights[client], velocity, client, round, rounds, count
            )
    close(found, weights)


CHANGING = np.stack([graphs.islands(4, 2), graphs.directed_cycle(4), graphs.complete(4)])


@pytest.mark.parametrize(
    ("graph", "devices"),
    [
        pytest.param(None, None, marks=pytest.mark.slow),
        (CHANGING, None),
        pytest.param(CHANGING, 4, marks=pytest.mark.slow),
    ],
)
def test_fed_avg_takes_the_mean_of_neighbours_with_the_same_architecture(graph, devices):
    rounds = 3
    algorithm = decentralised_fed_avg(GROUPS, rounds, graph, TRAINING, LocalOnlyStepsHyper(RATE))
    weights, found, _ = trained(algorithm, rounds, devices)
    velocity = {client: np.zeros((FEATURES, CLASSES)) for client in weights}
    for round in range(rounds):
        edges = graphs.complete(4) if graph is None else graph[round]
        for client in weights:
            weights[client], velocity[client] = private_steps(
                weights[client], velocity[client], client, round, rounds
            )
        mean = {}
        for client in weights:
            met = [client, *(c for c in np.flatnonzero(edges[client]) if 1 not in (c, client))]
            mean[client] = sum(SIZES[c] * weights[c] for c in met) / sum(SIZES[c] for c in met)
        weights = mean
    close(found, weights)
    size = FEATURES * CLASSES * 4
    if graph is None:
        assert algorithm.communication["three_0"] == (size, size)
    else:  # 0 learns from 3 (complete) and 2 (complete); 2 from 3 thrice, and from 0 once
        assert algorithm.communication["three_0"] == (round_(2 / 3 * size), size)
        assert algorithm.communication["three_2"].down == round_(4 / 3 * size)
        assert algorithm.communication["one"] == (0, 0)


def round_(value):
    return int(np.round(value))


@pytest.mark.parametrize("devices", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_periodic_codistillation_teaches_what_neighbours_think(devices):
    rounds, period, rate, temperature = 4, 2, 0.7, 2.0
    graph = np.stack([*[graphs.directed_cycle(4)] * 3, np.zeros((4, 4), bool)])
    graph[3, 1, [0, 2]] = True  # only client 1 has teachers then
    algorithm = decentralised_periodic_codistillation(
        GROUPS,
        PublicAnswers(PUBLIC_ROWS, PUBLIC_ROWS, period, inference_batch_size=5),
        rounds,
        graph,
        TRAINING,
        TEACHING,
        DecentralisedPeriodicHyper(RATE, rate, temperature),
    )
    weights, found, _ = trained(algorithm, rounds, devices)
    velocity = {client: np.zeros((FEATURES, CLASSES)) for client in weights}
    for round in range(rounds):
        for client in weights:
            weights[client], velocity[client] = private_steps(
                weights[client], velocity[client], client, round, rounds
            )
        if (round + 1) % period:
            continue
        said = {c: softmax(PUBLIC_IMAGES @ w / temperature) for c, w in weights.items()}
        for client in list(weights):
            teachers = np.flatnonzero(graph[round, client])
            if not teachers.size:
                continue
            target = np.mean([said[c] for c in teachers], axis=0)
            slope = softmax(PUBLIC_IMAGES @ weights[client]) - target
            weights[client] = weights[client] - rate * PUBLIC_IMAGES.T @ slope / PUBLIC_ROWS
            velocity[client] = np.zeros((FEATURES, CLASSES))
    close(found, weights)
    # In round 1 all learn from the next, in round 3 client 1 from 0 and 2; others' edges carry nothing.
    answers, indices = PUBLIC_ROWS * CLASSES * 4, 2 * PUBLIC_ROWS * 4
    assert algorithm.communication["one"] == (
        (3 * answers + indices) // rounds,
        answers // rounds,
    )
    assert algorithm.communication["three_0"] == (
        (answers + indices) // rounds,
        2 * answers // rounds,
    )


ANSWERS = PublicAnswers(PUBLIC_ROWS)


def call(graph, answers=ANSWERS, **options):
    return decentralised_periodic_codistillation(GROUPS, answers, 3, graph, **options)


GAP = {"three": GROUPS["three"]._replace(clients=np.array([0, 1, 3]))}
ALONE = np.array([[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: call(ALONE),
            "learn from in decentralised_periodic_codistillation, client 3 has none",
        ),
        (lambda: decentralised_fed_avg(GROUPS, 3, ALONE), "in decentralised_fed_avg, client 3 has"),
        (
            lambda: decentralised_fed_avg(GROUPS, 3, CHANGING[:2]),
            "run's 3 rounds, it has those of 2",
        ),
        (lambda: call(graphs.complete(5)), "an edge from 0 to 4"),
        (
            lambda: decentralised_periodic_codistillation(GAP, ANSWERS, 3, graphs.complete(4)),
            "groups must have clients 0 to 3 without a gap, it has 3 of them",
        ),
        (lambda: decentralised_fed_avg(GAP, 3), "0 to 3 without a gap, it has 3 of them"),
        (lambda: centralised(GROUPS, 0, 3), "num_shared must be at least 1, got 0"),
        (
            lambda: call(graphs.complete(4), ANSWERS._replace(period=0)),
            "period must be at least 1, got 0",
        ),
        (
            lambda: call(graphs.complete(4), ANSWERS._replace(examples=0)),
            "examples must be at least 1, got 0",
        ),
        (
            lambda: call(graphs.complete(4), hyper=DecentralisedPeriodicHyper(temperature=0.0)),
            "temperature must be above 0",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
