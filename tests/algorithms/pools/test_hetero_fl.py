"""HeteroFL against plain NumPy in float64, and against methods that it must reduce to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_one_device import after_one_round
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.hetero_fl import HeteroFLAdjustments, hetero_fl
from fedcodist.algorithms.pools.hetero_fl_parts import classes_of, scaled_by_share
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.top_k import top_k
from fedcodist.core.client_states import device_client_states
from fedcodist.core.communication import tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining
from fedcodist.models.cnn import CNN
from fedcodist.models.digits import MLP, BatchNormMLP
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 1, 4), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 2, 3
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
LAYERS = ("Dense_0", "Dense_1", "Dense_2")
HIDDEN = {"whole": (8, 4), "half": (4, 2), "quarter": (2, 1)}
CLIENTS = {"whole": [0, 1], "half": [1, 2, 3], "quarter": [4, 5, 2]}
COHORTS = {"whole": 1, "half": 2, "quarter": 2}
COLUMNS = random_clients(SIZES, FEATURES, CLASSES).columns


def network(hidden):
    return from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES)))


def levels(*names):
    return {n: HeteroFLLevel(network(HIDDEN[n]), np.array(CLIENTS[n]), COHORTS[n]) for n in names}


def algorithm(*names, **options):
    flags = {n: options.pop(n) for n in HeteroFLAdjustments._fields if n in options}
    options = dict(training=TRAINING, hyper=FedAvgHyper(RATE, 1.0)) | options
    options["adjustments"] = HeteroFLAdjustments(**flags)
    names = names or tuple(HIDDEN)
    return hetero_fl(network(HIDDEN["whole"]), levels(*names), LAYERS, COLUMNS, **options)


def trained(algorithm, rounds=ROUNDS, devices=None, sizes=SIZES):
    """The server's parameters, and the Selection of every round."""
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(algorithm, rounds, mesh)
    data = put(resident_data(random_clients(sizes, FEATURES, CLASSES)))
    seeds, rows = put(np.zeros(1, np.uint32)), put(device_client_states(algorithm.client_states, 1))
    hyper = put(jax.tree.map(np.float32, algorithm.hyper))
    state, _, metrics = programs.train(programs.init(seeds), rows, seeds, 0, rounds, hyper, data)
    assert all(np.all(v) for name, v in metrics.items() if "finite" in name)
    root = jax.random.key(0)
    selections = [jax.tree.map(np.asarray, algorithm.select(n, root)) for n in range(rounds)]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], state), selections


def same(left, right, **tolerance):
    close = functools.partial(np.testing.assert_allclose, **tolerance)
    jax.tree.map(close, left, right)


# ---------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def plain_client(params, client, shares, masked):
    """A client's [(kernel, bias)] after local training, and the classes that it has."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = COLUMNS["image"][rows].astype(np.float64)
    one_hot = np.eye(CLASSES)[COLUMNS["label"][rows]]
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


def plain_loop(params, selections, names, masked, scaled):
    for selection in selections:
        total = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        count = [(np.zeros_like(k), np.zeros_like(b)) for k, b in params]
        for name in names:
            widths = [FEATURES, *HIDDEN[name], CLASSES]
            shares = [a / b for a, b in zip(HIDDEN[name], HIDDEN["whole"], strict=True)]
            part = [
                (k[:a, :b], c[:b]) for (k, c), a, b in zip(params, widths, widths[1:], strict=False)
            ]
            for client in selection.clients[name].tolist():
                found, own = plain_client(part, client, shares if scaled else (1, 1), masked)
                for layer, (kernel, bias) in enumerate(found):
                    a, b = kernel.shape
                    holds = own if layer == 2 else np.ones(b)
                    total[layer][0][:a, :b] += kernel * holds
                    total[layer][1][:b] += bias * holds
                    count[layer][0][:a, :b] += holds
                    count[layer][1][:b] += holds
        mean = lambda old, new, by: np.where(by > 0, new / np.maximum(by, 1), old)
        params = [tuple(map(mean, *each)) for each in zip(params, total, count, strict=True)]
    return params


def as_pairs(params):
    return [(np.float64(params[n]["kernel"]), np.float64(params[n]["bias"])) for n in LAYERS]


@pytest.mark.parametrize(
    "names, masked, scaled, execution",
    [
        (("whole", "quarter"), True, True, Execution()),
        pytest.param(
            *(("whole", "half", "quarter"), True, True, Execution()), marks=pytest.mark.slow
        ),
        pytest.param(
            *(("half", "quarter"), False, True, Execution("vmap", 2)), marks=pytest.mark.slow
        ),
        pytest.param(("whole", "half"), True, False, Execution(), marks=pytest.mark.slow),
    ],
)
def test_rounds_are_a_plain_loop(names, masked, scaled, execution):
    ours = algorithm(*names, masked=masked, scaled=scaled, execution=execution)
    state, selections = trained(ours)
    start = as_pairs(first_parameters(ours))
    expected = plain_loop(start, selections, names, masked, scaled)
    same(as_pairs(state.params), expected, rtol=1e-4, atol=1e-5)
    found, moved = as_pairs(state.params), lambda a, b: np.all(a[:1, :1] != b[:1, :1])
    assert all(moved(new[0], old[0]) for new, old in zip(found, start, strict=True))
    if "whole" not in names:  # what no client has stays as it was
        for layer, rest in ((0, np.s_[:, 4:]), (1, np.s_[4:]), (1, np.s_[:, 2:]), (2, np.s_[2:])):
            np.testing.assert_array_equal(found[layer][0][rest], start[layer][0][rest])


def first_parameters(algorithm):
    programs = build_programs(algorithm, 1, None)
    return jax.tree.map(lambda leaf: leaf[0], programs.init(np.zeros(1, np.uint32)).params)


# ------------------------------------------------------------------------------------ properties


@pytest.mark.slow
def test_of_one_level_it_is_fed_avg_with_equal_weights():
    sizes = (4, 4, 4)
    columns = random_clients(sizes, FEATURES, CLASSES).columns
    model, rates = network((4,)), FedAvgHyper(RATE, 1.0)
    clients, training = np.arange(3), LocalTraining(batch_size=2, epochs=2)
    level = {"main": HeteroFLLevel(model, clients, 2)}
    ours = hetero_fl(
        model, level, LAYERS[:2], columns, training, HeteroFLAdjustments(masked=False), hyper=rates
    )
    averaging = fed_avg(model, training, optax.sgd, hyper=rates)
    theirs = independent_pools({"main": Pool(averaging, clients, 2)}, columns)
    start = first_parameters(ours)
    found, _ = trained(ours, sizes=sizes)
    expected, _ = trained(theirs, sizes=sizes)
    same(found.params, expected["main"].params, rtol=1e-5, atol=1e-6)
    assert np.abs(found.params["Dense_0"]["kernel"] - start["Dense_0"]["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_smaller_levels_lie_within_larger_ones():
    ours = algorithm()
    state = ours.init(jax.random.key(3))
    of = {name: each.variables(state).params for name, each in ours.predictors.items()}
    same(of["whole"], state.params)
    for small, large in (("quarter", "half"), ("half", "whole")):
        within = jax.tree.map(
            lambda a, b: b[tuple(slice(n) for n in a.shape)], of[small], of[large]
        )
        same(of[small], within)


@given(
    labels=st.lists(st.integers(0, CLASSES - 1), min_size=0, max_size=6),
    before=st.integers(0, 3),
)
@settings(max_examples=20)
def test_classes_are_those_of_a_clients_own_examples(labels, before):
    column = jnp.asarray([0, 1, 2][:before] + labels + [0, 1, 2], jnp.int32)
    size = jnp.int32(len(labels))
    data = ClientData({"label": column}, jnp.int32(before), size, size, 6, True)
    expected = [float(c in labels) for c in range(CLASSES)]
    same = LocalTraining().preprocess
    np.testing.assert_array_equal(classes_of(data, CLASSES, same), expected)
    # Labels are those of training.
    shifted = lambda batch, key, positions: {"label": (batch["label"] + 1) % CLASSES}
    np.testing.assert_array_equal(classes_of(data, CLASSES, shifted), np.roll(expected, 1))


@pytest.mark.parametrize(
    "whole, half, shape",
    [
        (MLP((8, 4), CLASSES), MLP((4, 2), CLASSES), (4,)),
        pytest.param(
            CNN((2, 4, 4), (6,), CLASSES, 24),
            CNN((1, 2, 2), (3,), CLASSES, 24),
            (24, 24, 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_half_of_units_that_are_all_alike_say_what_the_whole_says(whole, half, shape):
    """But for biases, of which there are half as many and which are divided as the rest."""
    whole, half = (from_flax_linen(each, jnp.zeros((1, *shape))) for each in (whole, half))
    ones = lambda model: jax.tree.map_with_path(
        lambda path, leaf: jnp.full(leaf.shape, float(path[-1].key == "kernel")),
        model.init(jax.random.key(0)),
    )
    batch = {"image": jnp.ones((1, *shape))}
    expected, _ = whole.apply(ones(whole), batch)
    layers = list(jax.eval_shape(half.init, jax.random.key(0)).params)
    scaled = scaled_by_share(half, dict.fromkeys(layers[:-1], 0.5))
    for train in (True, False):
        found, _ = scaled.apply(ones(half), batch, train=train)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.all(half.apply(ones(half), batch)[0] < expected)


def test_what_is_evaluated_is_what_was_trained():
    ours, batch = algorithm("whole", "half"), {"image": jnp.asarray(COLUMNS["image"])}
    state = ours.init(jax.random.key(0))
    for name, predictor in ours.predictors.items():
        variables = predictor.variables(state)
        logits = predictor.predict(variables, batch)
        np.testing.assert_array_equal(
            logits, predictor.model.apply(variables, batch, train=True)[0]
        )
        plain, _ = network(HIDDEN[name]).apply(variables, batch)
        assert np.allclose(logits, plain) == (name == "whole")


@pytest.mark.parametrize("masked", [True, False])
def test_clients_without_examples_have_no_weight(masked):
    whole, training = network(HIDDEN["whole"]), LocalTraining(batch_size=3)
    adjustments, hyper = HeteroFLAdjustments(masked=masked), FedAvgHyper(RATE, 1.0)

    def after(*sizes):
        half = HeteroFLLevel(network(HIDDEN["half"]), np.arange(len(sizes)), len(sizes))
        levels = {"half": half}
        ours = hetero_fl(whole, levels, LAYERS, COLUMNS, training, adjustments, hyper=hyper)
        return after_one_round(ours, "half", sizes).params

    same(after(3, 0, 0), after(3), rtol=1e-5)
    assert not np.array_equal(after(3)["Dense_2"]["kernel"], after(0)["Dense_2"]["kernel"])


@pytest.mark.slow
def test_devices_share_the_work():
    one, _ = trained(algorithm())
    three, _ = trained(algorithm(execution=Execution("vmap", 2)), devices=3)
    same(one.params, three.params, rtol=1e-5, atol=1e-6)


def test_a_level_exchanges_its_part_and_which_classes_it_has():
    for masked in (True, False):
        ours = algorithm(masked=masked)
        for name, found in ours.communication.items():
            model = jax.eval_shape(network(HIDDEN[name]).init, jax.random.key(0)).params
            assert found.down == tree_bytes(model)
            assert found.up == tree_bytes(model) + 4 + masked * 4 * CLASSES  # its weight of one


@pytest.mark.slow
def test_convolutions_are_chained_too():
    make = lambda filters, hidden: from_flax_linen(
        CNN(filters, hidden, CLASSES, 24), jnp.zeros((1, 24, 24, 1))
    )
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 1)).astype(np.float32)
    columns = {"image": images, "label": np.array([0, 1, 2, 0], np.int32)}
    parts = {
        "large": HeteroFLLevel(make((2, 4, 4), (6,)), np.array([0]), 1),
        "small": HeteroFLLevel(make((1, 2, 2), (3,)), np.array([1]), 1),
    }
    layers = ("conv1", "conv2", "conv3", "dense1", "output")
    ours = hetero_fl(parts["large"].model, parts, layers, columns, LocalTraining(batch_size=2))
    state = ours.init(jax.random.key(0))
    small = ours.predictors["small"].variables(state).params
    whole = state.params["dense1"]["kernel"].reshape(6, 6, 4, 6)  # positions x filters
    np.testing.assert_array_equal(
        small["dense1"]["kernel"].reshape(6, 6, 2, 3), whole[:, :, :2, :3]
    )


# ------------------------------------------------------------------------------------- bad input


def build(model=None, parts=None, layers=LAYERS, **options):
    model = network(HIDDEN["whole"]) if model is None else model
    return hetero_fl(model, levels("whole") if parts is None else parts, layers, COLUMNS, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: build(parts={}), "levels must hold at least one level"),
        (
            lambda: build(parts={"a": HeteroFLLevel(network((9, 4)), np.arange(2), 1)}),
            r"levels\['a'\]: submodel's 'Dense_0' must have 1 to 8 units, got 9",
        ),
        (
            lambda: hetero_fl(
                network((8, 4)), levels("whole"), LAYERS, {"image": COLUMNS["image"]}
            ),
            r"adjustments.masked must be False for columns without 'label', got \['image'\]",
        ),
        (lambda: build(layers=LAYERS[:2]), r"levels\['whole'\]: model must be a chain"),
        (
            lambda: build(parts={"a": HeteroFLLevel(network((4, 4)), np.arange(2), 3)}),
            r"levels\['a'\]\.cohort_size must be between 1 and",
        ),
        (
            lambda: build(from_flax_linen(BatchNormMLP((4,), CLASSES), jnp.zeros((1, FEATURES)))),
            "model must have no mutable state",
        ),
        (
            lambda: hetero_fl(
                from_flax_linen(
                    MLP((8, 4), 1),
                    jnp.zeros((1, FEATURES)),
                    loss=lambda outputs, batch: (outputs[:, 0] - batch["label"]) ** 2,
                    metrics={},
                ),
                levels("whole"),
                LAYERS,
                COLUMNS,
            ),
            "adjustments.masked must be False for a network of one logit",
        ),
        (
            lambda: algorithm(wrapped=lambda m: compressed(m, 2, downlink=quantisation(8))),
            r"adjustments\.wrapped must compress the uplink only",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_clients_can_compress():
    """All values are sent: nothing changes. Half of them: the model does."""

    def of(share):
        wrapped = lambda method: compressed(method, num_rounds=2, uplink=top_k(share))
        return trained(algorithm(wrapped=wrapped), rounds=2)[0].inner

    plain = trained(algorithm(), rounds=2)[0]
    whole, half = (jax.tree.leaves(of(share).params) for share in (1.0, 0.5))
    same(whole, jax.tree.leaves(plain.params), atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(whole, half, strict=True))


def test_a_level_tells_no_gradient_of_the_whole_network():
    gradients = lambda update, progress: {"norm": optax.tree.norm(update)}
    wrapped = lambda method: compressed(method, 2, observe_gradient=gradients)
    with pytest.raises(ValueError, match=r"^observe_gradient must be None for a method"):
        build(adjustments=HeteroFLAdjustments(wrapped=wrapped))


def test_a_network_without_linen_modules_cannot_be_scaled():
    model = scaled_by_share(softmax_regression(FEATURES, CLASSES), {"w": 0.5})
    variables, batch = model.init(jax.random.key(0)), {"image": jnp.ones((1, FEATURES))}
    with pytest.raises(ValueError, match=r"scaled must be False .* 'w' as a Flax linen module"):
        model.apply(variables, batch)
