"""FedProx and SCAFFOLD against plain NumPy in float64, and against what they must reduce to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_one_device import on_one_device
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.clients.scaffold import full_gradient, scaffold
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 4, 5
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client


MODEL = softmax_regression(FEATURES, CLASSES)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


def run(method, cohort_size=len(SIZES), rounds=ROUNDS, execution=Execution(), source=resident_data):
    """The weights after the last round, and the cohorts."""
    pool = Pool(method, np.arange(len(SIZES)), cohort_size)
    algorithm = independent_pools({"pool": pool}, federated().columns, execution)
    experiment = Experiment(algorithm, source(federated(), {}), {"train": federated()}, rounds)
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    return trained.variables["pool"].params["w"][0], cohorts


def gradient(w, client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    labels = federated().columns["label"][rows]
    logits = images @ w
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return images.T @ (shares - np.eye(CLASSES)[labels]) / len(labels)


def local(w, client, correction=lambda w: 0.0):
    trained = w
    for _ in range(EPOCHS):
        trained = trained - RATE * (gradient(trained, client) + correction(trained))
    return trained


def start():
    return np.asarray(MODEL.init(None).params["w"], np.float64)


def plain_fed_prox(cohorts, mu):
    w = start()
    for cohort in cohorts:
        results = [local(w, c, lambda now, w=w: mu * (now - w)) for c in cohort]
        w = np.average(results, axis=0, weights=[SIZES[c] for c in cohort])
    return w


def plain_scaffold(cohorts, option):
    w, server, own = start(), 0.0, [0.0] * len(SIZES)
    for cohort in cohorts:
        results, changes = [], []
        for c in cohort:
            trained = local(w, c, lambda now, c=c: server - own[c])
            mean_local = own[c] - server + (w - trained) / (EPOCHS * RATE)
            new = gradient(w, c) if option == 1 else mean_local
            results.append(trained)
            changes.append(new - own[c])
            own[c] = new
        w = np.mean(results, axis=0)
        server = server + np.sum(changes, axis=0) / len(SIZES)
    return w


def prox(mu, **options):
    training = options.pop("training", TRAINING)
    return fed_prox(MODEL, training, optax.sgd, hyper=FedProxHyper(RATE, 1.0, mu))


def averaging(training=TRAINING):
    return fed_avg(MODEL, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))


def variates(option=2, training=TRAINING, clients=len(SIZES)):
    return scaffold(MODEL, clients, training, option, hyper=FedAvgHyper(RATE, 1.0))


@pytest.mark.parametrize("mu", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_fed_prox_is_a_plain_loop(mu):
    w, cohorts = run(prox(mu), cohort_size=3)
    np.testing.assert_allclose(w, plain_fed_prox(cohorts, mu), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("option", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("loop", ["scan", pytest.param("vmap", marks=pytest.mark.slow)])
def test_scaffold_is_a_plain_loop(option, loop):
    """Two of four clients a round, so variates wait for their client's next turn."""
    w, cohorts = run(variates(option), 2, execution=Execution(loop, 2))
    assert len({c for cohort in cohorts for c in cohort}) == len(SIZES)
    np.testing.assert_allclose(w, plain_scaffold(cohorts, option), rtol=1e-4, atol=1e-6)
    other, _ = run(averaging(), 2)
    assert np.abs(w - other).max() > 1e-3


def test_the_variate_of_option_1_is_the_gradient_at_the_received_model():
    """Not at the trained one, which is further on."""
    method = variates(option=1)
    columns = {name: jnp.asarray(column) for name, column in federated().columns.items()}
    data = ClientData(columns, jnp.int32(0), *[jnp.int32(SIZES[0])] * 2, max(SIZES), False)
    message = method.broadcast(method.init(jax.random.key(0)))

    @jax.jit  # which leaves out what the variate does not need
    def new_variate(kept):
        result = method.client_update(message, kept, data, jax.random.key(1), method.hyper)
        return result.client_state["w"]

    found, expected = new_variate(method.init_client_state()), gradient(start(), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(gradient(local(start(), 0), 0) - expected).max() > 1e-2


@pytest.mark.slow
def test_no_proximal_weight_is_fed_avg():
    np.testing.assert_allclose(run(prox(0.0))[0], run(averaging())[0], rtol=1e-6)


@pytest.mark.slow
def test_the_first_step_does_not_feel_the_proximal_term():
    one_step = TRAINING._replace(epochs=1)
    np.testing.assert_allclose(
        run(prox(5.0, training=one_step))[0], run(averaging(one_step))[0], rtol=1e-6
    )


@pytest.mark.slow
def test_more_weight_means_less_drift():
    moved = [np.linalg.norm(run(prox(mu), rounds=1)[0] - start()) for mu in (0.0, 0.3, 1.0, 3.0)]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > 2 * moved[-1]


@pytest.mark.slow
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_starts_as_uniform_fed_avg(option):
    w, _ = run(variates(option), rounds=1)
    uniform = np.mean([local(start(), client) for client in range(len(SIZES))], axis=0)
    np.testing.assert_allclose(w, uniform, rtol=1e-5)


@pytest.mark.slow
def test_with_one_step_of_everybody_scaffold_is_gradient_descent_on_the_mean():
    """The corrections of all clients sum to zero, in every round."""
    one_step = TRAINING._replace(epochs=1)
    w, _ = run(variates(training=one_step))
    expected = start()
    for _ in range(ROUNDS):
        gradients = [gradient(expected, client) for client in range(len(SIZES))]
        expected = expected - RATE * np.mean(gradients, axis=0)
    np.testing.assert_allclose(w, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_servers_variate_is_the_mean_of_the_clients():
    """When all start at zero, whoever takes part."""
    from fedcodist.core.client_states import device_client_states
    from fedcodist.run.programs import build_programs

    pool = Pool(variates(), np.arange(len(SIZES)), 2)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    programs = build_programs(algorithm, ROUNDS)
    seeds = jnp.zeros(1, jnp.uint32)
    rows = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 1))
    hyper = jax.tree.map(jnp.float32, algorithm.hyper)
    state, rows, _ = programs.train(
        programs.init(seeds), rows, seeds, 0, ROUNDS, hyper, resident_data(federated())
    )
    variate = state["pool"].variate["w"][0]
    assert np.abs(variate).max() > 0.01
    np.testing.assert_allclose(rows["pool"]["w"][0].mean(0), variate, rtol=1e-4, atol=1e-6)


def quadratics() -> Model:
    """Examples (curvature, optimum): loss h (w - a)^2 / 2."""

    def loss(outputs, batch):
        return 0.5 * batch["curvature"] * (outputs - batch["optimum"]) ** 2

    def apply(variables, batch, **_):
        return jnp.broadcast_to(variables.params["w"], batch["optimum"].shape), variables.mutable

    return Model(lambda key: Variables({"w": jnp.asarray(3.0)}, {}), apply, loss, {}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_reaches_the_joint_optimum_and_fed_avg_does_not(option):
    columns = {
        "curvature": np.array([1.0, 10.0], np.float32),
        "optimum": np.array([0.0, 1.0], np.float32),
    }
    clients = FederatedData.from_arrays(columns, offsets=np.array([0, 1, 2]))
    training, hyper = LocalTraining(batch_size=1, epochs=10), FedAvgHyper(0.05, 1.0)
    found = {}
    for name, method in {
        "scaffold": scaffold(quadratics(), 2, training, option, hyper=hyper),
        "fed_avg": fed_avg(quadratics(), training, optax.sgd, hyper=hyper),
    }.items():
        algorithm = independent_pools({"pool": Pool(method, np.arange(2), 2)}, columns)
        experiment = Experiment(
            algorithm, resident_data(clients, {}), {"train": clients}, rounds=150
        )
        outcome = run_experiment(experiment, show_progress=False)
        found[name] = float(outcome.variables["pool"].params["w"][0])
    assert found["scaffold"] == pytest.approx(10 / 11, abs=1e-4)
    assert abs(found["fed_avg"] - 10 / 11) > 0.1


def test_variates_travel_both_ways():
    plain = communication_of(averaging(), federated().columns)
    both = communication_of(variates(), federated().columns)
    parameters = 4 * FEATURES * CLASSES
    assert both.down - plain.down == both.up - plain.up == parameters


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda rate: optax.sgd(rate, momentum=0.9),
        lambda rate: optax.sgd(rate, momentum=1e-6),
        optax.adam,
        lambda rate: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate)),
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)),
        lambda rate: optax.chain(optax.clip_by_global_norm(1000.0), optax.sgd(rate)),
        lambda rate: optax.sgd(optax.piecewise_constant_schedule(rate, {10: 0.1})),
        lambda rate: optax.sgd(optax.cosine_decay_schedule(rate, 5000)),
    ],
)
def test_option_2_refuses_other_optimizers_and_option_1_takes_them(optimizer):
    training = TRAINING._replace(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"option 2 needs plain SGD as training\.optimizer"):
        variates(training=training)
    variates(option=1, training=training)


@pytest.mark.parametrize("nesterov", [False, True])
def test_option_2_takes_sgd_whose_momentum_is_0(nesterov):
    without = functools.partial(optax.sgd, momentum=0.0, nesterov=nesterov)
    variates(training=TRAINING._replace(optimizer=without))


@pytest.mark.slow
def test_clients_who_do_not_move_keep_their_variates():
    """At a learning rate of 0 no mean gradient can be computed from a client's movement."""
    method = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(0.0, 1.0))
    w, _ = run(method)
    np.testing.assert_array_equal(w, np.float32(start()))


def dropping() -> Model:
    """Softmax regression with dropout of half of each image; it raises an error without a key."""

    def apply(variables, batch, train=False, key=None, **_):
        images = batch["image"]
        if train:
            images = images * jax.random.bernoulli(key, 0.5, images.shape) * 2
        return images @ variables.params["w"], variables.mutable

    return MODEL._replace(apply=apply)


@pytest.mark.slow
def test_dropout_has_keys_where_all_examples_gradient_is_taken():
    """Dropout differs from round to round; FetchSGD's gradient is without dropout."""
    data = federated()
    of_first = ClientData(
        jax.tree.map(jnp.asarray, dict(data.columns)),
        jnp.int32(0),
        jnp.int32(SIZES[0]),
        jnp.int32(SIZES[0]),
        SIZES[0],
        False,
    )
    variables = MODEL.init(None)
    taken = [
        full_gradient(dropping(), TRAINING, variables, of_first, jax.random.key(seed), train)["w"]
        for seed in (0, 1)
        for train in (True, False)
    ]
    assert np.abs(taken[0] - taken[2]).max() > 1e-2
    expected = gradient(start(), 0)
    for found in (taken[1], taken[3]):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    method = scaffold(dropping(), len(SIZES), TRAINING, 1, hyper=FedAvgHyper(RATE, 1.0))
    assert np.isfinite(run(method, rounds=1)[0]).all()


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="option must be 1 or 2, got 3"):
        variates(option=3)
    with pytest.raises(ValueError, match="num_clients must be at least 1, got 0"):
        variates(clients=0)
    with pytest.raises(ValueError, match=r"hyper\.proximal_weight must be .*at least 0, got -1"):
        prox(-1)


def test_batches_of_padding_alone_change_no_full_gradient():
    """Under vmap the smaller client runs the larger one's batches; a masked mean is 0 / 0 there."""

    def centred(variables, batch, *, train=False, mask=None, **_):
        images = batch["image"]
        if train:
            images = images - jnp.sum(images * mask[:, None], 0) / jnp.sum(mask)
        return images @ variables.params["w"], variables.mutable

    method = scaffold(MODEL._replace(apply=centred), 2, LocalTraining(batch_size=2), option=1)
    one_by_one, _ = on_one_device(method, [1, 3])
    at_once, _ = on_one_device(method, [1, 3], Execution("vmap", 2))
    assert np.isfinite(one_by_one).all()
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5)


@pytest.mark.parametrize("option", [1, 2])
def test_clients_without_examples_do_not_count(option):
    method = lambda count: scaffold(MODEL, count, TRAINING, option=option)
    alone, _ = on_one_device(method(1), [3], rounds=1)
    with_others, _ = on_one_device(method(3), [3, 0, 0], rounds=1)
    np.testing.assert_allclose(with_others, alone, rtol=1e-5)
    # From the second round on the server's variate is not zero.
    _, states = on_one_device(method(3), [3, 0, 0])
    assert all(np.all(leaf[1:] == 0) and np.any(leaf[0]) for leaf in jax.tree.leaves(states))
