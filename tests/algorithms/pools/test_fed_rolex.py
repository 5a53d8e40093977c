"""FedRolex against plain NumPy in float64, and against HeteroFL and FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from softmax_regression import random_clients

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.fed_rolex import FedRolexAdjustments, fed_rolex
from fedcodist.algorithms.pools.hetero_fl import HeteroFLAdjustments, hetero_fl
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.communication import tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.models.digits import MLP
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 1, 4), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 2, 4
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
LAYERS = ("Dense_0", "Dense_1", "Dense_2")
WIDTHS = (5, 3)
HIDDEN = {"all": (5, 3), "half": (3, 2), "third": (2, 1)}
CLIENTS = {"all": [0, 1], "half": [1, 2, 3], "third": [4, 5, 2]}
COHORTS = {"all": 1, "half": 2, "third": 2}
DATA = random_clients(SIZES, FEATURES, CLASSES)
RATES = FedAvgHyper(RATE, 1.0)


def network(hidden=WIDTHS):
    return from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES)))


def levels(names):
    return {n: HeteroFLLevel(network(HIDDEN[n]), np.array(CLIENTS[n]), COHORTS[n]) for n in names}


def rolling(names=("half", "third"), moved=1, masked=True, scaled=True, execution=Execution()):
    adjustments = FedRolexAdjustments(masked, scaled, moved)
    return fed_rolex(
        *(network(), levels(names), LAYERS, DATA.columns, TRAINING, adjustments),
        hyper=RATES,
        execution=execution,
    )


def run(algorithm):
    """Every predictor's last parameters, and the Selection of every round."""
    experiment = Experiment(algorithm, resident_data(DATA), {"train": DATA}, ROUNDS)
    outcome = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    selections = [jax.tree.map(np.asarray, algorithm.select(n, root)) for n in range(ROUNDS)]
    params = {n: jax.tree.map(lambda w: w[0], v.params) for n, v in outcome.variables.items()}
    return params, selections


def same(left, right, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), left, right)


# ---------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def plain_client(params, client, shares, masked):
    """A client's [(kernel, bias)] after local training, and the classes that it has."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = DATA.columns["image"][rows].astype(np.float64)
    one_hot = np.eye(CLASSES)[DATA.columns["label"][rows]]
    own = one_hot.max(0) if masked else np.ones(CLASSES)
    for _ in range(EPOCHS):
        inputs = [images]
        for (kernel, bias), share in zip(params[:-1], shares, strict=True):
            inputs.append(np.maximum((inputs[-1] @ kernel + bias) / share, 0))
        logits = (inputs[-1] @ params[-1][0] + params[-1][1]) * own
        slope, new = (softmax(logits) - one_hot) * own / len(images), []
        for layer in (2, 1, 0):
            kernel, bias = params[layer]
            new.append((kernel - RATE * inputs[layer].T @ slope, bias - RATE * slope.sum(axis=0)))
            if layer:
                slope = slope @ kernel.T * (inputs[layer] > 0) / shares[layer - 1]
        params = new[::-1]
    return params, own


def plain_loop(params, selections, names, moved, masked, scaled):
    for round, selection in enumerate(selections):
        total = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        count = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        for name in names:
            of_hidden = [
                [(round * moved + unit) % width for unit in range(kept)]
                for kept, width in zip(HIDDEN[name], WIDTHS, strict=True)
            ]
            units = [list(range(FEATURES)), *of_hidden, list(range(CLASSES))]
            shares = [a / b if scaled else 1 for a, b in zip(HIDDEN[name], WIDTHS, strict=True)]
            part = [
                (k[np.ix_(a, b)], c[b])
                for (k, c), a, b in zip(params, units, units[1:], strict=False)
            ]
            for client in selection.clients[name].tolist():
                found, own = plain_client(part, client, shares, masked)
                for layer, (kernel, bias) in enumerate(found):
                    a, b = units[layer : layer + 2]
                    holds = own if layer == 2 else np.ones(len(b))
                    total[layer][0][np.ix_(a, b)] += kernel * holds
                    total[layer][1][b] += bias * holds
                    count[layer][0][np.ix_(a, b)] += holds
                    count[layer][1][b] += holds
        mean = lambda old, new, by: np.where(by > 0, new / np.maximum(by, 1), old)
        params = [tuple(map(mean, *each)) for each in zip(params, total, count, strict=True)]
    return params


def as_pairs(params):
    return [(np.float64(params[n]["kernel"]), np.float64(params[n]["bias"])) for n in LAYERS]


def first_parameters(algorithm):
    return algorithm.predictors["global_model"].variables(algorithm.init(jax.random.key(0))).params


@pytest.mark.parametrize(
    "names, moved, masked, scaled, execution",
    [
        (("half", "third"), 1, True, True, Execution()),
        pytest.param(
            *(("all", "third"), 2, False, False, Execution("vmap", 2)), marks=pytest.mark.slow
        ),
    ],
)
def test_rounds_are_a_plain_loop(names, moved, masked, scaled, execution):
    ours = rolling(names, moved, masked, scaled, execution)
    found, selections = run(ours)
    start = as_pairs(first_parameters(ours))
    expected = plain_loop(start, selections, names, moved, masked, scaled)
    same(as_pairs(found["global_model"]), expected, rtol=1e-4, atol=1e-5)
    # No level has the whole, and yet every unit has been trained.
    for new, old in zip(as_pairs(found["global_model"])[:2], start[:2], strict=True):
        assert np.all(np.any(new[0] != old[0], axis=0))


# ------------------------------------------------------------------------------------ properties


def test_windows_that_do_not_move_are_hetero_fl():
    ours, _ = run(rolling(moved=0))
    adjustments = HeteroFLAdjustments()
    of_levels = (network(), levels(("half", "third")), LAYERS, DATA.columns, TRAINING, adjustments)
    theirs, _ = run(hetero_fl(*of_levels, hyper=RATES))
    same({name: ours[name] for name in theirs}, theirs, rtol=1e-6, atol=1e-7)


def test_one_level_of_all_units_is_fed_avg_with_equal_weights():
    data = random_clients((4, 4, 4), FEATURES, CLASSES)
    training = LocalTraining(batch_size=2, epochs=2)
    clients = np.arange(3)
    level = {"main": HeteroFLLevel(network(), clients, 2)}
    adjustments = FedRolexAdjustments(masked=False)
    ours = fed_rolex(network(), level, LAYERS, data.columns, training, adjustments, hyper=RATES)
    pool = Pool(fed_avg(network(), training, hyper=RATES), clients, 2)
    theirs = independent_pools({"main": pool}, data.columns)
    of = {}
    for name, algorithm in (("ours", ours), ("theirs", theirs)):
        experiment = Experiment(algorithm, resident_data(data), {"train": data}, 3)
        of[name] = run_experiment(experiment, show_progress=False).variables
    found = of["ours"]["global_model"].params
    same(found, of["theirs"]["main"].params, rtol=1e-5, atol=1e-6)
    # The level has all units, in another order in every round.
    rolled = jax.tree.map(lambda leaf: leaf[0], of["ours"]["main"].params)["Dense_0"]["bias"]
    np.testing.assert_array_equal(np.roll(found["Dense_0"]["bias"][0], -3), rolled)


def test_a_level_is_evaluated_with_the_units_of_the_round_to_come():
    ours = rolling()
    state = ours.init(jax.random.key(3))._replace(window=jnp.int32(4))
    whole = ours.predictors["global_model"].variables(state).params
    half = ours.predictors["half"].variables(state).params
    first, second = np.array([4, 0, 1]), np.array([1, 2])  # 4 mod 5 and 4 mod 3, and on from there
    expected = whole["Dense_1"]["kernel"][np.ix_(first, second)]
    np.testing.assert_array_equal(half["Dense_1"]["kernel"], expected)
    np.testing.assert_array_equal(half["Dense_2"]["kernel"], whole["Dense_2"]["kernel"][second])


def test_a_level_exchanges_its_part_and_which_classes_it_has():
    for masked in (True, False):
        for name, found in rolling(masked=masked).communication.items():
            model = jax.eval_shape(network(HIDDEN[name]).init, jax.random.key(0)).params
            assert found.down == tree_bytes(model)
            assert found.up == tree_bytes(model) + 4 + masked * 4 * CLASSES  # its weight of one


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rolling(names=()), "levels must hold at least one level"),
        (lambda: rolling(moved=-1), r"adjustments\.units_per_round must be .*at least 0, got -1"),
        (
            lambda: fed_rolex(
                network(), {"global_model": levels(["half"])["half"]}, LAYERS, DATA.columns
            ),
            "levels must have other names than 'global_model'",
        ),
        (
            lambda: fed_rolex(
                *(network((2, 2)), levels(["half"]), LAYERS, DATA.columns),
            ),
            r"levels\['half'\]: submodel's 'Dense_0' must have 1 to 2 units, got 3",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
