"""FedAvg against what it must reduce to, and against plain optax loops."""

import functools
import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_compilation import QUICK

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Cohort
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.core.schedules import constant, linear_decay
from fedcodist.models.digits import MLP, BatchNormMLP

MODEL = from_flax_linen(MLP(hidden=(5,), classes=3), jnp.zeros((1, 6)))
CAPACITY, ROWS, RATE = 9, 54, 0.3


def _fed_avg_round(method, execution=Execution()):
    """Returns (server, cohort, round) -> (server, loss per client), one program for any sizes."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def one_round(server, cohort, round=0):
        message = method.broadcast(server)
        result = for_each_client(
            lambda message, row, data, key: method.client_update(
                message, row, data, key, method.hyper
            ),
            method.reduce.prepare,
            message,
            None,
            cohort,
            jax.random.key(1),
            execution,
        )
        aggregate = method.reduce.finalize(result.total, message, jax.random.key(0))
        return method.server_update(server, aggregate, round, method.hyper), result.metrics["loss"]

    return one_round


@functools.cache
def _plain_round(batch_size, epochs=1):
    """Server SGD of rate 1: the new model is the weighted mean of the clients' models."""
    training = LocalTraining(batch_size=batch_size, epochs=epochs)
    method = fed_avg(MODEL, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    return method, _fed_avg_round(method)


@functools.cache
def _server_start():
    variables = jax.jit(MODEL.init, compiler_options=QUICK)(jax.random.key(0))
    return _plain_round(CAPACITY)[0].set_model(None, variables, reset_optimizer=True)


def _client_tables(sizes, seed=0):
    generator = np.random.default_rng(seed)
    return [
        (
            generator.normal(size=(size, 6)).astype(np.float32),
            generator.integers(0, 3, size).astype(np.int32),
        )
        for size in sizes
    ]


def _cohort_of(tables, clients=None):
    """Puts clients' examples side by side in columns of one fixed length."""
    sizes = np.array([len(labels) for _, labels in tables], np.int32)
    images, labels = np.zeros((ROWS, 6), np.float32), np.zeros(ROWS, np.int32)
    starts = (np.cumsum(sizes) - sizes).astype(np.int32)
    for start, (client_images, client_labels) in zip(starts, tables, strict=True):
        images[start : start + len(client_labels)] = client_images
        labels[start : start + len(client_labels)] = client_labels
    clients = np.arange(len(tables)) if clients is None else np.asarray(clients)
    columns = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    return Cohort(columns, jnp.asarray(clients, jnp.int32), starts, sizes, CAPACITY)


@functools.partial(jax.jit, compiler_options=QUICK)
def _mean_gradient(params, images, labels):
    def loss(params):
        batch = {"image": images, "label": labels}
        return jnp.mean(MODEL.loss(MODEL.apply(Variables(params, {}), batch)[0], batch))

    return jax.grad(loss)(params)


def _descend(params, images, labels, optimizer, steps=1):
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(_mean_gradient(params, images, labels), state, params)
        params = optax.apply_updates(params, updates)
    return params


def _assert_params_close(actual, expected, rtol=1e-4, atol=1e-6):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def test_one_client_with_a_plain_server_returns_its_trained_model():
    table = _client_tables([7])[0]
    _, one_round = _plain_round(CAPACITY, epochs=3)
    start = _server_start()
    server, _ = one_round(start, _cohort_of([table]))
    _assert_params_close(server.params, _descend(start.params, *table, optax.sgd(RATE), steps=3))


def test_loss_is_the_mean_over_steps():
    images, labels = _client_tables([7])[0]
    _, one_round = _plain_round(CAPACITY, epochs=3)
    params, losses = _server_start().params, []
    _, reported = one_round(_server_start(), _cohort_of([(images, labels)]))
    for _ in range(3):
        batch = {"image": images, "label": labels}
        losses.append(jnp.mean(MODEL.loss(MODEL.apply(Variables(params, {}), batch)[0], batch)))
        params = _descend(params, images, labels, optax.sgd(RATE))
    assert float(reported[0]) == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_identical_clients_equal_one_client():
    table = _client_tables([5])[0]
    _, one_round = _plain_round(CAPACITY)
    one, _ = one_round(_server_start(), _cohort_of([table]))
    three, _ = one_round(_server_start(), _cohort_of([table] * 3))
    _assert_params_close(three.params, one.params)


@settings(max_examples=15)
@given(st.lists(st.integers(1, CAPACITY), min_size=4, max_size=4), st.integers(0, 2**31 - 1))
def test_one_full_batch_step_is_one_centralised_step(sizes, seed):
    """The example-weighted mean of the clients' gradients is the mean gradient of all examples."""
    tables = _client_tables(sizes, seed)
    _, one_round = _plain_round(CAPACITY)
    start = _server_start()
    server, _ = one_round(start, _cohort_of(tables))
    pooled = [np.concatenate(columns) for columns in zip(*tables, strict=True)]
    gradient = _pooled_gradient(start.params, *pooled)
    expected = jax.tree.map(lambda p, g: p - RATE * g, start.params, gradient)
    _assert_params_close(server.params, expected, atol=1e-5)


def _pooled_gradient(params, images, labels):
    padding = 4 * CAPACITY - len(labels)
    return _masked_gradient(
        params,
        np.pad(images, ((0, padding), (0, 0))),
        np.pad(labels, (0, padding)),
        np.arange(4 * CAPACITY) < len(labels),
    )


@functools.partial(jax.jit, compiler_options=QUICK)
def _masked_gradient(params, images, labels, real):
    def loss(params):
        batch = {"image": images, "label": labels}
        losses = MODEL.loss(MODEL.apply(Variables(params, {}), batch)[0], batch)
        return jnp.sum(losses * real) / jnp.sum(real)

    return jax.grad(loss)(params)


@pytest.mark.parametrize("execution", [Execution("scan"), Execution("vmap", 3)], ids=str)
def test_batch_statistics_are_the_clients_own_until_their_weighted_mean_is_taken(execution):
    """Other images of one client leave every other client's statistics as they are, to the last bit."""
    model = from_flax_linen(BatchNormMLP(hidden=(5,), classes=3), jnp.zeros((1, 6)))
    training = LocalTraining(batch_size=4)
    method = fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    server = method.init(jax.random.key(0))
    tables = _client_tables([3, 9, 6])
    others = [(3.0 * tables[0][0] + 2.0, tables[0][1]), *tables[1:]]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def one_round(cohort):
        update = lambda message, row, data, key: method.client_update(
            message, row, data, key, method.hyper
        )
        message = method.broadcast(server)
        result = for_each_client(
            update,
            method.reduce.prepare,
            message,
            None,
            cohort,
            jax.random.key(1),
            execution,
            individual_results=True,
        )
        aggregate = method.reduce.finalize(result.total, message, jax.random.key(0))
        after = method.server_update(server, aggregate, 0, method.hyper)
        return result.results.mutable, method.variables(after).mutable

    own, together = one_round(_cohort_of(tables))
    changed, _ = one_round(_cohort_of(others))
    for before, after in zip(jax.tree.leaves(own), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(before[1:], after[1:])
        assert np.abs(before[0] - after[0]).max() > 1e-3
    mean = jax.tree.map(lambda leaf: np.average(leaf, axis=0, weights=[3, 9, 6]), own)
    _assert_params_close(together, mean, rtol=1e-5)


@settings(max_examples=10)
@given(
    st.permutations(range(4)),
    st.lists(st.integers(1, CAPACITY), min_size=4, max_size=4),
)
def test_order_of_clients_does_not_matter(order, sizes):
    """Batches and their order depend on a client's index, not on its place in the cohort."""
    tables = _client_tables(sizes)
    _, one_round = _plain_round(2)
    server, losses = one_round(_server_start(), _cohort_of(tables))
    shuffled, shuffled_losses = one_round(
        _server_start(), _cohort_of([tables[i] for i in order], order)
    )
    _assert_params_close(shuffled.params, server.params, atol=1e-5)
    np.testing.assert_allclose(shuffled_losses, losses[np.array(order)], rtol=1e-5)


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, CAPACITY), st.integers(0, 1000))
def test_duplicating_a_data_set_doubles_its_weight(size, other_size, seed):
    """Full batches: the client's own update stays what it was."""
    first, second = _client_tables([size, other_size], seed)
    doubled = tuple(np.concatenate([column, column]) for column in first)
    _, one_round = _plain_round(CAPACITY)
    start = _server_start()

    def pseudo_gradient(*tables):
        server, _ = one_round(start, _cohort_of(list(tables)))
        return jax.tree.map(jnp.subtract, start.params, server.params)

    # Two clients each, so that all of it is one program.
    own, other = pseudo_gradient(first, first), pseudo_gradient(second, second)
    expected = jax.tree.map(
        lambda g, h: (2 * size * g + other_size * h) / (2 * size + other_size), own, other
    )
    _assert_params_close(pseudo_gradient(doubled, second), expected, atol=1e-6)


def test_epochs_visit_every_example():
    """With a loss linear in the inputs, the sum of all steps tells which examples were seen."""
    model = MODEL._replace(
        init=lambda key: Variables({"sum": jnp.zeros(6)}, {}),
        apply=lambda variables, batch, **_: (batch["image"] * variables.params["sum"], {}),
        loss=lambda outputs, batch: jnp.sum(outputs, axis=-1),
    )
    training = LocalTraining(batch_size=1, epochs=2)
    method = fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(1.0, 1.0))
    table = _client_tables([7])[0]
    server, _ = _fed_avg_round(method)(method.init(jax.random.key(0)), _cohort_of([table]))
    np.testing.assert_allclose(server.params["sum"], -2 * table[0].sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("client", "server"),
    [
        pytest.param(
            *(functools.partial(optax.sgd, momentum=0.9), optax.adamw), marks=pytest.mark.slow
        ),
        (lambda rate: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate)), optax.yogi),
        pytest.param(
            *(
                optax.adamw,
                lambda rate: optax.chain(optax.clip(0.01), optax.sgd(rate, momentum=0.5)),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["momentum, adamw", "clipped adam, yogi", "adamw, clipped momentum"],
)
def test_any_optimizer_as_a_plain_loop_would_use_it(client, server):
    method = fed_avg(
        MODEL,
        LocalTraining(client, batch_size=CAPACITY, epochs=3),
        server,
        schedule=linear_decay(4),
        hyper=FedAvgHyper(0.05, 0.1),
    )
    tables = _client_tables([4, 8])
    one_round = _fed_avg_round(method)
    state = method.set_model(None, Variables(_server_start().params, {}), reset_optimizer=True)
    params, server_state = state.params, server(0.0).init(state.params)
    for round in range(2):
        state, _ = one_round(state, _cohort_of(tables), round)
        trained = [_descend(params, *table, client(0.05), steps=3) for table in tables]
        gradient = jax.tree.map(lambda p, a, b: p - (4 * a + 8 * b) / 12, params, *trained)
        updates, server_state = server(0.1 * (1 - round / 4)).update(gradient, server_state, params)
        params = optax.apply_updates(params, updates)
    _assert_params_close(state.params, params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("total", [1, 3, 7])
def test_linear_decay_ends_one_step_before_zero(total):
    rates = [linear_decay(total)(0.5, round) for round in range(total + 1)]
    np.testing.assert_allclose(rates, 0.5 * (1 - np.arange(total + 1) / total), rtol=1e-6)
    assert rates[0] == 0.5
    assert rates[-1] == linear_decay(total)(0.5, total + 3) == 0
    assert all(before > after for before, after in itertools.pairwise(rates))
    assert constant(0.5, total) == 0.5


def test_optimizers_must_be_functions_of_the_learning_rate():
    with pytest.raises(TypeError, match="server_optimizer must be a function of the learning rate"):
        fed_avg(MODEL, server_optimizer=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"training\.optimizer must be a function"):
        fed_avg(MODEL, LocalTraining(optimizer=optax.adam(0.1)))
    warmup = lambda rate: optax.warmup_cosine_decay_schedule(0.0, rate, 2, 8)
    with pytest.raises(TypeError, match=r"^training\.optimizer must be .*: the rate is traced"):
        fed_avg(MODEL, LocalTraining(optimizer=lambda rate: optax.sgd(warmup(rate))))
    scaled = lambda rate: optax.sgd(lambda step: rate * warmup(1.0)(step))
    fed_avg(MODEL, LocalTraining(optimizer=scaled))


def test_a_server_optimizer_may_not_keep_its_learning_rate():
    """Otherwise the rate stays at 0, with which its state began, and the model does not move."""
    method = fed_avg(MODEL, server_optimizer=optax.inject_hyperparams(optax.sgd))
    with pytest.raises(
        ValueError, match="server_optimizer must not keep its learning rate"
    ) as found:
        method.init(jax.random.key(0))
    assert "\n" not in str(found.value)
    # A client makes a new optimizer each time it trains.
    fed_avg(MODEL, LocalTraining(optax.inject_hyperparams(optax.sgd))).init(jax.random.key(0))


def test_counters_in_mutable_state_stay_integers():
    """Haiku's own batch normalisation counts its steps, for its debiased averages."""

    def network(images, is_training):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(images), is_training)

    model = from_haiku(network, jnp.zeros((1, 6)))
    training = LocalTraining(batch_size=3)
    method = fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    server = first = method.init(jax.random.key(0))
    one_round = _fed_avg_round(method)
    for round in range(2):
        # 1, 3 and 3 steps more, weighted by examples: (3 x 1 + 9 x 3 + 9 x 3) / 21 = 2.7, rounded.
        server, _ = one_round(server, _cohort_of(_client_tables((3, 9, 9))), round)
    of = lambda tree: {jax.tree_util.keystr(path): leaf for path, leaf in _paths(tree)}
    before, after = of(first.mutable), of(server.mutable)
    assert {name: leaf.dtype for name, leaf in after.items()} == {
        name: leaf.dtype for name, leaf in before.items()
    }
    counters = {name: int(leaf) for name, leaf in after.items() if "counter" in name}
    assert set(counters.values()) == {6}
    assert len(counters) == 2


def _paths(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]
