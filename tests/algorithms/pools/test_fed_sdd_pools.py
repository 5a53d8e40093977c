"""FedSDD of several architectures: a plain loop, one architecture, what it leaves alone, mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from round_stand_ins import rounds_of_students

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.fed_sdd import FedSDDHyper, FedSDDTeaching, fed_sdd
from fedcodist.algorithms.pools.fed_sdd_pools import FedSDDPoolsHyper, fed_sdd_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.ensembles import ENSEMBLE
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.privacy.private import private
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 4, 6), 3, 4
RATE, EPOCHS, ROUNDS, STEPS, BATCH, TEACHING_RATE, TEMPERATURE = 0.3, 2, 3, 2, 5, 0.2, 2.0
GENERATOR = np.random.default_rng(0)
UNLABELLED_IMAGES = GENERATOR.normal(size=(9, FEATURES))
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
}
TRAINING = LocalTraining(optax.sgd, batch_size=max(SIZES), epochs=EPOCHS)
DISTILLATION = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0)
# Two architectures that are both linear in their parameters: of images, and of these and their squares.
FEATURE_MAPS = {"a": lambda x: x, "b": lambda x: jnp.concatenate([x, x**2 - 1], axis=-1)}
CLIENTS = {"a": np.arange(6), "b": np.array([1, 2, 4, 5])}
GROUPS = {"a": ("a", "a_model_1"), "b": ("b", "b_model_1")}


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def linear(features) -> Model:
    width = features(np.zeros((1, FEATURES))).shape[1]

    def init(key):
        return Variables({"w": jax.random.normal(key, (width, CLASSES))}, {})

    def apply(variables, batch, **_):
        return features(batch["image"]) @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {}, CLASSES)


def pool_of(name, cohort=4):
    method = fed_avg(linear(FEATURE_MAPS[name]), TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    return Pool(method, CLIENTS[name], cohort)


POOLS = {"a": pool_of("a"), "b": pool_of("b", 3)}


def build(pools=POOLS, steps=STEPS, **options):
    options.setdefault("num_models", 2)
    teaching = {n: options.pop(n) for n in FedSDDTeaching._fields if n in options}
    return fed_sdd_pools(
        pools,
        COLUMNS,
        len(UNLABELLED_IMAGES),
        distillation=DISTILLATION._replace(steps=steps),
        teaching=FedSDDTeaching(**teaching),
        hyper=FedSDDPoolsHyper(TEACHING_RATE, TEMPERATURE),
        **options,
    )


def run(algorithm, devices=None):
    """(state after the last round of the first seed, the selections)."""
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(algorithm, ROUNDS, mesh)
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = resident_data(private, {UNLABELLED: {"image": UNLABELLED_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    hyper = jax.tree.map(np.float64, algorithm.hyper)
    states = dict.fromkeys(algorithm.client_states)
    state, *_ = programs.train(
        programs.init(seeds), states, seeds, 0, ROUNDS, put(hyper), put(data)
    )
    root = jax.random.key(0)
    selections = [jax.tree.map(np.asarray, algorithm.select(n, root)) for n in range(ROUNDS)]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], state), selections


@functools.cache
def outcome(**options):
    return run(build(**options))


def weights(state, name):
    return state.models[name].params["w"]


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def local(w, client, features):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    inputs, targets = features(COLUMNS["image"][rows]), np.eye(CLASSES)[COLUMNS["label"][rows]]
    for _ in range(EPOCHS):
        w = w - RATE * inputs.T @ (softmax(inputs @ w) - targets) / len(inputs)
    return w


def plain(algorithm, selections, kept, everyone=False, warm_up=0):
    state = algorithm.init(jax.random.key(0))
    models = {name: np.asarray(weights(state, name)) for parts in GROUPS.values() for name in parts}
    maps = {
        n: lambda x, f=FEATURE_MAPS[p]: np.asarray(f(x)) for p, ns in GROUPS.items() for n in ns
    }
    buffer = []
    for round, selection in enumerate(selections):
        for name in models:
            clients = selection.clients[name].tolist()
            models[name] = np.average(
                [local(models[name], client, maps[name]) for client in clients],
                axis=0,
                weights=[SIZES[client] for client in clients],
            )
        buffer = [*buffer, dict(models)][-kept:]
        if round < warm_up:
            continue
        for name in list(models) if everyone else list(GROUPS):
            w = models[name]
            for rows in selection.examples[UNLABELLED]:
                images = UNLABELLED_IMAGES[rows]
                answers = [
                    maps[n](images) @ v for models_then in buffer for n, v in models_then.items()
                ]
                target = softmax(np.mean(answers, axis=0) / TEMPERATURE)
                slope = TEMPERATURE * (softmax(maps[name](images) @ w / TEMPERATURE) - target)
                w = w - TEACHING_RATE * maps[name](images).T @ slope / BATCH
            models[name] = w
    return models


@pytest.mark.parametrize(
    ("options", "plainly"),
    [
        (dict(rounds_kept=2), dict(kept=2)),
        pytest.param(
            dict(rounds_kept=1, cached=True, distilled="all"),
            dict(kept=1, everyone=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(rounds_kept=3, warm_up=1), dict(kept=3, warm_up=1), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_it_is_a_plain_loop(options, plainly):
    algorithm = build(**options)
    state, selections = outcome(**options)
    for name, expected in plain(algorithm, selections, **plainly).items():
        assert_close(weights(state, name), expected)


@pytest.mark.parametrize(
    ("distilled", "students"),
    [("main", {"a", "b"}), ("all", {"a", "a_model_1", "b", "b_model_1"})],
)
def test_main_models_or_all_are_distilled_after_the_warm_up(monkeypatch, distilled, students):
    algorithm = build(distilled=distilled, warm_up=2)
    start, after = rounds_of_students(monkeypatch, fed_sdd_pools, algorithm)
    for index in (0, 1, 2):
        state = after(index)
        moved = {n for n in start.models if np.any(weights(state, n) != weights(start, n))}
        assert moved == (set() if index < 2 else students)


def test_cohorts_are_divided_among_a_pools_models():
    _, selections = outcome(rounds_kept=2)
    for selection in selections:
        for pool, parts in GROUPS.items():
            drawn = np.concatenate([selection.clients[name] for name in parts])
            assert len(set(drawn.tolist())) == len(drawn) == POOLS[pool].cohort_size
            assert set(drawn.tolist()) <= set(CLIENTS[pool].tolist())


def test_the_ensemble_is_of_all_architectures():
    algorithm = build(rounds_kept=2)
    state, _ = outcome(rounds_kept=2)
    predictor = algorithm.predictors[ENSEMBLE]
    images = UNLABELLED_IMAGES
    found = predictor.predict(predictor.variables(state), {"image": images})
    answers = [
        np.asarray(FEATURE_MAPS[pool](images)) @ w
        for pool, buffer in state.buffers.items()
        for w in buffer.params["w"].reshape(4, -1, CLASSES)
    ]
    assert_close(np.asarray(found), np.mean(answers, axis=0))


def test_with_one_architecture_of_one_model_it_is_fed_sdd():
    """Both draw the same cohorts where the pool is called `main`."""
    found, _ = run(build({"main": pool_of("a")}, num_models=1, rounds_kept=2))
    teaching = FedSDDTeaching()
    single = fed_sdd(
        pool_of("a"),
        COLUMNS,
        len(UNLABELLED_IMAGES),
        1,
        2,
        distillation=DISTILLATION,
        teaching=teaching,
        hyper=FedSDDHyper(TEACHING_RATE, TEMPERATURE),
    )
    expected, _ = run(single)
    assert_close(weights(found, "main"), weights(expected, "main"))


def test_without_distillation_the_other_models_are_the_same():
    state, _ = outcome(rounds_kept=2)
    without, _ = outcome(rounds_kept=2, steps=0)
    for name in ("a_model_1", "b_model_1"):
        assert_close(weights(state, name), weights(without, name))
    for name in ("a", "b"):
        assert np.abs(weights(state, name) - weights(without, name)).max() > 1e-3


@pytest.mark.slow
def test_devices_share_the_work():
    two, _ = run(build(rounds_kept=2, cached=True), devices=2)
    one, _ = outcome(rounds_kept=2)
    for name in ("a", "b_model_1"):
        assert_close(weights(two, name), weights(one, name))


def test_bytes_are_those_of_each_pools_model():
    communication = build().communication
    size = np.dtype(np.float64).itemsize  # of these tests' parameters
    assert communication["a"] == communication["a_model_1"]
    assert communication["a"].down == size * FEATURES * CLASSES
    assert communication["b"].down == size * 2 * FEATURES * CLASSES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_models=4), r"num_models must be at most pools\['b'\]\.cohort_size=3, .* got 4"),
        (dict(num_models=0), "num_models must be"),
        (dict(rounds_kept=0), "rounds_kept must be"),
        (dict(distilled="some"), r"teaching\.distilled must be 'main' or 'all', got 'some'"),
        (dict(pools={ENSEMBLE: POOLS["a"]}), "pools must have names that tell .* 'ensemble' apart"),
        (dict(pools={"a": POOLS["a"], "a_model_1": POOLS["b"]}), "pools must have names that tell"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        build(**options)
    assert "\n" not in str(error.value)


def test_a_method_that_no_group_can_have_is_named_by_its_pool():
    noisy = private(POOLS["b"].method, 1.0, 1.0, expected_clients=3)
    message = r"^pools\['b'\]\.method must be private without expected_clients"
    with pytest.raises(ValueError, match=message):
        build({**POOLS, "b": POOLS["b"]._replace(method=noisy, poisson=None)})


def test_server_functions_of_a_method_are_checked():
    """Also where the method's server is a part of a larger state."""

    def server_update(server, *arguments):
        after = POOLS["a"].method.server_update(server, *arguments)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), after)

    wrong = POOLS["a"]._replace(method=POOLS["a"].method._replace(server_update=server_update))
    with pytest.raises(
        TypeError, match=r"^method\.server_update must return a state as method\.init"
    ):
        build({**POOLS, "a": wrong})
