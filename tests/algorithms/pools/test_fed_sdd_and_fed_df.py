"""FedSDD and FedDF against plain NumPy in float64, and against what they must reduce to."""

import functools
import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_stand_ins import rounds_of_students
from scipy import stats
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_kd import fed_kd
from fedcodist.algorithms.clients.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.clients.fetch_sgd import fetch_sgd
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools import grouped_models
from fedcodist.algorithms.pools.client_ensembles import StateAndTrainedModel, with_client_ensembles
from fedcodist.algorithms.pools.fed_be import fed_be
from fedcodist.algorithms.pools.fed_df import FedDFHyper, FedDFValidation, fed_df
from fedcodist.algorithms.pools.fed_df_validation import without_worst_clients
from fedcodist.algorithms.pools.fed_sdd import FedSDDHyper, FedSDDTeaching, fed_sdd
from fedcodist.algorithms.pools.grouped_models import MAIN
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import TrainedPools
from fedcodist.compression.compressed import compressed
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.client_states import device_client_states
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Round, Selection
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.ensembles import ENSEMBLE, without_worst
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.distillation.validation import VALIDATION, ValidationData
from fedcodist.models.digits import MLP
from fedcodist.run.evaluation import evaluation_split
from fedcodist.run.experiment import Experiment, check_experiment
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 4, 6), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 3, 4
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)
STEPS, BATCH, TEACHING_RATE, TEMPERATURE = 3, 5, 0.2, 2.0
UNLABELLED_IMAGES = np.random.default_rng(1).normal(size=(11, FEATURES)).astype(np.float32)
DISTILLATION = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0)


MODEL = softmax_regression(FEATURES, CLASSES, several_starts=True)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
AVERAGING = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))


def sdd(method=AVERAGING, cohort=5, images=UNLABELLED_IMAGES, steps=STEPS, **options):
    distillation = options.pop("distillation", DISTILLATION)._replace(steps=steps)
    measured = options.pop("measured", ())
    teaching = {n: options.pop(n) for n in FedSDDTeaching._fields if n in options}
    hyper = FedSDDHyper(TEACHING_RATE, options.pop("temperature", TEMPERATURE))

    def build(pool):
        return fed_sdd(
            pool,
            federated().columns,
            len(images),
            distillation=distillation,
            teaching=FedSDDTeaching(**teaching),
            hyper=hyper,
            **options,
        )

    pool = Pool(method, np.arange(len(SIZES)), cohort)
    return with_client_ensembles(build, pool, measured) if measured else build(pool)


def trained(algorithm, rounds=ROUNDS, images=UNLABELLED_IMAGES, devices=None, programs=None):
    """The state after the last round, and the Selection of every round.

    `programs` of the same algorithm with other floats in `hyper`, or of more rounds, are not compiled
    again.
    """
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = programs or build_programs(algorithm, rounds, mesh)
    validation = {"image": images, "label": np.arange(len(images), dtype=np.int32) % CLASSES}
    data = resident_data(federated(), {UNLABELLED: {"image": images}, VALIDATION: validation})
    seeds = put(np.zeros(1, np.uint32))
    rows = put(device_client_states(algorithm.client_states, 1))
    hyper = put(jax.tree.map(np.float32, algorithm.hyper))
    state, _, metrics = programs.train(
        programs.init(seeds), rows, seeds, 0, rounds, hyper, put(data)
    )
    root = jax.random.key(0)
    selections = [jax.tree.map(np.asarray, algorithm.select(n, root)) for n in range(rounds)]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], (state, metrics)), selections


@functools.cache
def two_models_over_three_rounds():
    """(algorithm, programs), which are compiled once."""
    algorithm = sdd(num_models=2, rounds_kept=3)
    return algorithm, build_programs(algorithm, ROUNDS)


@functools.cache
def trained_by_two_models():
    """The state after the last round of FedSDD with two models, which several tests compare with."""
    return trained(sdd(num_models=2))[0][0]


def weights_of(state, name=MAIN):
    state = getattr(state, "fed_sdd", state)
    models = getattr(state, "models", state)
    return models[name].params["w"]


# --------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def local(w, client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    targets = np.eye(CLASSES)[federated().columns["label"][rows]]
    for _ in range(EPOCHS):
        w = w - RATE * images.T @ (softmax(images @ w) - targets) / len(images)
    return w


def aggregate(w, clients):
    return np.average([local(w, c) for c in clients], axis=0, weights=[SIZES[c] for c in clients])


def distilled(w, teachers, batches, scaled):
    """SGD on KL(teacher || student), both at the temperature, times T squared if scaled."""
    for batch in batches:
        images = UNLABELLED_IMAGES[batch].astype(np.float64)
        target = softmax(np.mean([images @ t for t in teachers], axis=0) / TEMPERATURE)
        slope = (softmax(images @ w / TEMPERATURE) - target) / TEMPERATURE
        factor = TEMPERATURE**2 if scaled else 1.0
        w = w - TEACHING_RATE * factor * images.T @ slope / len(batch)
    return w


def plain_sdd(algorithm, selections, names, kept, scaled, all_models=False, warm_up=0):
    state = algorithm.init(jax.random.key(0))
    models = {n: np.asarray(weights_of(state, n), np.float64) for n in names}
    buffer = []
    for round, selection in enumerate(selections):
        models = {n: aggregate(models[n], selection.clients[n].tolist()) for n in names}
        buffer = [*buffer, list(models.values())][-kept:]
        if round >= warm_up:
            teachers = [model for models_then in buffer for model in models_then]
            for n in names if all_models else [MAIN]:
                models[n] = distilled(models[n], teachers, selection.examples[UNLABELLED], scaled)
    return models


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(num_models=3, rounds_kept=1, scaled=False), marks=pytest.mark.slow),
        pytest.param(
            dict(num_models=3, rounds_kept=2, distilled="all", group_sizes=(3, 1, 1)),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(num_models=2, rounds_kept=2, warm_up=2), marks=pytest.mark.slow),
        pytest.param(dict(num_models=2, rounds_kept=2, cached=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_variants_are_a_plain_loop(options):
    algorithm = sdd(**options)
    assert_is_a_plain_loop(algorithm, trained(algorithm), options)


def test_fed_sdd_is_a_plain_loop():
    algorithm, programs = two_models_over_three_rounds()
    outcome = trained(algorithm, programs=programs)
    assert_is_a_plain_loop(algorithm, outcome, dict(num_models=2, rounds_kept=3))


def assert_is_a_plain_loop(algorithm, outcome, options):
    (state, _), selections = outcome
    names = [MAIN, *(f"model_{k}" for k in range(1, options["num_models"]))]
    expected = plain_sdd(
        algorithm,
        selections,
        names,
        options["rounds_kept"],
        options.get("scaled", True),
        options.get("distilled") == "all",
        options.get("warm_up", 0),
    )
    for n in names:
        np.testing.assert_allclose(weights_of(state, n), expected[n], rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_devices_share_the_work():
    algorithm = sdd(num_models=2, rounds_kept=2, cached=True)
    (one, _), _ = trained(algorithm)
    (three, _), _ = trained(algorithm, devices=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), three, one)


def test_groups_of_one_program_are_groups_trained_one_by_one():
    """Groups of three and two clients, with state: SCAFFOLD's variates of nobody else change."""
    algorithm = sdd(scaffold(MODEL, len(SIZES), TRAINING), num_models=2, steps=0)
    key = jax.random.key(0)
    data = jax.tree.map(jnp.asarray, resident_data(federated(), {}))
    state, selection = algorithm.init(key), algorithm.select(0, key)
    variates = {}
    for name, clients in selection.clients.items():
        many = lambda leaf, count=len(clients): jnp.full((count, *leaf.shape), 0.1)
        variates[name] = jax.tree.map(many, algorithm.client_states[name].first)
    together = data.read(selection)
    # Equal columns in another object: as streamed data have them, every group has its own.
    apart = replace(
        together,
        cohorts={
            name: replace(cohort, columns=dict(cohort.columns))
            for name, cohort in together.cohorts.items()
        },
    )
    hyper = jax.tree.map(jnp.float32, algorithm.hyper)
    outcomes = [
        jax.jit(algorithm.round)(state, variates, Round(0, key, inputs), hyper)
        for inputs in (together, apart)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), *outcomes)


def test_more_models_are_no_longer_program():
    """Neither of training nor of evaluation: a matrix product stands there once for all models."""

    def products(num_models):
        algorithm = sdd(num_models=num_models)
        programs = build_programs(algorithm, ROUNDS)
        images = {UNLABELLED: {"image": UNLABELLED_IMAGES}}
        data = jax.tree.map(jnp.asarray, resident_data(federated(), images))
        state = jax.eval_shape(programs.init, np.zeros(1, np.uint32))
        hyper = jax.tree.map(jnp.float32, algorithm.hyper)
        states = device_client_states(algorithm.client_states, 1)
        seeds = np.zeros(1, np.uint32)
        splits = {"test": evaluation_split(federated())}
        programs_of = (
            programs.train.lower(state, states, seeds, 0, 1, hyper, data),
            programs.evaluate.lower(state, splits),
        )
        return [lowered.as_text().count("dot_general") for lowered in programs_of]

    assert products(5) == products(2)


# ------------------------------------------------------------------------------------ identities


@pytest.mark.slow
@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), STEPS])
def test_one_model_and_one_round_is_fed_avg(steps):
    """Teacher and student are then the same model, so distillation has nothing to teach."""
    alone, _ = trained(sdd(num_models=1, steps=steps))
    pool = Pool(AVERAGING, np.arange(len(SIZES)), 5)
    plain, _ = trained(independent_pools({MAIN: pool}, federated().columns))
    np.testing.assert_allclose(weights_of(alone[0]), weights_of(plain[0]), rtol=1e-5, atol=1e-6)


def test_without_distillation_the_main_model_has_no_special_role():
    """If two models and their groups change places, so do the results."""
    algorithm, key = sdd(num_models=2, cohort=4, steps=0), jax.random.key(0)
    state, clients = algorithm.init(key), algorithm.select(0, key).clients
    data = jax.tree.map(jnp.asarray, resident_data(federated()))

    @jax.jit
    def models_after(models, clients):
        inputs = data.read(Selection(clients, {}))
        round = Round(0, key, inputs)
        rows = dict.fromkeys(clients)
        after, *_ = algorithm.round(state._replace(models=models), rows, round, algorithm.hyper)
        return after.models

    changed = lambda named: {MAIN: named["model_1"], "model_1": named[MAIN]}
    found = models_after(changed(state.models), changed(clients))
    expected = changed(models_after(state.models, clients))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    assert np.abs(np.subtract(*map(np.ravel, jax.tree.leaves(expected)[:2]))).max() > 1e-3


@pytest.mark.slow
def test_distilling_the_main_model_touches_nothing_else():
    """Whatever the images, the temperature and the number of steps: so groups k > 0 could start
    their next round while the main model is taught."""
    algorithm = sdd(num_models=3)
    programs = build_programs(algorithm, ROUNDS)
    base, _ = trained(algorithm, programs=programs)
    hot = algorithm._replace(hyper=algorithm.hyper._replace(temperature=9.0))
    others = [
        trained(hot, programs=programs)[0],
        trained(sdd(num_models=3, steps=0))[0],
        trained(algorithm, images=-UNLABELLED_IMAGES, programs=programs)[0],
    ]
    for other, _ in others:
        assert np.abs(weights_of(other) - weights_of(base[0])).max() > 1e-3
        for n in ("model_1", "model_2"):
            np.testing.assert_allclose(weights_of(other, n), weights_of(base[0], n), rtol=1e-6)


def changed_by_distillation(algorithm):
    """Model -> whether, after two rounds, it has other weights with other images and teaching."""
    resident = jax.tree.map(jnp.asarray, resident_data(federated()))
    key = jax.random.key(0)

    @jax.jit
    def two_rounds(state, images, teaching):
        hyper = algorithm.hyper._replace(learning_rate=teaching, temperature=1 + teaching)
        data = resident.replace(data_sets={UNLABELLED: {"image": images}})
        for round in range(2):
            selection = algorithm.select(round, key)
            rows = dict.fromkeys(selection.clients)
            state, *_ = algorithm.round(state, rows, Round(round, key, data.read(selection)), hyper)
        return state.models

    start = algorithm.init(key)
    before = two_rounds(start, UNLABELLED_IMAGES, jnp.float32(0.1))
    after = two_rounds(start, UNLABELLED_IMAGES[::-1] * 2, jnp.float32(0.2))
    leaves = lambda models, name: jax.tree.leaves(models[name])
    return {
        name: any(
            np.any(a != b) for a, b in zip(leaves(before, name), leaves(after, name), strict=True)
        )
        for name in before
    }


@pytest.mark.slow
def test_the_other_groups_next_round_needs_no_distillation():
    """So a server may distill while their clients train: nothing in it reads the distilled model."""
    distilled = changed_by_distillation(sdd(num_models=2, rounds_kept=2))
    assert distilled == {MAIN: True, "model_1": False}
    # What "basic" distillation gives away.
    assert changed_by_distillation(sdd(num_models=2, distilled="all")) == {
        MAIN: True,
        "model_1": True,
    }


@pytest.mark.parametrize("measured", [(), ("clients",)], ids=["method", "measured"])
def test_the_server_gets_sums_over_groups_and_no_clients_model(monkeypatch, measured):
    """What it learns of a group's clients has the shapes of one model, so it could be summed securely.

    Only where ensembles of client models are measured do these leave their group.
    """
    seen = []
    train = grouped_models.train_groups

    def watched(*arguments, **options):
        servers, trained = train(*arguments, **options)
        seen.append(trained)
        return servers, trained

    monkeypatch.setattr("fedcodist.algorithms.pools.fed_sdd.train_groups", watched)
    algorithm = sdd(num_models=2, measured=measured)
    images = {UNLABELLED: {"image": UNLABELLED_IMAGES}}
    data, key = jax.tree.map(jnp.asarray, resident_data(federated(), images)), jax.random.key(0)

    def one_round(state):
        selection = algorithm.select(0, key)
        rows = dict.fromkeys(selection.clients)
        hyper = jax.tree.map(jnp.float32, algorithm.hyper)
        return algorithm.round(state, rows, Round(0, key, data.read(selection)), hyper)[0]

    jax.eval_shape(one_round, jax.eval_shape(algorithm.init, key))
    (trained,) = seen
    assert list(trained.aggregates) == [MAIN, "model_1"]
    shapes = {leaf.shape for leaf in jax.tree.leaves(trained.aggregates)}
    assert shapes == {(FEATURES, CLASSES), ()}
    assert not jax.tree.leaves((trained.members, trained.results))
    kept = trained.client_states.values()
    assert all(isinstance(states, StateAndTrainedModel) == bool(measured) for states in kept)
    assert bool(jax.tree.leaves(list(kept))) == bool(measured)


@pytest.mark.parametrize(
    ("distilled", "students"),
    [("main", {MAIN}), ("all", {MAIN, "model_1"})],
)
def test_models_are_distilled_after_the_warm_up(monkeypatch, distilled, students):
    algorithm = sdd(num_models=2, distilled=distilled, warm_up=2)
    start, after = rounds_of_students(monkeypatch, fed_sdd, algorithm)
    for index in (0, 1, 2):
        state = after(index)
        moved = {n for n in start.models if np.any(weights_of(state, n) != weights_of(start, n))}
        assert moved == (set() if index < 2 else students)


def test_the_buffer_holds_aggregates_that_were_never_distilled():
    algorithm, programs = two_models_over_three_rounds()
    (state, _), selections = trained(algorithm, rounds=1, programs=programs)
    start = algorithm.init(jax.random.key(0))
    for k, n in enumerate((MAIN, "model_1")):
        expected = aggregate(np.asarray(weights_of(start, n)), selections[0].clients[n].tolist())
        np.testing.assert_allclose(state.buffer.params["w"][0, k], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.weights, [1, 0, 0])
    assert np.abs(state.buffer.params["w"][0, 0] - weights_of(state)).max() > 1e-3


@functools.cache
def selecting(num_models):
    """round -> each group's clients, by FedSDD, or by FedAvg where there is no number of models."""
    alone = independent_pools({MAIN: Pool(AVERAGING, np.arange(6), 5)}, federated().columns)
    algorithm = sdd(num_models=num_models) if num_models else alone
    return jax.jit(lambda round: algorithm.select(round, jax.random.key(3)).clients)


@given(st.sampled_from([1, 2, 5]), st.integers(0, 1000))
@settings(max_examples=15)
def test_groups_divide_the_cohort(num_models, round):
    clients = selecting(num_models)(round)
    parts = [np.asarray(part).tolist() for part in clients.values()]
    assert len(parts) == num_models
    assert len({c for part in parts for c in part}) == 5
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    # The same cohort as FedAvg's of the same seed.
    drawn = selecting(None)(round)[MAIN]
    assert {c for part in parts for c in part} == set(np.asarray(drawn).tolist())


def test_clients_visit_every_group_alike():
    algorithm = sdd(num_models=2, cohort=4)
    select = jax.jit(jax.vmap(lambda n: algorithm.select(n, jax.random.key(0)).clients))
    clients = jax.tree.map(np.asarray, select(jnp.arange(3000)))
    visits = np.array([np.bincount(part.ravel(), minlength=6) for part in clients.values()])
    assert visits.sum() == 4 * 3000
    # Each of 12 cells is near 1000 with a standard deviation of about 26.
    assert np.abs(visits - 1000).max() < 120


def test_every_group_of_clients_is_equally_likely():
    """In cohorts of eight, where the closed form of orders of examples is far from it."""
    pool = Pool(AVERAGING, np.arange(8), 8)
    first = jax.jit(
        jax.vmap(lambda n: grouped_models.drawn_groups(pool, [4, 4], n, jax.random.key(0))[0])
    )
    groups = np.sort(np.asarray(first(jnp.arange(35_000))), axis=1)
    _, counts = np.unique(groups, axis=0, return_counts=True)
    assert len(counts) == 70 and stats.chisquare(counts).pvalue > 1e-5


@pytest.mark.slow
def test_the_ensemble_is_the_mean_of_what_is_in_the_buffer():
    algorithm = sdd(num_models=2, rounds_kept=3)
    programs = build_programs(algorithm, ROUNDS)
    predictor = algorithm.predictors[ENSEMBLE]
    images = jnp.asarray(UNLABELLED_IMAGES)
    for rounds, members in ((1, 2), (2, 4), (4, 6)):
        (state, _), _ = trained(algorithm, rounds, programs=programs)
        logits = predictor.predict(predictor.variables(state), {"image": images})
        models = state.buffer.params["w"].reshape(-1, FEATURES, CLASSES)[:members]
        np.testing.assert_allclose(
            logits, np.mean(UNLABELLED_IMAGES @ models, axis=0), rtol=1e-4, atol=1e-5
        )
    start = algorithm.init(jax.random.key(0))
    logits = predictor.predict(predictor.variables(start), {"image": images})
    models = [np.asarray(weights_of(start, n)) for n in (MAIN, "model_1")]
    np.testing.assert_allclose(
        logits, np.mean([UNLABELLED_IMAGES @ w for w in models], axis=0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_models", [1, 2])
def test_client_ensembles_are_measured_and_change_nothing(num_models):
    images = jnp.asarray(UNLABELLED_IMAGES)
    samples = ("gaussian", "dirichlet") if num_models == 1 else ()
    algorithm = sdd(num_models=num_models, measured=("clients", *samples))
    programs = build_programs(algorithm, ROUNDS)
    (state, _), selections = trained(algorithm, programs=programs)
    before = trained(algorithm, ROUNDS - 1, programs=programs)[0][0]
    plain = trained_by_two_models() if num_models == 2 else trained(sdd(num_models=1))[0][0]
    np.testing.assert_allclose(weights_of(state), weights_of(plain), rtol=1e-5, atol=1e-6)

    names = (MAIN, "model_1")[:num_models]
    start = {n: np.asarray(weights_of(before, n), np.float64) for n in names}
    members = [local(start[n], c) for n in names for c in selections[-1].clients[n].tolist()]
    np.testing.assert_allclose(state.clients.members.params["w"], members, rtol=1e-3, atol=1e-4)
    predict = lambda kind: algorithm.predictors[kind].predict(
        algorithm.predictors[kind].variables(state), {"image": images}
    )
    mean = np.mean(UNLABELLED_IMAGES @ np.array(members), axis=0)
    np.testing.assert_allclose(predict("clients"), mean, rtol=1e-3, atol=1e-3)
    for kind in samples:
        weights = algorithm.predictors[kind].variables(state).mutable[1]
        assert len(weights) == 5 + 1 + 10
        assert 1e-6 < np.abs(predict(kind) - mean).max() < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        fed_prox(MODEL, TRAINING, optax.sgd, hyper=FedProxHyper(RATE, 1.0, 0.0)),
    ],
)
def test_other_local_methods_fit_in(method):
    (state, _), _ = trained(sdd(method, num_models=2))
    difference = weights_of(state) - weights_of(trained_by_two_models())
    assert np.abs(difference).max() < 1e-5


def slope(w, client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    targets = np.eye(CLASSES)[federated().columns["label"][rows]]
    return images.T @ (softmax(images @ w) - targets) / len(images)


@pytest.mark.slow
def test_scaffold_has_variates_of_every_client_and_model():
    """c_k is the mean over all clients of their variates of model k; a plain loop in float64."""
    method = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(RATE, 1.0))
    algorithm, names = sdd(method, num_models=2, rounds_kept=2), (MAIN, "model_1")
    (state, _), selections = trained(algorithm)
    start = algorithm.init(jax.random.key(0)).models
    models = {n: np.asarray(start[n].averaging.params["w"], np.float64) for n in names}
    server = dict.fromkeys(names, 0.0)
    own = {n: [np.zeros((FEATURES, CLASSES))] * len(SIZES) for n in names}
    buffer = []
    for selection in selections:
        for n in names:
            results, changes = [], []
            for client in selection.clients[n].tolist():
                w = models[n]
                for _ in range(EPOCHS):
                    w = w - RATE * (slope(w, client) - own[n][client] + server[n])
                new = own[n][client] - server[n] + (models[n] - w) / (EPOCHS * RATE)
                results.append(w)
                changes.append(new - own[n][client])
                own[n][client] = new
            models[n] = np.mean(results, axis=0)
            server[n] = server[n] + np.sum(changes, axis=0) / len(SIZES)
        buffer = [*buffer, list(models.values())][-2:]
        teachers = [model for models_then in buffer for model in models_then]
        models[MAIN] = distilled(
            models[MAIN], teachers, selection.examples[UNLABELLED], scaled=True
        )
    for n in names:
        found = state.models[n]
        np.testing.assert_allclose(found.averaging.params["w"], models[n], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found.variate["w"], server[n], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(server[n], np.mean(own[n], axis=0), atol=1e-12)


# ---------------------------------------------------------------------------------------- FedDF


def df(**options):
    pools = {
        "even": Pool(AVERAGING, np.array([0, 2, 4]), 2),
        "odd": Pool(AVERAGING, np.array([1, 3, 5]), 3),
    }
    distillation = DISTILLATION._replace(steps=options.pop("steps", STEPS))
    hyper = FedDFHyper(options.pop("learning_rate", TEACHING_RATE), TEMPERATURE)
    return fed_df(pools, federated().columns, 11, distillation, hyper=hyper, **options)


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fed_df_is_a_plain_loop(scaled):
    algorithm = df(scaled=scaled)
    (state, _), selections = trained(algorithm)
    start = algorithm.init(jax.random.key(0))
    models = {n: np.asarray(weights_of(start, n), np.float64) for n in ("even", "odd")}
    for selection in selections:
        drawn = {n: selection.clients[n].tolist() for n in models}
        teachers = [local(models[n], c) for n in models for c in drawn[n]]
        models = {
            n: distilled(
                aggregate(models[n], drawn[n]), teachers, selection.examples[UNLABELLED], scaled
            )
            for n in models
        }
    for n, expected in models.items():
        np.testing.assert_allclose(weights_of(state, n), expected, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_several_architectures_learn_from_all_clients_models():
    """With a client rate of 0 the teacher is the mean of the pools' two and three unchanged models."""
    other = from_flax_linen(MLP(hidden=(5,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    still = dict(hyper=FedAvgHyper(0.0, 1.0))
    pools = {
        "even": Pool(fed_avg(MODEL, TRAINING, optax.sgd, **still), np.array([0, 2, 4]), 2),
        "odd": Pool(fed_avg(other, TRAINING, optax.sgd, **still), np.array([1, 3, 5]), 3),
    }
    hyper = FedDFHyper(TEACHING_RATE, TEMPERATURE)
    algorithm = fed_df(pools, federated().columns, 11, DISTILLATION, scaled=False, hyper=hyper)
    (state, _), (selection,) = trained(algorithm, rounds=1)
    start = algorithm.init(jax.random.key(0))
    w = np.asarray(weights_of(start, "even"), np.float64)
    odd = Variables(start["odd"].params, {})
    logits_of = lambda images: np.asarray(other.apply(odd, {"image": images})[0])
    for batch in selection.examples[UNLABELLED]:
        images = UNLABELLED_IMAGES[batch]
        teacher = (2 * images @ np.asarray(weights_of(start, "even")) + 3 * logits_of(images)) / 5
        slope = softmax(images @ w / TEMPERATURE) - softmax(teacher / TEMPERATURE)
        w = w - TEACHING_RATE * images.T @ slope / TEMPERATURE / len(batch)
    np.testing.assert_allclose(weights_of(state, "even"), w, rtol=1e-4, atol=1e-6)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state["odd"].params, start["odd"].params)
    assert min(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.slow
def test_a_single_client_has_nothing_to_learn_from_itself():
    pool = Pool(AVERAGING, np.array([2]), 1)
    plain, _ = trained(independent_pools({"pool": pool}, federated().columns))
    alone, _ = trained(fed_df({"pool": pool}, federated().columns, 11, DISTILLATION))
    np.testing.assert_allclose(
        weights_of(alone[0], "pool"), weights_of(plain[0], "pool"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_validation_stops_early_and_keeps_the_best():
    """The selected student is at least as good on validation data as the average at its start."""

    def accuracy(state, name):
        predicted = (UNLABELLED_IMAGES @ weights_of(state, name)).argmax(-1)
        return np.mean(predicted == np.arange(11) % CLASSES)

    validated = FedDFValidation(ValidationData(11, 4), every=1, patience=2, or_start=True)
    (kept, metrics), _ = trained(df(validation=validated, steps=12), rounds=1)
    (start, _), _ = trained(df(steps=0), rounds=1)
    assert metrics["even/distillation_steps"][0] < 12
    for name in ("even", "odd"):
        assert accuracy(kept, name) >= accuracy(start, name)


@pytest.mark.slow
def test_dropping_the_worst_changes_the_teacher():
    validated = FedDFValidation(ValidationData(11, 4), every=STEPS, patience=STEPS)
    (all_teach, _), _ = trained(df(validation=validated))
    (some_teach, _), _ = trained(df(validation=validated._replace(drop_worst=True)))
    assert np.abs(weights_of(all_teach, "odd") - weights_of(some_teach, "odd")).max() > 1e-4


def test_clients_who_guess_neither_teach_nor_count_in_the_average():
    """The second of three clients is below 1.2 times the accuracy of random guessing, 0.4."""
    of_clients = lambda *values: {"w": np.float32(values)[:, None, None]}
    members = {"pool": Variables(of_clients(0.9, 0.3, 0.8), {})}
    weights = np.float32([1, 1, 2])
    results = {"pool": ClientResult(of_clients(1, 10, 100), {}, weights, None, {})}
    everyone = {"pool": Aggregate(None, {}, np.float32(4), np.float32(7))}

    @jax.jit
    def chosen(key):
        return without_worst_clients(
            {"pool": Pool(AVERAGING, np.arange(3), 3)},
            {"pool": AVERAGING.init(key)},
            TrainedPools(everyone, {}, {}, members, results),
            lambda name, variables: variables.params["w"][0, 0],  # stands for the accuracy
            key,
        )

    teachers, aggregates = chosen(jax.random.key(0))
    assert teachers["pool"].tolist() == [1, 0, 1]
    assert aggregates["pool"].weight == 3 and aggregates["pool"].extra == 7  # of all clients
    np.testing.assert_allclose(aggregates["pool"].pseudo_gradient["w"], 201 / 3, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("guessing", [True, False])
def test_students_start_from_clients_who_do_not_guess(guessing):
    """Clients 1 and 3 have the others' labels by another name; with a rate of 0 students stay."""
    draws = np.random.default_rng(3)
    images = draws.normal(size=(27, FEATURES)).astype(np.float32)
    true = (images @ draws.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int32)
    offsets = np.cumsum([0, *SIZES])
    label = true.copy()
    for client in (1, 3) if guessing else ():
        own = slice(offsets[client], offsets[client + 1])
        label[own] = (label[own] + 1) % CLASSES
    data = FederatedData.from_arrays({"image": images, "label": label}, offsets=offsets)
    training = LocalTraining(batch_size=max(SIZES), epochs=200)
    model = softmax_regression(FEATURES, CLASSES)
    method = fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    pool = Pool(method, np.arange(6), 6)
    validated = FedDFValidation(ValidationData(27, 9), every=STEPS, patience=STEPS, drop_worst=True)
    options = dict(hyper=FedDFHyper(0.0), validation=validated)
    algorithm = fed_df({"pool": pool}, data.columns, 27, DISTILLATION, **options)
    resident = jax.tree.map(
        jnp.asarray,
        resident_data(
            data, {UNLABELLED: {"image": images}, VALIDATION: {"image": images, "label": true}}
        ),
    )
    key = jax.random.key(0)
    alone = independent_pools({"pool": pool}, data.columns)

    def after(algorithm):
        inputs = resident.read(algorithm.select(0, key))
        state = algorithm.init(key)
        run = jax.jit(
            lambda state: algorithm.round(state, {"pool": None}, Round(0, key, inputs), hyper)
        )
        hyper = jax.tree.map(jnp.float32, algorithm.hyper)
        return run(state)[0]["pool"].params["w"]

    start = np.asarray(model.init(None).params["w"], np.float64)

    def descended(client):
        w, own = start, slice(offsets[client], offsets[client + 1])
        for _ in range(200):
            shares = softmax(images[own] @ w) - np.eye(CLASSES)[label[own]]
            w = w - RATE * images[own].T.astype(np.float64) @ shares / len(shares)
        return w

    found = [descended(client) for client in range(6)]
    accuracy = [np.mean((images @ w).argmax(-1) == true) for w in found]
    assert [each < 1.2 / CLASSES for each in accuracy] == [
        guessing and c in (1, 3) for c in range(6)
    ]
    kept = [c for c in range(6) if accuracy[c] >= 1.2 / CLASSES]
    expected = np.average([found[c] for c in kept], axis=0, weights=[SIZES[c] for c in kept])
    np.testing.assert_allclose(after(algorithm), expected, rtol=1e-3, atol=1e-4)
    assert np.allclose(after(alone), expected, rtol=1e-3, atol=1e-4) == (not guessing)


@pytest.mark.slow
def test_variates_of_clients_who_are_dropped_count():
    """They keep theirs, so c stays the mean of all. Client 0 is always right, and client 1 never."""
    method = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(RATE, 1.0))
    pool = Pool(method, np.arange(len(SIZES)), len(SIZES))
    validated = FedDFValidation(
        ValidationData(11, 11), every=STEPS, patience=STEPS, drop_worst=True
    )
    options = dict(hyper=FedDFHyper(0.0), validation=validated)
    method = fed_df({"pool": pool}, federated().columns, 11, DISTILLATION, **options)
    programs = build_programs(method, 1)
    rows = jax.tree.map(jnp.asarray, device_client_states(method.client_states, 1))
    start = np.asarray(method.init(jax.random.key(0))["pool"].averaging.params["w"], np.float64)
    images = np.random.default_rng(5).normal(size=(500, FEATURES)).astype(np.float32)
    right, wrong = ((images @ local(start, client)).argmax(-1) for client in (0, 1))
    apart = np.flatnonzero(right != wrong)[:11]
    validation = {"image": images[apart], "label": right[apart].astype(np.int32)}
    given = {UNLABELLED: {"image": UNLABELLED_IMAGES}, VALIDATION: validation}
    hyper = jax.tree.map(jnp.float32, method.hyper)
    seeds = jnp.zeros(1, jnp.uint32)
    state, rows, _ = programs.train(
        programs.init(seeds), rows, seeds, 0, 1, hyper, resident_data(federated(), given)
    )
    variate = np.asarray(state["pool"].variate["w"][0])
    assert np.abs(variate).max() > 0.01
    np.testing.assert_allclose(np.mean(rows["pool"]["w"][0], axis=0), variate, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(2, 20))
@settings(max_examples=100)
def test_the_best_teacher_always_stays(percent, classes):
    accuracy = [each / 100 for each in percent]
    weights = np.asarray(without_worst(jnp.asarray(accuracy, jnp.float32), classes))
    assert weights[np.argmax(np.float32(accuracy))] == 1
    kept = [a for a, w in zip(accuracy, weights, strict=True) if w]
    dropped = [a for a, w in zip(accuracy, weights, strict=True) if not w]
    assert all(a <= b for a in dropped for b in kept)


def test_teachers_near_guessing_or_far_off_are_dropped():
    drop = lambda *accuracy, classes=10: np.asarray(
        without_worst(jnp.array(accuracy), classes)
    ).tolist()
    assert drop(0.5, 0.11, 0.4) == [1, 0, 1]
    assert drop(0.9, 0.5, 0.52, 0.51, 0.5, 0.2) == [1, 1, 1, 1, 1, 0]
    assert drop(0.05, 0.06) == [0, 1]
    assert drop(0.01) == [1]


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: sdd(num_models=6), "num_models must be at most the cohort's 5 clients"),
        (lambda: sdd(num_models=0), "num_models must be at least 1"),
        (lambda: sdd(rounds_kept=0), "rounds_kept must be at least 1"),
        (lambda: sdd(warm_up=-1), "warm_up must be at least 0"),
        (
            lambda: sdd(temperature=0),
            "temperature must be a number above 0|temperature must be above",
        ),
        (lambda: sdd(measured=("client",)), r"measured must be among .*, got \['client'\]"),
        (lambda: sdd(distilled="some"), "distilled must be 'main' or 'all', got 'some'"),
        (lambda: sdd(num_models=2, group_sizes=(5, 0)), "group_sizes must be 2 positive numbers"),
        (
            lambda: sdd(cached=True, distillation=DISTILLATION._replace(mixup_beta=1.0)),
            r"cached needs distillation\.mixup_beta=0",
        ),
        (
            lambda: sdd(num_models=2, measured=("clients", "gaussian")),
            r"measured must not name \['gaussian'\] with num_models above 1",
        ),
        (
            lambda: df(validation=FedDFValidation(ValidationData(0))),
            "validation.data.num_examples must be at least 1, got 0",
        ),
        (
            lambda: df(validation=FedDFValidation(ValidationData(11, 0))),
            "validation.data.batch_size must be at least 1, got 0",
        ),
        (
            lambda: df(validation=FedDFValidation(ValidationData(11), every=2)),
            "validation.every must divide distillation.steps=3, got 2",
        ),
        (lambda: df(learning_rate=-1), "learning_rate must be"),
    ],
)
def test_bad_input_is_one_line(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(measured="clients"), "measured must be several of .*, got the string 'clients'"),
        (
            dict(num_models=1, group_sizes=5),
            "group_sizes must be a list of integers, one per model, got 5",
        ),
        (dict(steps=1.5), r"distillation.steps must be an integer of at least 0, got 1\.5"),
    ],
)
def test_arguments_of_another_type(options, message):
    with pytest.raises(TypeError, match=message) as error:
        sdd(**options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_answers_are_kept_of_the_images_that_students_see():
    """A cached teacher would answer other images than the student sees after augmentation."""

    def flipped(batch, key, positions):
        return batch | {"image": batch["image"] * jax.random.rademacher(key, (), jnp.float32)}

    random = sdd(cached=True, distillation=DISTILLATION._replace(preprocess=flipped))
    with pytest.raises(
        ValueError, match=r"preprocess must not be random where answers are cached"
    ) as error:
        trained(random, 1)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_images_may_be_preprocessed_before_they_are_answered():
    negated = lambda batch, key, positions: batch | {"image": -batch["image"]}
    trained(sdd(cached=True, distillation=DISTILLATION._replace(preprocess=negated)), 1)


def test_models_of_clients_who_send_something_else_cannot_be_known():
    sketching = fetch_sgd(MODEL, TRAINING, sketch_rows=3, sketch_columns=9, k=2)
    by_step = fed_kd(MODEL, MODEL, federated().columns, TRAINING, exchange="step_gradient")
    for method in (sketching, compressed(by_step, ROUNDS)):
        pool = Pool(method, np.arange(6), 2)
        of_pools = r"^pools\['pool'\]\.method must send changes of whole models"
        for build, message in (
            (lambda p=pool: fed_df({"pool": p}, federated().columns, 11, DISTILLATION), of_pools),
            (lambda p=pool: fed_be({"pool": p}, federated().columns, 11, DISTILLATION), of_pools),
            (
                lambda m=method: sdd(m, measured=("clients",), num_models=1),
                r"^pool\.method must send changes of whole models",
            ),
        ):
            with pytest.raises(ValueError, match=message) as error:
                build()
            assert "\n" not in str(error.value)
    sdd(sketching, num_models=1)


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_a_method_that_needs_validation_data_and_gets_none(source):
    algorithm = df(validation=FedDFValidation(ValidationData(11), every=STEPS))
    assert algorithm.data_set_sizes == {UNLABELLED: 11, VALIDATION: 11}
    given = {UNLABELLED: {"image": UNLABELLED_IMAGES}}
    experiment = Experiment(algorithm, source(federated(), given), {"train": federated()}, 1)
    message = (
        r"data must have the data set 'validation', which fed_df reads, it has \['unlabelled'\]"
    )
    with pytest.raises(ValueError, match=message) as error:
        check_experiment(experiment)
    assert "\n" not in str(error.value)
    validation = {"image": UNLABELLED_IMAGES, "label": np.zeros(11, np.int32)}
    data = source(federated(), given | {VALIDATION: validation})
    check_experiment(experiment._replace(data=data))


def test_fed_sdd_distils_by_plain_sgd():
    """The default is the paper's optimizer; Adam's steps would be too long at its rate of 0.1."""
    settings_ = inspect.signature(fed_sdd).parameters["distillation"].default
    optimizer = settings_.optimizer(0.1)
    update, _ = optimizer.update(jnp.array(3.0), optimizer.init(jnp.array(2.0)))
    assert float(update) == pytest.approx(-0.3)
    assert (settings_.steps, settings_.batch_size, settings_.mixup_beta) == (5000, 256, 0)
