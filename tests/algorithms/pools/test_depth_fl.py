"""DepthFL against plain NumPy in float64, and against FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_one_device import after_one_round
from round_stand_ins import loss_of_clients
from softmax_regression import random_clients

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.depth_fl import (
    DepthFLHyper,
    _client_update,
    _exits,
    depth_fl,
    mutual_divergence,
    ramp,
)
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.communication import tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import variable_shapes
from fedcodist.models.digits import MLP
from fedcodist.models.exits import DenseBlock, Exits, with_exits
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, WIDTHS = (5, 2, 7, 3, 1, 4), 3, 4, (5, 4, 3)
RATE, EPOCHS, ROUNDS = 0.1, 2, 3
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
DEPTHS = {"deep": 3, "middle": 2, "flat": 1}
CLIENTS = {"deep": [0, 1], "middle": [1, 2, 3], "flat": [4, 5, 2]}
COHORTS = {"deep": 1, "middle": 2, "flat": 2}
DATA = random_clients(SIZES, FEATURES, CLASSES)


def network(depth=None, widths=WIDTHS):
    module = Exits([DenseBlock(width) for width in widths], CLASSES, depth)
    return with_exits(module, jnp.zeros((1, FEATURES)))


def levels(names):
    return {n: HeteroFLLevel(network(DEPTHS[n]), np.array(CLIENTS[n]), COHORTS[n]) for n in names}


def of_depths(names=tuple(DEPTHS), weight=0.7, model=None, **options):
    model, hyper = model or network(), DepthFLHyper(RATE, 1.0, weight)
    return depth_fl(model, levels(names), DATA.columns, TRAINING, hyper=hyper, **options)


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


def plain_client(params, client, weight):
    """A client's parameters after local training: layer -> (kernel, bias)."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = DATA.columns["image"][rows].astype(np.float64)
    one_hot, depth = np.eye(CLASSES)[DATA.columns["label"][rows]], len(params) // 2
    for _ in range(EPOCHS):
        hidden, said, new = [images], [], {}
        for block in range(depth):
            kernel, bias = params[f"blocks_{block}"]
            hidden.append(np.maximum(hidden[-1] @ kernel + bias, 0))
            kernel, bias = params[f"exit_{block}"]
            said.append(softmax(hidden[-1] @ kernel + bias))
        moved = lambda name, inputs, slope: tuple(
            old - RATE * step / len(images)
            for old, step in zip(params[name], (inputs.T @ slope, slope.sum(0)), strict=True)
        )
        from_above = 0.0
        for block in reversed(range(depth)):
            # d/dz of KL(q || softmax(z)) is softmax(z) - q.
            others = [said[block] - said[other] for other in range(depth) if other != block]
            slope = said[block] - one_hot + weight * sum(others) / max(depth - 1, 1)
            new[f"exit_{block}"] = moved(f"exit_{block}", hidden[block + 1], slope)
            to_hidden = (from_above + slope @ params[f"exit_{block}"][0].T) * (
                hidden[block + 1] > 0
            )
            new[f"blocks_{block}"] = moved(f"blocks_{block}", hidden[block], to_hidden)
            from_above = to_hidden @ params[f"blocks_{block}"][0].T
        params = new
    return params


def plain_loop(params, selections, names, weights):
    for selection, weight in zip(selections, weights, strict=True):
        trained = []
        for name in names:
            part = {key: params[key] for key in params if int(key[-1]) < DEPTHS[name]}
            for client in selection.clients[name].tolist():
                trained.append(plain_client(part, client, weight))
        for key in params:
            held = [each[key] for each in trained if key in each]
            if held:
                params = params | {
                    key: tuple(np.mean(each, axis=0) for each in zip(*held, strict=True))
                }
    return params


def as_pairs(params):
    layers = {name: layer.get("Dense_0", layer) for name, layer in params.items()}
    return {n: (np.float64(v["kernel"]), np.float64(v["bias"])) for n, v in layers.items()}


@pytest.mark.parametrize(
    "names, ramp_up, execution",
    [
        (("flat", "deep", "middle"), 2, Execution()),
        pytest.param(("middle", "deep"), 0, Execution("vmap", 2), marks=pytest.mark.slow),
    ],
)
def test_rounds_are_a_plain_loop(names, ramp_up, execution):
    ours = of_depths(names, ramp_up=ramp_up, execution=execution)
    found, selections = run(ours)
    start = as_pairs(ours.predictors["deep"].variables(ours.init(jax.random.key(0))).params)
    factors = [np.exp(-5), np.exp(-5 / 4), 1.0] if ramp_up else [1.0] * ROUNDS
    expected = plain_loop(start, selections, names, [0.7 * factor for factor in factors])
    same(as_pairs(found["deep"]), expected, rtol=1e-4, atol=1e-5)
    middle = {name: expected[name] for name in found["middle"]}
    same(as_pairs(found["middle"]), middle, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------ properties


def test_exits_learn_the_labels_and_from_one_another(monkeypatch):
    """The loss that clients are trained with, of given logits."""
    update, labels = _client_update(network(), TRAINING), np.array([0, 2])
    loss = loss_of_clients(monkeypatch, update, DepthFLHyper(RATE, 1.0, 0.7))
    logits = tuple(np.random.default_rng(0).normal(size=(3, 2, CLASSES)).astype(np.float32))
    found = loss(LayerOutputs(logits[0], logits), {"label": labels})
    of_labels = -sum(np.log(softmax(each)[np.arange(2), labels]) for each in logits)
    np.testing.assert_allclose(found, of_labels + 0.7 * mutual_divergence(logits), rtol=1e-5)


def test_one_level_of_one_block_is_fed_avg_with_equal_weights():
    clients, training = np.arange(4), LocalTraining(batch_size=2, epochs=2)
    columns = {name: column[:16] for name, column in DATA.columns.items()}
    data = type(DATA).from_arrays(columns, offsets=np.arange(0, 17, 4))  # clients of one size
    flat = network(widths=(5,))
    level, hyper = {"main": HeteroFLLevel(flat, clients, 3)}, DepthFLHyper(RATE, 1.0, 0.7)
    ours = depth_fl(flat, level, columns, training, hyper=hyper)
    pool = Pool(fed_avg(flat, training, hyper=FedAvgHyper(RATE, 1.0)), clients, 3)
    theirs = independent_pools({"main": pool}, columns)
    of = []
    for algorithm in (ours, theirs):
        experiment = Experiment(algorithm, resident_data(data), {"train": data}, ROUNDS)
        of.append(run_experiment(experiment, show_progress=False).variables["main"].params)
    same(*of, rtol=1e-5, atol=1e-6)


def test_clients_without_examples_have_no_weight():
    training, hyper = LocalTraining(batch_size=3), DepthFLHyper(RATE, 1.0, 0.7)

    def after(*sizes):
        level = {"deep": HeteroFLLevel(network(), np.arange(len(sizes)), len(sizes))}
        ours = depth_fl(network(), level, DATA.columns, training, hyper=hyper)
        params_of = ours.predictors["deep"].variables
        return params_of(after_one_round(ours, "deep", sizes)).params

    same(after(3, 0, 0), after(3), rtol=1e-5)
    assert not np.array_equal(after(3)["exit_0"]["kernel"], after(0)["exit_0"]["kernel"])


def test_what_nobody_has_stays():
    ours = of_depths(("flat",), model=network(widths=WIDTHS[:2]))
    names = {"blocks_0", "exit_0"}
    both = lambda: (ours.init(jax.random.key(0)), after_one_round(ours, "flat", (3, 2)))
    first, state = jax.jit(both)()
    before = first.params
    assert set(before) == names | {"blocks_1", "exit_1"}
    assert set(ours.predictors["flat"].variables(state).params) == names
    for name, layer in before.items():
        stays = jax.tree.leaves(jax.tree.map(np.array_equal, layer, state.params[name]))
        assert all(stays) if name not in names else not any(stays), name


def test_exits_teach_one_another():
    logits = tuple(np.random.default_rng(0).normal(size=(3, 2, CLASSES)).astype(np.float32))
    p = [softmax(each) for each in logits]
    kl = lambda target, own: np.sum(target * np.log(target / own), axis=1)
    expected = sum(kl(p[j], p[i]) / 2 for i in range(3) for j in range(3) if i != j)
    np.testing.assert_allclose(mutual_divergence(logits), expected, rtol=1e-4)
    np.testing.assert_array_equal(mutual_divergence(logits[:1]), [0, 0])


def test_exits_of_16_bits_are_compared_in_float32():
    logits = np.ones((2, CLASSES), jnp.bfloat16)
    exits = _exits(LayerOutputs(logits, (logits, logits)))
    assert [each.dtype for each in exits] == [jnp.float32] * 2


def test_the_weight_grows_as_in_the_authors_code():
    found = [float(ramp(jnp.asarray(round), 300)) for round in (0, 150, 300, 400)]
    np.testing.assert_allclose(found, [np.exp(-5), np.exp(-1.25), 1, 1], rtol=1e-5)
    assert float(ramp(jnp.asarray(0), 0)) == 1


def test_a_level_exchanges_its_blocks():
    for name, found in of_depths().communication.items():
        params = variable_shapes(network(DEPTHS[name])).params
        assert found.down == tree_bytes(params)
        assert found.up == tree_bytes(params) + 4  # its weight of one


def without_exits():
    plain = network()
    apply = lambda *a, **k: (LayerOutputs(plain.apply(*a, **k)[0].logits), {})
    return plain._replace(apply=apply)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: of_depths(names=()), "levels must hold at least one level"),
        (lambda: of_depths(weight=-1.0), r"hyper\.distillation_weight must be .*at least 0"),
        (lambda: of_depths(ramp_up=-1), "ramp_up must be .*at least 0, got -1"),
        (
            lambda: of_depths(model=network(depth=1)),
            r"levels\['deep'\]: submodel's 'blocks_1/Dense_0/bias' must be .* which has none, got \[4\]",
        ),
        (
            lambda: of_depths(model=network(widths=(6, 4, 3))),
            r"levels\['deep'\]: submodel's 'blocks_0/Dense_0/bias' .* which has \[6\], got \[5\]",
        ),
        (
            lambda: depth_fl(
                without_exits(),
                {"a": HeteroFLLevel(without_exits(), np.arange(2), 1)},
                DATA.columns,
            ),
            "DepthFL's networks must have exits, as `with_exits` makes them",
        ),
        (
            lambda: depth_fl(
                from_flax_linen(MLP((3,), CLASSES), jnp.zeros((1, FEATURES))),
                {"a": HeteroFLLevel(network(1), np.arange(2), 1)},
                DATA.columns,
            ),
            r"levels\['a'\]: submodel's 'blocks_0/Dense_0/bias' must be",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)
