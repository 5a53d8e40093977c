"""FjORD against plain NumPy in float64, and against FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from round_stand_ins import loss_of_clients
from softmax_regression import random_clients

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools import fjord as fjord_module
from fedcodist.algorithms.pools.fjord import (
    FjordHyper,
    OrderedOutputs,
    _client_update,
    fjord,
    with_ordered_dropout,
)
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.communication import tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import client_key
from fedcodist.core.model import Variables, variable_shapes
from fedcodist.models.cnn import CNN
from fedcodist.models.digits import MLP
from fedcodist.models.submodels import chain_units, gathered, places_of, with_first_units
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 1, 4), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 3, 3
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
LAYERS = ("Dense_0", "Dense_1", "Dense_2")
HIDDEN = {"whole": (6, 4), "half": (3, 2), "sixth": (1, 1)}
CLIENTS = {"whole": [0, 1], "half": [1, 2, 3], "sixth": [4, 5, 2]}
COHORTS = {"whole": 1, "half": 2, "sixth": 2}
DATA = random_clients(SIZES, FEATURES, CLASSES)


def network(hidden=HIDDEN["whole"]):
    return from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES)))


def levels(names):
    return {n: HeteroFLLevel(network(HIDDEN[n]), np.array(CLIENTS[n]), COHORTS[n]) for n in names}


def ordered(names=tuple(HIDDEN), hyper=(0.7, 2.0), **options):
    hyper = FjordHyper(RATE, 1.0, *hyper)
    return fjord(network(), levels(names), LAYERS, DATA.columns, TRAINING, hyper=hyper, **options)


def run(algorithm, data=DATA):
    """Every predictor's last parameters, and the Selection of every round."""
    experiment = Experiment(algorithm, resident_data(data), {"train": data}, ROUNDS)
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


def part_of(params, hidden):
    widths = [FEATURES, *hidden, CLASSES]
    cut = zip(params, widths, widths[1:], strict=False)
    return [(kernel[:a, :b], bias[:b]) for (kernel, bias), a, b in cut]


def forward(params, images):
    inputs = [images]
    for kernel, bias in params[:-1]:
        inputs.append(np.maximum(inputs[-1] @ kernel + bias, 0))
    return inputs, inputs[-1] @ params[-1][0] + params[-1][1]


def gradient(params, inputs, slope):
    found = []
    for layer in (2, 1, 0):
        found.append((inputs[layer].T @ slope, slope.sum(axis=0)))
        if layer:
            slope = slope @ params[layer][0].T * (inputs[layer] > 0)
    return found[::-1]


def plain_client(params, client, drawn, taught, alpha, temperature):
    """A client's [(kernel, bias)] after steps in which networks of `drawn` widths are trained."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = DATA.columns["image"][rows].astype(np.float64)
    one_hot = np.eye(CLASSES)[DATA.columns["label"][rows]]
    for hidden in drawn:
        total = [(np.zeros_like(kernel), np.zeros_like(bias)) for kernel, bias in params]
        part = part_of(params, hidden)
        inputs, logits = forward(part, images)
        slope = softmax(logits) - one_hot
        if taught:
            of_full, answers = forward(params, images)
            total = gradient(params, of_full, softmax(answers) - one_hot)
            pull = softmax(logits / temperature) - softmax(answers / temperature)
            slope = (1 - alpha) * slope + alpha * pull / temperature
        for (kernel, bias), (by_kernel, by_bias) in zip(
            total, gradient(part, inputs, slope), strict=True
        ):
            a, b = by_kernel.shape
            kernel[:a, :b] += by_kernel
            bias[:b] += by_bias
        step = RATE / len(images)
        params = [
            (kernel - step * by_kernel, bias - step * by_bias)
            for (kernel, bias), (by_kernel, by_bias) in zip(params, total, strict=True)
        ]
    return params


def widths_drawn(level, names, round, client):
    """A client's draws, as local training derives the keys of its steps."""
    within = [HIDDEN[n] for n in names if HIDDEN[n] <= HIDDEN[level]]
    key = keys.derive(client_key(jax.random.key(0), round, level), client)
    draws = []
    for step in range(EPOCHS):
        of_step = keys.derive(keys.derive(key, "step", step), "dropout")
        index = jax.random.randint(keys.derive(of_step, "width"), (), 0, len(within))
        draws.append(within[int(index)])
    return draws


def plain_loop(params, selections, names, taught, alpha, temperature):
    seen = set()
    for round, selection in enumerate(selections):
        total = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        count = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        for name in names:
            for client in selection.clients[name].tolist():
                drawn = widths_drawn(name, names, round, client)
                seen |= {(name, width) for width in drawn}
                part = part_of(params, HIDDEN[name])
                found = plain_client(part, client, drawn, taught, alpha, temperature)
                for layer, (kernel, bias) in enumerate(found):
                    a, b = kernel.shape
                    total[layer][0][:a, :b] += SIZES[client] * kernel
                    total[layer][1][:b] += SIZES[client] * bias
                    count[layer][0][:a, :b] += SIZES[client]
                    count[layer][1][:b] += SIZES[client]
        mean = lambda old, new, by: np.where(by > 0, new / np.maximum(by, 1), old)
        params = [tuple(map(mean, *each)) for each in zip(params, total, count, strict=True)]
    assert len(seen) > len(names)  # a level drew smaller networks than its own, too
    return params


def as_pairs(params):
    return [(np.float64(params[n]["kernel"]), np.float64(params[n]["bias"])) for n in LAYERS]


@pytest.mark.parametrize(
    "names, taught, execution",
    [
        (("sixth", "whole", "half"), True, Execution()),
        pytest.param(("sixth", "whole", "half"), False, Execution(), marks=pytest.mark.slow),
        pytest.param(("whole", "half"), True, Execution("vmap", 2), marks=pytest.mark.slow),
    ],
)
def test_rounds_are_a_plain_loop(names, taught, execution):
    ours = ordered(names, self_distillation=taught, execution=execution)
    found, selections = run(ours)
    start = ours.predictors["whole"].variables(ours.init(jax.random.key(0))).params
    expected = plain_loop(as_pairs(start), selections, names, taught, 0.7, 2.0)
    same(as_pairs(found["whole"]), expected, rtol=1e-4, atol=1e-5)
    same(as_pairs(found["half"]), part_of(expected, HIDDEN["half"]), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------ properties


def test_the_full_network_learns_the_labels_and_the_drawn_one_from_both(monkeypatch):
    """The loss that clients are trained with, of given logits, in plain NumPy."""
    update, labels = _client_update(network(), network(), TRAINING, True), np.array([0, 2])
    loss = loss_of_clients(monkeypatch, update, FjordHyper(RATE, 1.0, 0.7, 2.0))
    full, drawn = np.random.default_rng(0).normal(size=(2, 2, CLASSES)).astype(np.float32)
    found = loss(OrderedOutputs(full, drawn), {"label": labels})
    of_labels = lambda logits: -np.log(softmax(logits)[np.arange(2), labels])
    target, own = softmax(full / 2), softmax(drawn / 2)
    divergence = np.sum(target * np.log(target / own), axis=1)
    expected = of_labels(full) + 0.3 * of_labels(drawn) + 0.7 * divergence
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("taught", [True, False])
def test_one_level_of_all_units_is_fed_avg(taught):
    """With alpha = 1 the drawn network is its own teacher, and the divergence is zero."""
    clients, training = np.arange(len(SIZES)), LocalTraining(batch_size=2, epochs=2)
    level = {"main": HeteroFLLevel(network(), clients, 3)}
    hyper = FjordHyper(RATE, 1.0)
    ours = fjord(network(), level, LAYERS, DATA.columns, training, taught, hyper=hyper)
    pool = Pool(fed_avg(network(), training, hyper=FedAvgHyper(RATE, 1.0)), clients, 3)
    theirs = independent_pools({"main": pool}, DATA.columns)
    same(run(ours)[0], run(theirs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module, layers, shape, first",
    [
        (MLP((6, 4), CLASSES), LAYERS, (4,), (3, 2)),
        (
            CNN((2, 4, 4), (6,), CLASSES, 24),
            ("conv1", "conv2", "conv3", "dense1", "output"),
            (24, 24, 1),
            (1, 3, 2, 4),
        ),
    ],
)
def test_units_that_are_zeros_are_not_there(module, layers, shape, first):
    model = from_flax_linen(module, jnp.zeros((1, *shape)))
    params, shapes = model.init(jax.random.key(1)).params, variable_shapes(model).params
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases are not zeros
    units, counts = chain_units(shapes, layers), dict(zip(layers, first, strict=False))
    found = with_first_units(params, counts, units)
    places = places_of({layer: np.arange(n) for layer, n in counts.items()}, shapes, units)
    same(gathered(found, places), gathered(params, places))
    attributes = {"filters": first[:-1]} if hasattr(module, "filters") else {}
    attributes["hidden"] = first[len(first) - len(module.hidden) :]
    small = from_flax_linen(module.clone(**attributes), jnp.zeros((1, *shape)))
    images = {"image": jax.random.normal(jax.random.key(2), (3, *shape))}
    expected, _ = small.apply(Variables(gathered(params, places), {}), images)
    logits, _ = model.apply(Variables(found, {}), images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_dropped_in_evaluation():
    model = network()
    dropped = with_ordered_dropout(model, LAYERS, [{"Dense_0": 1, "Dense_1": 1}], distilled=True)
    variables, images = model.init(jax.random.key(0)), {"image": jnp.ones((2, FEATURES))}
    expected, _ = model.apply(variables, images)
    np.testing.assert_array_equal(dropped.apply(variables, images)[0], expected)
    outputs, _ = dropped.apply(variables, images, train=True, key=jax.random.key(0))
    np.testing.assert_array_equal(outputs.full, expected)
    assert not np.allclose(outputs.drawn, expected)


def test_levels_of_one_width_are_one_part_to_draw(monkeypatch):
    drawn = []
    keep = fjord_module.with_ordered_dropout
    monkeypatch.setattr(
        fjord_module,
        "with_ordered_dropout",
        lambda network, layers, widths, distilled: (
            drawn.append(len(widths)) or keep(network, layers, widths, distilled)
        ),
    )
    halves = {name: HeteroFLLevel(network((4, 3)), np.array([n]), 1) for n, name in enumerate("ab")}
    whole = {"whole": HeteroFLLevel(network((8, 6)), np.array([2]), 1)}
    fjord(network((8, 6)), halves | whole, LAYERS, DATA.columns)
    assert drawn == [1, 1, 2]


def test_a_level_exchanges_its_part():
    for name, found in ordered().communication.items():
        model = jax.eval_shape(network(HIDDEN[name]).init, jax.random.key(0)).params
        assert found.down == tree_bytes(model)
        assert found.up == tree_bytes(model) + 4  # its weight


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ordered(names=()), "levels must hold at least one level"),
        (lambda: ordered(hyper=(1.5, 1.0)), r"hyper\.distillation_weight must be .*at most 1"),
        (lambda: ordered(hyper=(1.0, 0.0)), r"hyper\.temperature must be .*above 0"),
        (
            lambda: fjord(
                network(),
                levels(["half"]) | {"b": HeteroFLLevel(network((2, 3)), np.arange(2), 1)},
                LAYERS,
                DATA.columns,
            ),
            "levels must lie within one another, but 'half' has .* and 'b' ",
        ),
        (
            lambda: fjord(network((2, 2)), levels(["half"]), LAYERS, DATA.columns),
            r"levels\['half'\]: submodel's 'Dense_0' must have 1 to 2 units, got 3",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
