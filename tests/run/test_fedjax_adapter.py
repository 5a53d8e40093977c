"""A method as a FedJAX algorithm equals one round of it; what FedJAX cannot hold is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick_compilation import QUICK

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.models.digits import MLP
from fedcodist.privacy.private import private
from fedcodist.privacy.secure_sum import secure_sum
from fedcodist.run.fedjax_adapter import as_fedjax

MODEL = from_flax_linen(MLP(hidden=(5,), classes=3), np.zeros((1, 6), np.float32))
METHOD = fed_avg(
    MODEL, LocalTraining(batch_size=10, epochs=2), optax.sgd, hyper=FedAvgHyper(0.3, 0.5)
)


@functools.cache
def _initial_server():
    return jax.jit(METHOD.init, compiler_options=QUICK)(jax.random.key(0))


def _named_clients():
    generator = np.random.default_rng(0)
    return [
        (
            name,
            {
                "image": generator.normal(size=(size, 6)).astype(np.float32),
                "label": generator.integers(0, 3, size).astype(np.int32),
            },
            jax.random.key(index),
        )
        for index, (name, size) in enumerate({"ann": 4, "bob": 9, "cy": 1}.items())
    ]


@functools.partial(jax.jit, compiler_options=QUICK)
def _loss_and_gradient(params, columns):
    def loss(params):
        return jnp.mean(MODEL.loss(MODEL.apply(Variables(params, {}), columns)[0], columns))

    return jax.value_and_grad(loss)(params)


def _plain_loop(server, clients, client_rate, server_rate):
    """Full batches, so that the order does not matter."""
    update = jax.tree.map(np.zeros_like, server.params)
    losses, examples = {}, 0
    for name, columns, _ in clients:
        params, losses[name] = server.params, []
        for _ in range(2):
            value, gradient = _loss_and_gradient(params, columns)
            params = jax.tree.map(lambda p, g: p - client_rate * g, params, gradient)
            losses[name].append(float(value))
        size = len(columns["label"])
        update = jax.tree.map(lambda u, p, q: u + size * (p - q), update, server.params, params)
        examples += size
    params = jax.tree.map(lambda p, u: p - server_rate * u / examples, server.params, update)
    return params, {name: np.mean(values) for name, values in losses.items()}


@pytest.mark.parametrize(
    "execution",
    [pytest.param(Execution(), marks=pytest.mark.slow), Execution("vmap", 2)],
    ids=["scan", "vmap"],
)
def test_apply_is_one_round(execution):
    _assert_apply_is_one_round(execution)


@pytest.mark.slow
def test_apply_is_one_round_eagerly():
    _assert_apply_is_one_round(Execution("eager"))


def _assert_apply_is_one_round(execution):
    algorithm = as_fedjax(METHOD, execution=execution)
    clients = _named_clients()
    server, diagnostics = algorithm.apply(_initial_server(), clients)
    expected, losses = _plain_loop(_initial_server(), clients, 0.3, 0.5)
    for got, want in zip(jax.tree.leaves(server.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert list(diagnostics) == ["ann", "bob", "cy"]
    for name, loss in losses.items():
        assert set(diagnostics[name]) == {"loss", "num_steps", "examples"}
        assert diagnostics[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert diagnostics[name]["num_steps"] == 2


def test_apply_takes_other_rates_and_leaves_the_server_state_alone():
    clients = _named_clients()[:1]
    before = jax.tree.map(np.array, _initial_server())
    algorithm = as_fedjax(METHOD, hyper=FedAvgHyper(0.1, 1.0), execution=Execution())
    server, _ = algorithm.apply(_initial_server(), clients)
    expected, _ = _plain_loop(_initial_server(), clients, 0.1, 1.0)
    for got, want in zip(jax.tree.leaves(server.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, _initial_server(), before)


def test_a_loaded_state_becomes_jax_arrays():
    """A method may index its parameters with what it draws, which NumPy's arrays cannot do."""
    seen = []
    method = METHOD._replace(
        broadcast=lambda server: seen.append(server) or METHOD.broadcast(server)
    )
    loaded = jax.tree.map(np.asarray, _initial_server())
    as_fedjax(method, execution=Execution("eager")).apply(loaded, _named_clients()[2:])
    leaves = [leaf for server in seen for leaf in jax.tree.leaves(server)]
    assert leaves and all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_every_client_has_the_key_it_came_with():
    """With batches of one example the order matters, and the order comes from the key."""
    method = fed_avg(MODEL, LocalTraining(batch_size=1), optax.sgd, hyper=FedAvgHyper(0.5, 1.0))
    apply = as_fedjax(method, execution=Execution()).apply
    _, columns, _ = _named_clients()[1]
    key, other = jax.random.key(5), jax.random.key(6)

    def losses(*keys):
        _, diagnostics = apply(
            _initial_server(), [(index, columns, key) for index, key in enumerate(keys)]
        )
        return [diagnostics[index]["loss"] for index in range(len(keys))]

    same, different = losses(key, key), losses(key, other)
    assert same[0] == pytest.approx(same[1], rel=1e-6)
    assert different[0] == pytest.approx(same[0], rel=1e-6)
    assert abs(different[0] - different[1]) > 1e-5


def test_a_client_without_examples_takes_nobodys_key():
    """It begins where the next one does."""
    method = fed_avg(MODEL, LocalTraining(batch_size=1), optax.sgd, hyper=FedAvgHyper(0.5, 1.0))
    apply = as_fedjax(method, execution=Execution()).apply
    (_, columns, _), nothing = _named_clients()[1], jax.random.key(6)
    empty = {name: column[:0] for name, column in columns.items()}
    own = ("own", columns, jax.random.key(5))
    _, alone = apply(_initial_server(), [own])
    _, beside = apply(_initial_server(), [("none", empty, nothing), own])
    assert beside["own"]["loss"] == pytest.approx(alone["own"]["loss"], rel=1e-6)


def test_clients_who_keep_something_are_refused():
    """FedJAX has no client states: SCAFFOLD's variates would be lost after each round."""
    with pytest.raises(ValueError, match="method must be one whose clients keep nothing") as error:
        as_fedjax(scaffold(MODEL, 3, LocalTraining(batch_size=10)))
    assert "\n" not in str(error.value)


def test_apply_needs_clients():
    with pytest.raises(ValueError, match="clients must hold at least one"):
        as_fedjax(METHOD).apply(_initial_server(), [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label": np.zeros(8, np.int32)},
            r"client 'bob': columns must have equal numbers of examples, got .*8",
        ),
        (
            {"other": np.zeros(9)},
            r"client 'bob' has columns \['image', 'label', 'other'\], client 'ann' \['image', 'lab",
        ),
        (
            {"image": np.zeros((9, 5), np.float32)},
            r"client 'bob': column 'image' is float32 \[5\] per",
        ),
        (
            {"label": np.zeros(9, np.uint8)},
            r"client 'bob': column 'label' is uint8 \[\] per example",
        ),
        (
            {"label": np.array(["cat"] * 9)},
            r"client 'bob': columns must have columns of numbers, 'lab",
        ),
        (
            {"label": np.int32(0)},
            r"client 'bob': column 'label' must have examples .*, got a scalar",
        ),
        ({}, r"clients must have different ids, got 'bob' twice"),
    ],
    ids=["lengths", "columns", "shapes", "dtypes", "text", "scalar", "ids"],
)
def test_clients_that_do_not_fit_are_refused_by_name(change, message):
    """Labels of another length were those of the next client's examples."""
    ann, (name, columns, key), _ = _named_clients()
    clients = [ann, (name, columns | change, key), (name, columns, key)]
    with pytest.raises(ValueError, match=message) as error:
        as_fedjax(METHOD).apply(_initial_server(), clients)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, r"client 'bob' must have a key of jax\.random\.key, got 5"),
        (np.zeros(2, np.int32), r"client 'bob' must have a key of jax\.random\.key, got "),
        (
            jax.random.PRNGKey(0),
            r"clients must have keys of one kind, got key<fry> for 'ann' and uint32",
        ),
    ],
    ids=["number", "integers", "another kind"],
)
def test_keys_that_do_not_fit_are_refused_by_name(key, message):
    ann, (name, columns, _), _ = _named_clients()
    with pytest.raises(ValueError, match=message):
        as_fedjax(METHOD).apply(_initial_server(), [ann, (name, columns, key)])


@pytest.mark.parametrize("round", [-1, 2.5])
def test_a_round_is_a_whole_number(round):
    with pytest.raises((TypeError, ValueError), match=r"^round must be "):
        as_fedjax(METHOD).apply(_initial_server(), _named_clients(), round=round)


def test_clients_without_a_key_are_refused():
    with pytest.raises(ValueError, match=r"clients must hold \(client_id, columns, key\), got "):
        as_fedjax(METHOD).apply(_initial_server(), [client[:2] for client in _named_clients()])


def test_diagnostics_may_be_vectors():
    def update(message, client_state, data, key, hyper):
        zeros = jax.tree.map(jnp.zeros_like, message.params)
        metrics = {"num_steps": 1, "sizes": jnp.ones(2) * data.size}
        return ClientResult(zeros, message.mutable, 1.0, client_state, metrics)

    algorithm = as_fedjax(METHOD._replace(client_update=update))
    _, diagnostics = algorithm.apply(_initial_server(), _named_clients()[:2])
    assert diagnostics == {
        name: {"num_steps": 1, "sizes": [size, size]} for name, size in (("ann", 4), ("bob", 9))
    }


def test_every_round_has_noise_of_its_own():
    """Differences of two sums with the same noise would show the clients' updates."""
    algorithm = as_fedjax(private(METHOD, clip=1.0, noise_multiplier=1.0))
    server = jax.jit(algorithm.init, compiler_options=QUICK)(jax.random.key(0))
    first, again, second = (
        algorithm.apply(server, _named_clients()[:2], round=round)[0].inner.params
        for round in (0, 0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, second)
    assert min(jax.tree.leaves(apart)) > 1e-3


@pytest.mark.parametrize(
    "method",
    [private(METHOD, clip=1.0, noise_multiplier=1.0), secure_sum(METHOD, 3, 1.0, 100.0)],
    ids=["private", "secure sum"],
)
def test_noise_and_masks_need_the_round(method):
    """FedJAX's loop gives none, and two rounds with the same noise would show the updates."""
    algorithm = as_fedjax(method)
    server = jax.jit(algorithm.init, compiler_options=QUICK)(jax.random.key(0))
    with pytest.raises(ValueError, match=r"^round must be given for a private method") as error:
        algorithm.apply(server, _named_clients())
    assert "\n" not in str(error.value)
