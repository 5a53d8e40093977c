"""Personal models: every client's is evaluated, wherever its client state is stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_model import linear_model

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.svd import svd
from fedcodist.core.client_states import ClientStates, HostClientStates
from fedcodist.core.inputs import Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import PersonalModel
from fedcodist.core.metrics import accuracy, precision
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.run.blocks import Trained
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.model_evaluation import model_evaluation, on_devices
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLASSES, FEATURES, CLIENTS, ROUNDS, SEEDS = 3, 4, 5, 3, 2
TRAINING = LocalTraining(optax.adam, batch_size=4, epochs=1)


def network(width) -> Model:
    def init(key):
        first, second = jax.random.split(key)
        shapes = ((first, (FEATURES, width)), (second, (width, CLASSES)))
        return Variables([jax.random.normal(k, shape) for k, shape in shapes], {})

    def apply(variables, batch, **_):
        first, second = variables.params
        return jnp.tanh(batch["image"] @ first) @ second, variables.mutable

    metrics = {f"precision_{label}": precision(label) for label in range(CLASSES)}
    return Model(init, apply, cross_entropy, {"accuracy": accuracy(), **metrics}, CLASSES)


TEACHER, STUDENT = network(6), network(2)


def examples(seed, clients) -> FederatedData:
    draws = np.random.default_rng(seed)
    columns = {
        "image": draws.normal(size=(4 * clients, FEATURES)).astype(np.float32),
        "label": draws.integers(0, CLASSES, 4 * clients).astype(np.int32),
    }
    return FederatedData.from_arrays(columns, offsets=4 * np.arange(clients + 1))


TRAIN, TEST = examples(0, CLIENTS), examples(1, 2)


def method():
    hyper = FedKDHyper(0.1, 0.1)
    kd = fed_kd(TEACHER, STUDENT, TRAIN.columns, TRAINING, hyper=hyper)
    return compressed(kd, ROUNDS, svd(), svd())


@functools.cache
def usual_run():
    return run()


def run(source=resident_data, cohort=2, also=None, rounds=ROUNDS, **settings):
    pools = {"main": Pool(method(), np.arange(CLIENTS), cohort)} | (also or {})
    algorithm = independent_pools(pools, TRAIN.columns)
    return run_experiment(
        Experiment(
            algorithm,
            source(TRAIN, {}),
            {"test": TEST},
            rounds,
            evaluate_every=rounds,
            seeds=SEEDS,
            **settings,
        ),
        show_progress=False,
    )


def of_teachers(outcome, round=ROUNDS):
    return [
        record
        for record in outcome.records
        if record["model"] == "main_teachers" and record["round"] == round
    ]


@pytest.fixture(scope="module")
def by_hand():
    """Each seed's accuracies and losses of all clients' teachers on the test examples, in float64."""
    found = []
    algorithm = independent_pools({"main": Pool(method(), np.arange(CLIENTS), 2)}, TRAIN.columns)
    data = resident_data(TRAIN)
    for seed in range(SEEDS):
        root = jax.random.key(seed)
        state = algorithm.init(root)
        first = jax.tree.map(np.asarray, method().init_client_state())
        rows = [first] * CLIENTS
        for round in range(ROUNDS):
            selection = algorithm.select(round, root)
            cohort = selection.clients["main"].tolist()
            own = {"main": jax.tree.map(lambda *r: jnp.stack(r), *(rows[c] for c in cohort))}
            inputs = data.read(selection)
            about = Round(jnp.int32(round), root, inputs)
            state, own, _ = jax.jit(algorithm.round)(state, own, about, algorithm.hyper)
            for place, client in enumerate(cohort):
                rows[client] = jax.tree.map(lambda leaf, p=place: np.asarray(leaf[p]), own["main"])
        start = TEACHER.init(jax.random.wrap_key_data(state["main"].inner.key)).params
        found.append([by_numpy(row.inner, start) for row in rows])
        assert {bool(row.inner.has_started) for row in rows} == {True, False}
    return np.array(found)


def by_numpy(row, start):
    """(accuracy, loss, precision of each class, NaN where none is predicted); a client that was in no
    round has the first teacher."""
    kernels = row.teacher.params if row.has_started else start
    first, second = (np.asarray(kernel, np.float64) for kernel in kernels)
    logits = np.tanh(TEST.columns["image"] @ first) @ second
    labels = TEST.columns["label"]
    of_labels = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    predicted = logits.argmax(axis=1)
    right = np.mean(predicted == labels)
    precisions = [
        np.mean(labels[predicted == label] == label) if np.any(predicted == label) else np.nan
        for label in range(CLASSES)
    ]
    return right, -np.mean(of_labels[np.arange(len(labels)), labels]), *precisions


@pytest.mark.slow
@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_all_clients_teachers_are_measured(source, by_hand):
    """Five clients, two at a time where their states are on the host."""
    outcome = usual_run() if source is resident_data else run(source)
    for record, teachers in zip(of_teachers(outcome), by_hand, strict=True):
        rights, losses, *precisions = teachers.T
        for label, own in enumerate(precisions):  # a mean over those that predict the class
            expected = np.nanmean(own) if np.isfinite(own).any() else None
            assert record[f"precision_{label}"] == pytest.approx(expected, rel=1e-5)
            assert f"per_label_precision_{label}" not in record
        assert record["accuracy"] == pytest.approx(rights.mean(), rel=1e-5)
        assert record["loss"] == pytest.approx(losses.mean(), rel=1e-4)
        spread = record["per_client"]
        assert spread["accuracy_mean"] == pytest.approx(rights.mean(), rel=1e-5)
        assert spread["accuracy_min"] == pytest.approx(rights.min(), rel=1e-5)
        assert len(record["per_label_accuracy"]) == CLASSES
    assert np.isnan(by_hand).any()  # there are some that do not predict a class
    accuracies = [record["accuracy"] for record in of_teachers(outcome)]
    found = outcome.summary["final"]["main_teachers"]["test"]["accuracy"]
    assert found == accuracies
    assert list(outcome.summary["models"]) == ["main"]  # teachers cost no bytes


@pytest.mark.slow
def test_before_the_first_round_all_have_the_same_teacher():
    for record in of_teachers(usual_run(), round=0):
        spread = record["per_client"]
        assert spread["accuracy_min"] == spread["accuracy_mean"] == record["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_a_sample_of_clients_is_evenly_spread(source, by_hand):
    records = of_teachers(run(source, evaluate_clients=3))
    for record, teachers in zip(records, by_hand, strict=True):
        assert record["loss"] == pytest.approx(teachers[[0, 2, 4], 1].mean(), rel=1e-4)


@pytest.mark.slow
def test_pools_with_and_without_models_of_their_own():
    """Each pool's client states are gathered separately; the first pool trains as it does alone."""
    also = {
        "second": Pool(method(), np.arange(3), 3),
        "plain": Pool(fed_avg(STUDENT, TRAINING), np.arange(2), 1),
    }
    alone, streamed = usual_run(), run(StreamedData, also=also)
    models = {record["model"] for record in streamed.records}
    assert models == {"main", "second", "plain", "main_teachers", "second_teachers"}
    for one, other in zip(of_teachers(alone), of_teachers(streamed), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.slow
def test_groups_of_fed_sdd_have_teachers_of_their_own():
    algorithm = fed_sdd(
        Pool(method(), np.arange(CLIENTS), 4),
        TRAIN.columns,
        num_unlabelled=1,
        num_models=2,
        distillation=Distillation(0, 1, optax.sgd),
    )
    experiment = Experiment(algorithm, resident_data(TRAIN), {"test": TEST}, 1, evaluate_every=1)
    records = run_experiment(experiment, show_progress=False).records
    losses = {r["model"]: r["loss"] for r in records if r["round"] == 1 and "loss" in r}
    assert losses["main_teachers"] != losses["model_1_teachers"]


@pytest.mark.parametrize(
    ("place", "most", "clients"),
    [("device", 9, [1, 3, 4, 6, 8]), ("device", 3, [1, 4, 8]), ("host", 3, [1, 4, 8])],
)
def test_each_client_is_measured_by_its_own_state(place, most, clients):
    """Client c's model is right about the first c of nine examples, so it tells whose state was read."""
    model = linear_model(9, 9)
    images = np.eye(9, dtype=np.float32)
    columns = {"image": images, "label": np.zeros(9, np.int32)}
    pool = Pool(fed_avg(model, TRAINING), np.array([1, 3, 4, 6, 8]), 2)
    algorithm = independent_pools({"main": pool}, columns)
    # All that a client keeps is its own index.
    wrong = lambda client: (jnp.arange(9) >= client).astype(jnp.float32)
    own = lambda state, client: Variables({"w": jnp.zeros((9, 9)).at[:, 1].set(wrong(client))}, {})
    states = ClientStates(pool.clients, np.int32(0))
    algorithm = algorithm._replace(
        client_states={"main": states}, personal_models={"main": {"own": PersonalModel(model, own)}}
    )
    test = FederatedData.from_arrays(columns, offsets=[0, 9])
    experiment = Experiment(
        algorithm, resident_data(test), {"test": test}, 1, evaluate_clients=most
    )
    of_all = {"main": pool.clients[None].astype(np.int32)}
    on_host = None
    if place == "host":
        on_host = HostClientStates(algorithm.client_states, 1)
        on_host.scatter(of_all, of_all)
    evaluate = model_evaluation(build_programs(algorithm, 1), experiment, None, on_host)
    state = jax.tree.map(lambda leaf: leaf[None], algorithm.init(jax.random.key(0)))
    trained = Trained(state, None if on_host else of_all)
    found = evaluate(trained, on_devices(experiment.splits, None))["test"]["own"]
    np.testing.assert_allclose(found["accuracy_per_client"], [np.array(clients) / 9], rtol=1e-6)
    np.testing.assert_allclose(found["accuracy"], [np.mean(clients) / 9], rtol=1e-6)


def test_no_clients_are_no_sample():
    with pytest.raises(ValueError, match=r"^evaluate_clients must be at least 1, got 0"):
        run(evaluate_clients=0)


@pytest.mark.parametrize("name", ["main_teachers", "main_fine_tuned"])
def test_no_pool_has_the_name_of_anothers_models(name):
    also = {name: Pool(fed_avg(STUDENT, TRAINING), np.arange(2), 1)}
    message = f"{name!r} is a model of pool 'main' and of pool {name!r}"
    with pytest.raises(ValueError, match=rf"^pools must have names .*: {message}\.$"):
        run(also=also)
