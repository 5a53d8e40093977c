"""Hyper-parameters that change over the rounds, against a plain loop."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_one_device import CLASSES, FEATURES, first_rows
from quick_compilation import QUICK
from softmax_regression import softmax_regression

import fedcodist as fc
from fedcodist.core.inputs import Inputs, Round

ROUNDS, RATE, FACTOR, SIZES = 3, 0.5, 0.3, (3, 2)
MODEL = softmax_regression(FEATURES, CLASSES)
TRAINING = fc.LocalTraining(batch_size=3)
START = np.asarray(MODEL.init(jax.random.key(0)).params["w"], np.float64)


def averaging():
    method = fc.fed_avg(MODEL, TRAINING, hyper=fc.FedAvgHyper(client_learning_rate=RATE))
    pools = {name: fc.Pool(method, np.arange(2), 2) for name in ("one", "two")}
    return fc.independent_pools(pools, first_rows(SIZES).columns)


def trained(algorithm, pools):
    """The state after ROUNDS rounds, which one program does."""
    inputs = Inputs(dict.fromkeys(pools, first_rows(SIZES)), {})

    def one_round(index, carry):
        round = Round(index, jax.random.key(0), inputs)
        return algorithm.round(*carry, round, algorithm.hyper)[:2]

    carry = algorithm.init(jax.random.key(0)), dict.fromkeys(pools, ())
    rounds = lambda carry: jax.lax.fori_loop(0, ROUNDS, one_round, carry)
    return jax.jit(rounds, compiler_options=QUICK)(carry)[0]


def after_steps(weights, client, rates):
    """The weights after a step on all of a client's examples for each rate."""
    cohort = first_rows(SIZES)
    images = np.asarray(cohort.columns["image"], np.float64)[: SIZES[client]]
    targets = np.eye(CLASSES)[np.asarray(cohort.columns["label"])[: SIZES[client]]]
    for rate in rates:
        shares = np.exp(images @ weights)
        shares /= shares.sum(1, keepdims=True)
        weights = weights - rate * images.T @ (shares - targets) / len(images)
    return weights


def averaged(weights, rates):
    """The weights after a round of FedAvg for each rate."""
    for rate in rates:
        of_clients = [after_steps(weights, client, [rate]) for client in range(len(SIZES))]
        weights = np.average(of_clients, axis=0, weights=SIZES)
    return weights


@pytest.mark.parametrize(
    ("name", "decay_of_two"), [("client_learning_rate", FACTOR), ("one.client_learning_rate", 1)]
)
def test_clients_rate_that_decays_in_all_pools_or_in_one(name, decay_of_two):
    algorithm = fc.scheduled(averaging(), {name: fc.exponential_decay(FACTOR)})
    state = trained(algorithm, ("one", "two"))
    for pool, factor in (("one", FACTOR), ("two", decay_of_two)):
        expected = averaged(START, [RATE * factor**round for round in range(ROUNDS)])
        np.testing.assert_allclose(state[pool].params["w"], expected, rtol=1e-5)


def test_parties_rate_that_decays_to_zero():
    algorithm = fc.local_only(
        {"net": fc.PartyGroup(MODEL, np.arange(2))},
        training=TRAINING,
        hyper=fc.LocalOnlyHyper(RATE),
    )
    state = trained(fc.scheduled(algorithm, {"learning_rate": fc.linear_decay(2)}), ("parties",))
    weights = algorithm.predictors["net"].variables(state).params["w"]
    for party in range(2):
        expected = after_steps(START, party, [RATE, RATE / 2, 0])
        np.testing.assert_allclose(weights[party], expected, rtol=1e-5)


def test_a_field_that_holds_a_value_for_each_pool_is_scheduled_by_its_name():
    class Hyper(NamedTuple):
        alpha: dict[str, float]
        rate: float

    seen = lambda state, rows, round, hyper: (hyper, rows, {})
    algorithm = averaging()._replace(hyper=Hyper({"one": 0.5, "two": 1.0}, 0.1), round=seen)
    halved = lambda value, round: value / 2
    at = lambda schedules: fc.scheduled(algorithm, schedules).round(
        None, {}, SimpleNamespace(index=jnp.int32(0)), algorithm.hyper
    )[0]
    assert at({"alpha": halved}) == Hyper({"one": 0.25, "two": 0.5}, 0.1)
    assert at({"alpha.two": halved}) == Hyper({"one": 0.5, "two": 0.5}, 0.1)


@pytest.mark.parametrize(
    ("schedules", "error", "message"),
    [
        (
            {"learning_rate": fc.linear_decay(3)},
            ValueError,
            r"schedules must be of hyper-parameters of fed_avg, which has \['client_learning_rate', "
            r"'server_learning_rate'\], got 'learning_rate'",
        ),
        (
            {
                "client_learning_rate": fc.linear_decay(3),
                "two.client_learning_rate": fc.linear_decay(3),
            },
            ValueError,
            "must not have two for one hyper-parameter",
        ),
        (
            {"three.client_learning_rate": fc.linear_decay(3)},
            ValueError,
            r"\['one.client_learning_rate', .*'two.server_learning_rate'\], got 'three",
        ),
        (
            {"client_learning_rate": 0.99},
            TypeError,
            r"schedules\['client_learning_rate'\] must be a",
        ),
        (
            {"client_learning_rate": lambda round: 0.1},
            TypeError,
            r"schedules\['client_learning_rate'\] must be a function \(value, round\)",
        ),
        ("linear_decay", TypeError, "schedules must be a mapping"),
        (
            {"client_learning_rate": lambda value, round: None},
            TypeError,
            r"schedules\['client_learning_rate'\] must return a value as it gets",
        ),
        (
            {"client_learning_rate": lambda value, round: jnp.full(2, value)},
            TypeError,
            r"schedules\['client_learning_rate'\] must return a value as it gets.*float32\[2\]",
        ),
        (
            {"client_learning_rate": lambda value, round: value if round < 3 else 0},
            ValueError,
            r"schedules\['client_learning_rate'\] does not fit what it is given",
        ),
    ],
)
def test_what_is_no_schedule_is_an_error(schedules, error, message):
    with pytest.raises(error, match=message):
        fc.scheduled(averaging(), schedules)


@given(value=st.floats(1e-3, 10), factor=st.floats(0.01, 1), round=st.integers(0, 50))
def test_exponential_decay_is_a_factor_per_round(value, factor, round):
    schedule = fc.exponential_decay(factor)
    assert schedule(value, 0) == value
    assert np.isclose(schedule(value, round + 1), factor * schedule(value, round))


@pytest.mark.parametrize("factor", [0, -0.5, 1.01, float("nan")])
def test_a_factor_is_above_zero_and_at_most_one(factor):
    with pytest.raises(ValueError, match="factor must be"):
        fc.exponential_decay(factor)
