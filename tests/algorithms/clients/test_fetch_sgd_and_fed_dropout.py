"""FetchSGD and Federated Dropout against plain NumPy in float64, and what they must reduce to."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from softmax_regression import random_clients, softmax_regression
from text_examples import ENCODER, SENTENCES

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_dropout import fed_dropout, mean_of_holders
from fedcodist.algorithms.clients.fetch_sgd import FetchSGDHyper, fetch_sgd
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.count_sketch import sketched
from fedcodist.compression.serialisation import header_bytes
from fedcodist.compression.svd import svd
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.core.trees import named_leaves, parameter_count
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.cnn import CNN
from fedcodist.models.digits import MLP, BatchNormMLP
from fedcodist.models.submodels import Axis, chain_units, counts_of, gathered, places_of, scattered
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.fedjax_adapter import as_fedjax
from fedcodist.run.sources import resident_data
from fedcodist.text.encoder_units import encoder_units, narrowed
from fedcodist.text.sentence_classifier import sentence_classifier

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, FEATURES, CLASSES, ROUNDS = (3, 5, 2, 4), 6, 5, 4
RATE, EPOCHS = 0.3, 2
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
NUMBERS = FEATURES * CLASSES


MODEL = softmax_regression(FEATURES, CLASSES)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


def run(method, cohort_size=3, rounds=ROUNDS):
    """(parameters after the last round, cohorts, the run's outcome)."""
    pool = Pool(method, np.arange(len(SIZES)), cohort_size)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    experiment = Experiment(
        algorithm, resident_data(federated(), {}), {"train": federated()}, rounds, evaluate_every=1
    )
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    return jax.tree.map(lambda leaf: leaf[0], trained.variables["pool"].params), cohorts, trained


def bytes_of(outcome, way):
    return [r[f"client_bytes_{way}"] for r in outcome.records if r["split"] == "clients"]


def examples(client):
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    return (
        federated().columns["image"][rows].astype(np.float64),
        federated().columns["label"][rows],
    )


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def gradient(w, client):
    images, labels = examples(client)
    return images.T @ (softmax(images @ w) - np.eye(CLASSES)[labels]) / len(labels)


def start():
    return np.asarray(MODEL.init(None).params["w"], np.float64)


# FetchSGD


@functools.cache
def unit_sketches(rows, columns):
    """The matrix of the linear map, [coordinates, rows, columns], from sketches of unit vectors."""
    each = [sketched(unit, rows, columns).table for unit in jnp.eye(NUMBERS)]
    return np.stack([np.asarray(table, np.float64) for table in each])


def plain_fetch_sgd(cohorts, rows, columns, count, rho, rate_in_error, rates):
    w, units = start(), unit_sketches(rows, columns)
    momentum, error = np.zeros((rows, columns)), np.zeros((rows, columns))
    for round, cohort in enumerate(cohorts):
        weights = [SIZES[c] for c in cohort]
        mean = np.average([gradient(w, c) for c in cohort], axis=0, weights=weights)
        momentum = rho * momentum + np.tensordot(mean.reshape(-1), units, 1)
        error = error + (rates[round] if rate_in_error else 1) * momentum
        said = np.median(np.einsum("nrc,rc->nr", units, error), axis=1)
        chosen = np.argsort(-np.abs(said), kind="stable")[:count]
        delta = np.zeros(NUMBERS)
        delta[chosen] = said[chosen]
        w = w - (1 if rate_in_error else rates[round]) * delta.reshape(w.shape)
        hit = np.abs(units[chosen]).sum(axis=0) > 0
        momentum[hit] = error[hit] = 0
    return w


@pytest.mark.parametrize("rate_in_error", [False, True])
def test_fetch_sgd_is_a_plain_loop(rate_in_error):
    """With collisions, momentum, a falling rate and three of four clients a round."""
    schedule = lambda rate, round: rate * (1 - 0.2 * round)
    rates = [RATE * (1 - 0.2 * round) for round in range(ROUNDS)]
    sizes = dict(sketch_rows=3, sketch_columns=12, k=6)
    method = fetch_sgd(
        MODEL,
        TRAINING,
        **sizes,
        rate_in_error=rate_in_error,
        schedule=schedule,
        hyper=FetchSGDHyper(RATE, 0.9),
    )
    found, cohorts, outcome = run(method)
    arguments = (cohorts, *sizes.values(), 0.9)
    expected = plain_fetch_sgd(*arguments, rate_in_error, rates)
    np.testing.assert_allclose(found["w"], expected, atol=1e-5)
    assert np.abs(expected - plain_fetch_sgd(*arguments, not rate_in_error, rates)).max() > 1e-3
    assert bytes_of(outcome, "up") == [4 * (3 * 12 + 1)] * ROUNDS
    down = bytes_of(outcome, "down")
    assert down[0] == 4 * NUMBERS and all(8 * 6 <= each <= 4 * NUMBERS for each in down)


@pytest.mark.slow
def test_where_the_rate_is_applied_does_not_matter_if_it_is_constant():
    hyper = FetchSGDHyper(RATE, 0.9)
    methods = [fetch_sgd(MODEL, TRAINING, 3, 12, 6, place, hyper=hyper) for place in (False, True)]
    one, other = (run(method)[0]["w"] for method in methods)
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_large_table_and_all_entries_are_sgd(rho):
    """With momentum too: every coordinate is applied, so every cell is emptied in every round."""
    method = fetch_sgd(MODEL, TRAINING, 5, 50_000, NUMBERS, hyper=FetchSGDHyper(RATE, rho))
    found, cohorts, _ = run(method)
    w = start()
    for cohort in cohorts:
        weights = [SIZES[c] for c in cohort]
        w = w - RATE * np.average([gradient(w, c) for c in cohort], axis=0, weights=weights)
    np.testing.assert_allclose(found["w"], w, atol=1e-5)


def test_a_gradient_of_examples_that_are_drawn_in_every_round():
    def update_of(count):
        method = fetch_sgd(MODEL, TRAINING, 3, 12, 6, examples_per_round=count)
        message = method.broadcast(method.init(jax.random.key(0)))
        row = method.init_client_state()
        return jax.jit(lambda data, k: method.client_update(message, row, data, k, method.hyper))

    update = update_of(2)
    columns = {name: jnp.asarray(column) for name, column in federated().columns.items()}
    starts = np.cumsum((0, *SIZES))
    of = lambda client: ClientData(columns, starts[client], SIZES[client], 5, 5, True)
    images, labels = examples(1)
    w = start()
    each = images[:, :, None] * (softmax(images @ w) - np.eye(CLASSES)[labels])[:, None]
    pairs = {pair: each[list(pair)].mean(0) for pair in itertools.combinations(range(SIZES[1]), 2)}
    tables = {p: np.tensordot(g.reshape(-1), unit_sketches(3, 12), 1) for p, g in pairs.items()}
    seen = set()
    for number in range(30):
        result = update(of(1), jax.random.key(number))
        (pair,) = (p for p, t in tables.items() if np.allclose(result.update, t, atol=1e-5))
        seen.add(pair)
        assert result.weight == result.metrics["examples"] == 2
    assert len(seen) > 7  # of ten
    # A client of two examples has no more of them.
    result = update_of(4)(of(2), jax.random.key(0))
    whole = np.tensordot(gradient(w, 2).reshape(-1), unit_sketches(3, 12), 1)
    np.testing.assert_allclose(result.update, whole, atol=1e-5)
    assert result.weight == result.metrics["examples"] == SIZES[2]


@pytest.mark.slow
def test_everybody_downloads_what_changed():
    _, _, outcome = run(fetch_sgd(MODEL, TRAINING, 3, 12, 6), len(SIZES))
    assert bytes_of(outcome, "down") == [4 * NUMBERS, 48, 48, 48]


def test_float64_parameters_change_only_where_entries_were_sent():
    with jax.enable_x64(True):
        method = fetch_sgd(MODEL, TRAINING, 3, 12, 6)
        weights = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
        server = method.init(jax.random.key(0))
        server = server._replace(inner=server.inner._replace(params={"w": jnp.asarray(weights)}))
        table = jnp.asarray(np.random.default_rng(1).normal(size=(3, 12)), jnp.float32)
        aggregate = Aggregate(table, {}, jnp.float32(1), (), {})
        after = method.server_update(server, aggregate, jnp.int32(0), method.hyper)
        after = after.inner.params["w"]
        assert after.dtype == jnp.float64 and np.sum(np.asarray(after) != weights) == 6


# Federated Dropout


def mlp(hidden):
    return from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES)))


LAYERS = ("Dense_0", "Dense_1", "Dense_2")
HIDDEN = (6, 5)


def dropout(kept=(3, 2), server=optax.sgd):
    return fed_dropout(mlp(HIDDEN), mlp(kept), LAYERS, TRAINING, server, hyper=HYPER)


HYPER = FedAvgHyper(RATE, 1.0)


@pytest.mark.slow
def test_keeping_everything_is_fed_avg():
    found, _, outcome = run(dropout(HIDDEN))
    plain, _, other = run(fed_avg(mlp(HIDDEN), TRAINING, optax.sgd, hyper=HYPER))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, plain)
    told, expected = (each.summary["models"]["pool"] for each in (outcome, other))
    assert told == expected


def local_mlp(params, client):
    """A small MLP's parameters after the client's epochs, in float64; layers by their order."""
    images, labels = examples(client)
    params = [(np.array(k), np.array(b)) for k, b in params]
    for _ in range(EPOCHS):
        inputs, outputs = [images], images
        for index, (kernel, bias) in enumerate(params):
            outputs = outputs @ kernel + bias
            if index < len(params) - 1:
                outputs = np.maximum(outputs, 0)
                inputs.append(outputs)
        back = (softmax(outputs) - np.eye(CLASSES)[labels]) / len(labels)
        for index in reversed(range(len(params))):
            kernel, bias = params[index]
            step = (inputs[index].T @ back, back.sum(0))
            back = (back @ kernel.T) * (inputs[index] > 0)
            params[index] = (kernel - RATE * step[0], bias - RATE * step[1])
    return params


def test_a_plain_loop_over_the_clients_own_networks():
    """Two rounds; which units a client had is read off where its update is not zero."""
    method = dropout()

    @jax.jit
    def update(server, data, key):
        message = method.broadcast(server)
        return method.client_update(message, None, data, key, method.hyper).extra

    algorithm = as_fedjax(method, execution=Execution())
    server = method.init(jax.random.key(3))
    draws = []
    for round in range(2):
        before = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), server.params)
        total = jax.tree.map(np.zeros_like, before)
        held = jax.tree.map(np.zeros_like, before)
        clients = []
        for client in range(len(SIZES)):
            images, labels = examples(client)
            columns = {"image": images.astype(np.float32), "label": labels}
            key = jax.random.fold_in(jax.random.key(9 + round), client)
            clients.append((client, columns, key))
            kept = units_of(update, server, columns, key)
            draws.append(kept)
            columns_of = [np.arange(FEATURES), *kept, np.arange(CLASSES)]
            own = [
                (before[name]["kernel"][np.ix_(rows, units)], before[name]["bias"][units])
                for name, rows, units in zip(LAYERS, columns_of[:-1], columns_of[1:], strict=True)
            ]
            after = local_mlp(own, client)
            for name, rows, units, old, new in zip(
                LAYERS, columns_of[:-1], columns_of[1:], own, after, strict=True
            ):
                for part, at in (("kernel", np.ix_(rows, units)), ("bias", units)):
                    index = 0 if part == "kernel" else 1
                    total[name][part][at] += SIZES[client] * (old[index] - new[index])
                    held[name][part][at] += SIZES[client]
        server, _ = algorithm.apply(server, clients, round)
        expected = jax.tree.map(
            lambda w, change, by: w - change / np.where(by > 0, by, 1), before, total, held
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), server.params, expected
        )
    drawn = [tuple(map(tuple, kept)) for kept in draws]
    assert len(set(drawn)) > 2  # clients' networks differ
    first, second = drawn[: len(SIZES)], drawn[len(SIZES) :]
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 1  # and from round to round


def units_of(update, server, columns, key):
    """The hidden units of a client's network, as it reports them in `extra`."""
    size = jnp.int32(len(columns["label"]))
    data = ClientData(
        jax.tree.map(jnp.asarray, columns), jnp.int32(0), size, size, int(size), False
    )
    held = update(server, data, key)
    return [np.flatnonzero(np.asarray(held[name]["bias"])) for name in LAYERS[:-1]]


@pytest.mark.slow
def test_bytes_are_those_of_the_small_network():
    _, _, outcome = run(dropout())
    numbers = (FEATURES + 1) * 3 + (3 + 1) * 2 + (2 + 1) * CLASSES
    told = outcome.summary["models"]["pool"]
    assert told["bytes_down_per_participation"] == 4 * numbers
    assert told["bytes_up_per_participation"] == 4 * numbers + 4
    # And what a file of the network takes behind its header.
    network = jax.tree.map(np.asarray, mlp((3, 2)).init(jax.random.key(0)).params)
    content = safetensors.numpy.save(named_leaves(network))
    assert len(content) - header_bytes(content) == told["bytes_down_per_participation"]


@pytest.mark.slow
def test_gathering_and_scattering_are_inverse_behind_a_convolution_too():
    """A dense layer's inputs are positions x filters there."""
    networks = [
        from_flax_linen(CNN(filters, hidden, classes=4, input_size=24), jnp.zeros((1, 24, 24, 3)))
        for filters, hidden in (((4, 3, 4), (6, 5)), ((2, 2, 3), (4, 2)))
    ]
    whole, small = (jax.eval_shape(m.init, jax.random.key(0)).params for m in networks)
    layers = ("conv1", "conv2", "conv3", "dense1", "dense2", "output")
    draws = np.random.default_rng(0)
    kept = {
        layer: np.sort(
            draws.choice(whole[layer]["bias"].size, small[layer]["bias"].size, replace=False)
        )
        for layer in layers[:-1]
    }
    units = chain_units(whole, layers)
    counts = counts_of(whole, small, units)
    assert counts == {layer: (whole[layer]["bias"].size, own.size) for layer, own in kept.items()}
    places = places_of(kept, whole, units)
    params = networks[0].init(jax.random.key(1)).params
    cut = gathered(params, places)
    assert jax.tree.map(jnp.shape, cut) == jax.tree.map(lambda leaf: leaf.shape, small)
    again = gathered(scattered(cut, places, whole), places)
    jax.tree.map(np.testing.assert_array_equal, again, cut)
    # The small network computes what the whole one computes with its other units set to zero.
    held = scattered(jax.tree.map(jnp.ones_like, cut), places, whole)
    silent = jax.tree.map(jnp.multiply, params, held)
    batch = {"image": jnp.asarray(draws.normal(size=(2, 24, 24, 3)), jnp.float32)}
    outputs = [
        model.apply(Variables(values, {}), batch)[0]
        for model, values in zip(networks, (silent, cut), strict=True)
    ]
    np.testing.assert_allclose(*outputs, atol=1e-4)
    fed_dropout(*networks, layers)


def test_an_axis_runs_over_units_in_blocks_of_numbers():
    """A loop over outer blocks, units within them and parameters within these."""
    axis = Axis("units", outer=3, inner=2)
    leaf = np.arange(3 * 5 * 2 * 4).reshape(30, 4)
    kept = np.array([0, 3])
    places = places_of({"units": kept}, {"w": leaf}, {"w": (axis, None)})
    rows = [10 * block + 2 * unit + n for block in range(3) for unit in kept for n in range(2)]
    np.testing.assert_array_equal(gathered({"w": jnp.asarray(leaf)}, places)["w"], leaf[rows])


@pytest.mark.slow
def test_an_encoders_clients_train_fewer_heads_and_neurons():
    """All clients have the embeddings, the normalisations and the layers after the encoder."""
    make = lambda encoder: sentence_classifier(
        encoder.clone(dropout=0.0), 3, queries=5, dropout=0.0
    )
    model, small = make(ENCODER), make(narrowed(ENCODER, 0.5))
    shapes = jax.eval_shape(model.init, jax.random.key(0)).params
    units = encoder_units(shapes, ENCODER.heads)
    method = fed_dropout(model, small, units, LocalTraining(batch_size=3), optax.sgd, hyper=HYPER)
    data = FederatedData.from_arrays(SENTENCES, offsets=[0, 1, 2, 3])
    pool = Pool(method, np.arange(3), 3)
    algorithm = independent_pools({"pool": pool}, SENTENCES)
    experiment = Experiment(algorithm, resident_data(data, {}), {"train": data}, 1)
    outcome = run_experiment(experiment, show_progress=False)
    found = jax.tree.map(lambda leaf: leaf[0], outcome.variables["pool"].params)
    numbers = parameter_count(jax.eval_shape(small.init, jax.random.key(0)).params)
    told = outcome.summary["models"]["pool"]
    assert told["bytes_down_per_participation"] == 4 * numbers
    assert told["bytes_up_per_participation"] == 4 * numbers + 4
    assert numbers < parameter_count(shapes)
    # These start from 0 or 1.
    moved = {name: np.isin(leaf, (0, 1), invert=True) for name, leaf in named_leaves(found).items()}
    assert moved["classes/bias"].all() and moved["encoder/layer0/norm/scale"].any()
    # Either all parameters of a head move, or none.
    heads = moved["encoder/layer1/value/bias"].reshape(2, 4)
    assert (heads.all(axis=1) == heads.any(axis=1)).all() and heads.any()
    # Two clients with half of the neurons each; the third one's sentence is empty.
    assert 16 <= moved["encoder/layer0/inner/bias"].sum() < 32


def test_what_nobody_had_stays():
    reduce = mean_of_holders()
    result = lambda update, held, weight: ClientResult(
        {"w": jnp.array(update)}, {}, jnp.float32(weight), None, {}, {"w": jnp.array(held)}
    )
    parts = [
        reduce.prepare(result([3.0, 0.0, 0.0], [1.0, 0.0, 0.0], 2), None),
        reduce.prepare(result([6.0, 5.0, 0.0], [1.0, 1.0, 0.0], 4), None),
    ]
    total = jax.tree.map(jnp.add, *parts)
    mean = reduce.finalize(total, Variables({}, {}), None).pseudo_gradient["w"]
    np.testing.assert_allclose(mean, [5.0, 5.0, 0.0])


# Bad input


def batch_norm():
    return from_flax_linen(BatchNormMLP((3,), CLASSES), jnp.zeros((1, FEATURES)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fetch_sgd(MODEL, sketch_rows=0), "sketch_rows must be at least 1, got 0"),
        (lambda: fetch_sgd(MODEL, k=0), "k must be at least 1, got 0"),
        (
            lambda: fetch_sgd(MODEL, examples_per_round=0),
            "examples_per_round must be at least 1, got 0",
        ),
        (
            lambda: fetch_sgd(MODEL, hyper=FetchSGDHyper(0.1, 1.5)),
            "hyper.momentum must be at least 0 and at most 1, got 1.5",
        ),
        (lambda: fetch_sgd(batch_norm()), "model must have no mutable state"),
        (
            lambda: fetch_sgd(mlp((6,)), hyper=FetchSGDHyper(-1.0)),
            "hyper.learning_rate must be at least 0, got -1",
        ),
        (lambda: fetch_sgd(mlp((6,)), seed=-1), "seed must be at least 0, got -1"),
        (
            lambda: fed_dropout(batch_norm(), batch_norm(), LAYERS),
            "model must have no mutable state",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((7, 5)), LAYERS),
            "submodel's 'Dense_0' must have 1 to 6 units, got 7",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((3,)), LAYERS),
            r"submodel must be a chain of the layers \[.*\], each a kernel and a bias; 'Dense_2/bias'",
        ),
        (
            lambda: fed_dropout(mlp((6,)), mlp((3,)), "Dense_0"),
            "layers must be a list, got 'Dense_0'",
        ),
        (
            lambda: fed_dropout(mlp((6,)), mlp((3,)), ("Dens_0", "Dense_1")),
            r"model must be a chain of the layers \['Dens_0', 'Dense_1'\], .*; 'Dens_0/bias' does",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((3, 2)), ("Dense_1", "Dense_0", "Dense_2")),
            "model's 'Dense_0' must follow 'Dense_1', but has other inputs",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((3, 2)), {"Dense_9/bias": (Axis("a"),)}),
            "units must be of the model's parameters, got 'Dense_9/bias'",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((3,)), {}),
            "submodel must have the model's parameters, but 'Dense_2/bias' does not fit",
        ),
        (
            lambda: fed_dropout(mlp((6, 5)), mlp((3, 5)), {"Dense_0/bias": (Axis("a"),)}),
            r"submodel's 'Dense_0/kernel' must be the model's \[6, 6\] with fewer units, got \[6, 3\]",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "make", [lambda: fetch_sgd(MODEL, sketch_rows=3, sketch_columns=9), dropout]
)
def test_links_that_are_compressed_already_are_refused(make):
    pool = Pool(compressed(make(), ROUNDS, svd()), np.arange(len(SIZES)), 2)
    with pytest.raises(ValueError, match=r"^method must not be one that sends less than its model"):
        independent_pools({"pool": pool}, federated().columns)


def test_a_table_cannot_be_merged():
    pools = {
        name: Pool(fetch_sgd(MODEL, sketch_rows=3, sketch_columns=9), np.arange(len(SIZES)), 2)
        for name in "ab"
    }
    algorithm = merged_codistillation(pools, federated().columns, 9, ROUNDS)
    images = {"unlabelled": {"image": federated().columns["image"][:9]}}
    experiment = Experiment(
        algorithm, resident_data(federated(), images), {"train": federated()}, ROUNDS
    )
    with pytest.raises(ValueError, match=r"^pseudo_gradient must be like the parameters"):
        run_experiment(experiment, show_progress=False)
