"""Methods whose clients keep a whole model, against plain NumPy in float64."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import on_one_device
import optax
import pytest
from personal_runs import (
    CLASSES,
    FEATURES,
    MODEL,
    SIZES,
    assert_same,
    combined,
    distance,
    federated,
    gradient,
    run,
    step,
    weighted_mean,
)
from softmax_regression import softmax_regression

from fedcodist.algorithms.clients.apfl import APFLHyper, apfl
from fedcodist.algorithms.clients.ditto import DittoHyper, ditto
from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_prox import fed_prox
from fedcodist.algorithms.clients.p_fed_me import PFedMeHyper, p_fed_me
from fedcodist.algorithms.clients.per_fed_avg import PerFedAvgHyper, parts_of, per_fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.compression.compressed import compressed
from fedcodist.compression.quantisation import quantisation
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData

pytestmark = pytest.mark.usefixtures("compile_quickly")

RATE, EPOCHS, CLIENTS = 0.3, 2, range(len(SIZES))
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
DITTO = ditto(MODEL, TRAINING, 3, hyper=DittoHyper(RATE, 1.0, 0.7))
APFL = apfl(MODEL, TRAINING, hyper=APFLHyper(RATE, 1.0, 0.25, 0.5))
P_FED_ME = p_fed_me(MODEL, TRAINING, 3, hyper=PFedMeHyper(0.1, 0.8, 0.2, 3.0))


@functools.cache
def averaged(training=TRAINING):
    return run(fed_avg(MODEL, training, hyper=FedAvgHyper(RATE, 1.0)))


def towards(slope, weight, now, anchor):
    """The gradient of a loss and (weight / 2) ||now - anchor||^2."""
    return combined((1, weight, -weight), (slope, now, anchor))


def trained(params, client, epochs=EPOCHS):
    for _ in range(epochs):
        params = step(params, gradient(params, client), RATE)
    return params


def plain_ditto(found, weight):
    w, own = found.first, dict.fromkeys(CLIENTS, found.first)
    for cohort in found.cohorts:
        for client in cohort:
            v = own[client]
            for _ in range(3):
                v = step(v, towards(gradient(v, client), weight, v, w), RATE)
            own[client] = v
        w = weighted_mean([trained(w, client) for client in cohort], cohort)
    return w, [own[client] for client in CLIENTS]


def plain_apfl(found, share, share_rate):
    w, own = found.first, dict.fromkeys(CLIENTS, (found.first, share))
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            local, (v, alpha) = w, own[client]
            for index in range(EPOCHS):
                mixed = combined((alpha, 1 - alpha), (v, local))
                slope = gradient(mixed, client)
                inner = sum(
                    np.sum((v[name]["kernel"] - local[name]["kernel"]) * slope[name]["kernel"])
                    for name in slope
                )
                v = step(v, combined((alpha,), (slope,)), RATE)
                local = step(local, gradient(local, client), RATE)
                if index == 0:
                    alpha = np.clip(alpha - share_rate * inner, 0, 1)
            own[client] = v, alpha
            results.append(local)
        w = weighted_mean(results, cohort)
    return w, [combined((a, 1 - a), (v, w)) for v, a in (own[client] for client in CLIENTS)], own


def plain_p_fed_me(found, eta, beta, rate, weight):
    w, kept = found.first, {}
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            local = theta = w
            for _ in range(EPOCHS):
                for _ in range(3):
                    slope = towards(gradient(theta, client), weight, theta, local)
                    theta = step(theta, slope, rate)
                local = step(local, combined((weight, -weight), (local, theta)), eta)
            kept[client] = theta
            results.append(local)
        mean = combined([1 / len(cohort)] * len(cohort), results)
        w = combined((1 - beta, beta), (w, mean))
    return w, [kept.get(client, w) for client in CLIENTS]


def test_ditto_is_a_plain_loop():
    found = run(DITTO)
    w, personal = plain_ditto(found, 0.7)
    assert_same((found.model, found.personal), (w, personal))
    assert_same(found.model, averaged().model, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_ditto_without_a_weight_trains_alone():
    found = run(ditto(MODEL, TRAINING, 3, hyper=DittoHyper(RATE, 1.0, 0.0)))
    for client in CLIENTS:
        times = sum(client in cohort for cohort in found.cohorts)
        assert_same(found.personal[client], trained(found.first, client, 3 * times))


@pytest.mark.slow
def test_more_weight_keeps_dittos_models_nearer():
    apart = []
    for weight in (0.0, 0.5, 2.0):
        found = run(ditto(MODEL, TRAINING, 3, hyper=DittoHyper(RATE, 1.0, weight)))
        apart.append(np.mean([distance(v, found.model) for v in found.personal]))
    assert apart == sorted(apart, reverse=True) and apart[0] > 1.2 * apart[-1]


def test_apfl_is_a_plain_loop():
    found = run(APFL)
    w, personal, own = plain_apfl(found, 0.25, 0.5)
    assert_same((found.model, found.personal), (w, personal))
    assert_same(found.model, averaged().model, rtol=1e-6, atol=1e-6)
    assert np.std([alpha for _, alpha in own.values()]) > 1e-3  # shares have been learned


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_that_stays_is_fed_avg_or_training_alone(share):
    found = run(apfl(MODEL, TRAINING, hyper=APFLHyper(RATE, 1.0, share, 0.0)))
    for client in CLIENTS:
        times = sum(client in cohort for cohort in found.cohorts)
        alone = trained(found.first, client, EPOCHS * times)
        assert_same(found.personal[client], alone if share else found.model)


@pytest.mark.slow
def test_a_share_stays_between_0_and_1():
    found = run(apfl(MODEL, TRAINING, hyper=APFLHyper(RATE, 1.0, 0.5, 1e4)))
    _, personal, own = plain_apfl(found, 0.5, 1e4)
    assert {alpha for _, alpha in own.values()} <= {0.0, 0.5, 1.0}
    assert_same(found.personal, personal)


def test_p_fed_me_is_a_plain_loop():
    found = run(P_FED_ME)
    w, personal = plain_p_fed_me(found, 0.1, 0.8, 0.2, 3.0)
    assert_same((found.model, found.personal), (w, personal))
    assert distance(found.model, averaged().model) > 1e-2


@pytest.mark.slow
def test_without_lambda_the_global_model_stays_and_theta_trains_alone():
    found = run(p_fed_me(MODEL, TRAINING, 3, hyper=PFedMeHyper(0.1, 1.0, RATE, 0.0)), cohort=4)
    assert_same(found.model, found.first, rtol=0, atol=0)
    alone = [trained(found.first, client, 3 * EPOCHS) for client in CLIENTS]
    assert_same(found.personal, alone)


@functools.cache
def uniform_clients():
    """Clients whose examples are all the same one, so that all batches of a client are alike."""
    draws = np.random.default_rng(3)
    of_client = np.repeat(np.arange(len(SIZES)), SIZES)
    columns = {
        "image": draws.normal(size=(len(SIZES), FEATURES)).astype(np.float32)[of_client],
        "label": draws.integers(0, CLASSES, len(SIZES)).astype(np.int32)[of_client],
    }
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))


def slope_of_uniform(params, client):
    return gradient(params, client, uniform_clients())


def plain_per_fed_avg(found, alpha, second_order):
    w = found.first
    for cohort in found.cohorts:
        results, kept = [], {}
        for client in cohort:
            local = w
            for _ in range(EPOCHS):
                adapted = step(local, slope_of_uniform(local, client), alpha)
                slope = slope_of_uniform(adapted, client)
                if second_order:
                    near = [
                        slope_of_uniform(step(local, slope, -tiny), client)
                        for tiny in (1e-5, -1e-5)
                    ]
                    slope = combined((1, -alpha / 2e-5, alpha / 2e-5), (slope, *near))
                local = step(local, slope, RATE)
            kept[client] = step(w, slope_of_uniform(w, client), alpha)
            results.append(local)
        w = combined([1 / len(cohort)] * len(cohort), results)
    return w, kept


@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_per_fed_avg_is_a_plain_loop(variant):
    """The Hessian's product is nearly exact in the loop."""
    method = per_fed_avg(MODEL, TRAINING, variant, hyper=PerFedAvgHyper(RATE, 1.0, 0.5, 1e-2))
    found = run(method, data=uniform_clients())
    w, kept = plain_per_fed_avg(found, 0.5, variant == "hessian_free")
    assert_same(found.model, w, rtol=1e-3, atol=1e-4)
    for client, personal in kept.items():
        assert_same(found.personal[client], personal)
    other, _ = plain_per_fed_avg(found, 0.5, variant == "first_order")
    assert distance(w, other) > 1e-2


@pytest.mark.slow
def test_without_adaptation_it_is_fed_avg_of_equal_weights():
    found = run(
        per_fed_avg(MODEL, TRAINING, hyper=PerFedAvgHyper(RATE, 1.0, 0.0)), data=uniform_clients()
    )
    w, _ = plain_per_fed_avg(found, 0.0, False)
    assert_same(found.model, w)
    w = found.first
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            local = w
            for _ in range(EPOCHS):
                local = step(local, slope_of_uniform(local, client), RATE)
            results.append(local)
        w = combined([1 / len(cohort)] * len(cohort), results)
    assert_same(found.model, w)


@pytest.mark.parametrize("batch_size", [4, 5])
def test_parts_of_a_batch_are_not_padded_where_padding_would_count(batch_size):
    """Of 5 examples one part has 3 rows and the other 2, whose padding a plain normalisation sees."""
    model = from_flax_linen(PlainNormalisation(), jnp.zeros((1, FEATURES)))
    method = per_fed_avg(model, LocalTraining(batch_size=batch_size))
    rows = 4 * batch_size
    columns = {"image": jnp.ones((rows, FEATURES)), "label": jnp.zeros(rows, jnp.int32)}
    size = jnp.int32(rows)
    data = ClientData(columns, jnp.int32(0), size, size, rows, ragged=False)

    def update():
        message = method.broadcast(method.init(jax.random.key(0)))
        state = method.init_client_state()
        return method.client_update(message, state, data, jax.random.key(1), method.hyper)

    if batch_size % 2 == 0:
        jax.eval_shape(update)
        return
    with pytest.raises(ValueError, match=r"per_fed_avg divides batches of 5 into 2 parts"):
        jax.eval_shape(update)


class PlainNormalisation(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(CLASSES)(x)


def test_parts_of_a_batch():
    """By turns; padding has no weight, and a part without examples is the first one."""
    batch = {"x": jnp.arange(5)}
    rows = lambda mask, count: [
        [int(x) for x, real in zip(part["x"], weights, strict=True) if real]
        for part, weights in parts_of(batch, jnp.asarray(mask, jnp.float32), count)
    ]
    assert rows([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]
    assert rows([1, 1, 1, 1, 0], 3) == [[0, 3], [1], [2]]
    assert rows([1, 0, 0, 0, 0], 3) == [[0], [0], [0]]
    assert rows([0, 0, 0, 0, 0], 2) == [[], []]


def test_every_part_of_a_batch_has_what_is_not_of_examples():
    batch = {"x": jnp.arange(5), "class_weight": jnp.array([10, 20, 30]), "scale": jnp.float32(2)}
    for part, _ in parts_of(batch, jnp.ones(5), 2):
        assert part["class_weight"].tolist() == [10, 20, 30]
        assert part["scale"] == 2


@pytest.mark.parametrize(
    "build",
    [
        lambda model, training: apfl(model, training),
        lambda model, training: ditto(model, training),
        lambda model, training: p_fed_me(model, training),
        lambda model, training: per_fed_avg(model, training),
        lambda model, training: per_fed_avg(model, training, "hessian_free"),
        lambda model, training: fed_prox(model, training),
        lambda model, training: scaffold(model, 2, training._replace(optimizer=optax.sgd)),
    ],
    ids=["apfl", "ditto", "p_fed_me", "per_fed_avg", "hessian_free", "fed_prox", "scaffold"],
)
def test_a_float32_model_stays_one_where_settings_are_float64(build):
    """In 64-bit mode hyper-parameters are float64."""
    with jax.enable_x64(True):
        model = from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, FEATURES), jnp.float32))
        method = build(model, LocalTraining(lambda rate: optax.sgd(rate, 0.9), batch_size=4))
        columns = {"image": np.zeros((4, FEATURES), np.float32), "label": np.zeros(4, np.int32)}
        communication_of(method, columns)


@pytest.mark.slow
@pytest.mark.parametrize("method", [DITTO, APFL, P_FED_ME], ids=lambda method: method.name)
def test_vmap_is_scan(method):
    one, other = run(method), run(method, execution=Execution("vmap", 2))
    assert_same((one.model, one.personal), (other.model, other.personal), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [DITTO, APFL, P_FED_ME], ids=lambda method: method.name)
def test_links_can_be_compressed(method):
    found = run(compressed(method, 3, quantisation(16), quantisation(16)))
    plain = run(method)
    assert_same((found.model, found.personal), (plain.model, plain.personal), atol=1e-2)


@pytest.mark.parametrize(
    ("method", "seed"),
    [(DITTO, 8), (APFL, 8), (P_FED_ME, 0), (per_fed_avg(MODEL, TRAINING), 0)],
    ids=lambda value: getattr(value, "name", None),
)
def test_only_the_global_model_travels(method, seed):
    """Down: the model, and the seed where personal models begin with the initial one."""
    parameters = 4 * (FEATURES * 3 + 3 * CLASSES)
    assert communication_of(method, federated().columns) == (parameters + seed, parameters + 4)
    assert list(method.personal_models) == ["personal"]
    kept = jax.tree.leaves(method.init_client_state())
    assert sum(leaf.size for leaf in kept if leaf.ndim) == parameters // 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ditto(MODEL, personal_epochs=0), r"^personal_epochs must be at least 1, got 0"),
        (
            lambda: ditto(MODEL, hyper=DittoHyper(proximal_weight=-1)),
            r"^hyper\.proximal_weight must be .*at least 0, got -1",
        ),
        (
            lambda: apfl(MODEL, hyper=APFLHyper(alpha=1.5)),
            r"^hyper\.alpha must be at least 0 and at most 1, got 1\.5",
        ),
        (
            lambda: apfl(MODEL, hyper=APFLHyper(alpha_learning_rate=-0.1)),
            r"^hyper\.alpha_learning_rate must be at least 0, got -0\.1",
        ),
        (lambda: p_fed_me(MODEL, personal_steps=0), r"^personal_steps must be at least 1, got 0"),
        (
            lambda: per_fed_avg(MODEL, variant="exact"),
            r"^variant must be one of \['first_order', 'hessian_free'\], got 'exact'",
        ),
        (
            lambda: per_fed_avg(MODEL, LocalTraining(batch_size=2), "hessian_free"),
            r"^training\.batch_size must be at least 3, got 2",
        ),
        (
            lambda: per_fed_avg(MODEL, hyper=PerFedAvgHyper(difference=0.0)),
            r"^hyper\.difference must be above 0, got 0",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", [p_fed_me, per_fed_avg])
def test_clients_weigh_alike_but_nothing_without_examples(method):
    model = softmax_regression(on_one_device.FEATURES, on_one_device.CLASSES)
    method, columns = (
        method(model, LocalTraining(batch_size=3)),
        on_one_device.first_rows([3]).columns,
    )
    message = method.broadcast(method.init(jax.random.key(0)))
    kept = method.init_client_state()

    @jax.jit  # which leaves out the training
    def weight_of(size):
        data = ClientData(columns, jnp.int32(0), size, size, 3, False)
        result = method.client_update(message, kept, data, jax.random.key(1), method.hyper)
        return result.weight

    assert [float(weight_of(size)) for size in (0, 1, 3)] == [0, 1, 1]


@pytest.mark.parametrize("method", [p_fed_me, per_fed_avg])
def test_clients_without_examples_have_no_weight(method):
    model = softmax_regression(on_one_device.FEATURES, on_one_device.CLASSES)
    trained = method(model, LocalTraining(batch_size=3))
    alone, _ = on_one_device.on_one_device(trained, [3], rounds=1)
    with_others, _ = on_one_device.on_one_device(trained, [3, 0, 0], rounds=1)
    np.testing.assert_allclose(with_others, alone, rtol=1e-5)
    assert np.abs(alone - model.init(jax.random.key(0)).params["w"]).max() > 1e-3
