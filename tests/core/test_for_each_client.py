"""Every way of executing a cohort gives the same round, in the cohort's order, and loses nothing."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import client_states
from fedcodist.core.aggregation import ClientResult, weighted_mean
from fedcodist.core.for_each_client import Execution, dealing_order, for_each_client
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Cohort, Round
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.models.digits import MLP, BatchNormMLP
from fedcodist.run.sources import resident_data

AXIS = "clients"
FEATURES, CLASSES, ROUNDS = 6, 3, 2
SIZES = (3, 11, 1, 7, 4, 9, 2, 5, 8, 6, 1, 10, 4)
NUM_ROWS = sum(SIZES)
# 37 unlabelled examples in batches of 10: neither 3 nor 8 devices divide a batch.
NUM_UNLABELLED = 37

# loop, chunk, devices; None is a plain jit without a mesh.
ONE_DEVICE = [("vmap", 1, None), ("vmap", 3, None), ("vmap", 20, None)]
MESHES = [(loop, 3, devices) for devices in (2, 3, 8) for loop in ("scan", "vmap")]
MESHES += [("vmap", 1, 3), ("vmap", 20, 3)]
# The slow suite runs all combinations of algorithms and executions; a round takes seconds to compile.
FAST = [
    ("merged", "vmap", 3, 3),
    pytest.param("periodic", "vmap", 20, 8, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def compile_quickly_unless_slow(request):
    """These programs run for milliseconds and compile for seconds; the slow suite optimises."""
    before = jax.config.values["jax_disable_most_optimizations"]
    quickly = request.node.get_closest_marker("slow") is None
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def federated() -> FederatedData:
    generator = np.random.default_rng(0)
    columns = {
        "image": generator.normal(size=(NUM_ROWS, FEATURES)).astype(np.float32),
        "label": generator.integers(0, CLASSES, NUM_ROWS).astype(np.int32),
        "row": np.arange(NUM_ROWS, dtype=np.int32),
        "owner": np.repeat(np.arange(len(SIZES)), SIZES).astype(np.int32),
    }
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))


def resident():
    unlabelled = np.random.default_rng(1).normal(size=(NUM_UNLABELLED, FEATURES))
    data = resident_data(federated(), {"unlabelled": {"image": unlabelled.astype(np.float32)}})
    return jax.tree.map(jnp.asarray, data)


def over_devices(function, devices, how="shard_map"):
    """Runs `function` on `devices` devices; results [devices, ...], one entry for each device."""
    if devices is None:
        run = jax.jit(lambda *arguments: jax.tree.map(lambda x: x[None], function(*arguments)))
    elif how == "pmap":
        mapped = jax.pmap(
            lambda _, arguments: function(*arguments),
            axis_name=AXIS,
            in_axes=(0, None),
            devices=jax.devices()[:devices],
        )
        run = lambda *arguments: mapped(jnp.arange(devices), arguments)
    else:
        mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
        run = jax.jit(
            jax.shard_map(
                lambda *arguments: jax.tree.map(lambda x: x[None], function(*arguments)),
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(AXIS),
                check_vma=False,
            )
        )
    return lambda *arguments: jax.tree.map(np.asarray, run(*arguments))


def same_on_every_device(results):
    """Checks that devices hold the same values, or the same lack of a number, and returns one's."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        leaf, name = np.asarray(leaf), jax.tree_util.keystr(path)
        first = np.broadcast_to(leaf[:1], leaf.shape)
        np.testing.assert_array_equal(leaf, first, err_msg=f"devices disagree at {name}")
    return jax.tree.map(lambda leaf: leaf[0], results)


def assert_close(actual, expected, rtol=2e-4, atol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


# ------------------------------------------------------------------ whole rounds of three algorithms


def build(kind, execution, batch_norm):
    """Two overlapping pools of 7 and 5 clients; cohorts of 5 and 2 of sizes that differ."""
    example = jnp.zeros((1, FEATURES))
    make = BatchNormMLP if batch_norm else MLP
    training = LocalTraining(batch_size=4, epochs=2)

    def method(hidden):
        model = from_flax_linen(make(hidden=hidden, classes=CLASSES), example)
        return fed_avg(
            model,
            training,
            server_optimizer=lambda rate: optax.sgd(rate, momentum=0.9),
            hyper=FedAvgHyper(0.1, 0.5),
        )

    pools = {
        "small": Pool(method((4,)), np.arange(0, 7), 5),
        "large": Pool(method((5,)), np.arange(5, 13), 2),
    }
    columns = federated().columns
    if kind == "fed_avg":
        return independent_pools(pools, columns, execution)
    arguments = {
        # Noise in gradients that are zero (biases before BatchNorm) must not become steps.
        "distillation": Distillation(
            steps=3, batch_size=10, optimizer=lambda rate: optax.adam(rate, eps=1e-2)
        ),
        "teaching": {"small": TeachingHyper(learning_rate=0.01, temperature=2.0)},
        "execution": execution,
    }
    if kind == "periodic":
        return periodic_codistillation(
            pools, columns, NUM_UNLABELLED, ROUNDS, period=2, **arguments
        )
    return merged_codistillation(pools, columns, NUM_UNLABELLED, ROUNDS, **arguments)


@functools.cache
def start(batch_norm):
    """Where every execution starts, and who takes part: the same for all of them."""
    algorithm = build("merged", Execution(), batch_norm)
    root, rounds = jax.random.key(3), jnp.arange(ROUNDS)
    state = jax.jit(algorithm.init)(root)
    clients = jax.jit(jax.vmap(lambda round: algorithm.select(round, root).clients))(rounds)
    return jax.tree.map(np.asarray, (state, clients))


def rounds_of(algorithm, axis_name):
    def run(seed, data, state, clients):
        root = jax.random.key(seed)

        def one(carry, scanned):
            round, clients = scanned
            inputs = data.read(algorithm.select(round, root).replace(clients=clients))
            *carry, metrics = algorithm.round(
                *carry, Round(round, root, inputs, axis_name), algorithm.hyper
            )
            return tuple(carry), metrics

        rows = dict.fromkeys(state)
        (state, _), metrics = jax.lax.scan(one, (state, rows), (jnp.arange(ROUNDS), clients))
        return state, metrics

    return run


@functools.cache
def rounds_by_scan(kind, batch_norm):
    run = over_devices(rounds_of(build(kind, Execution("scan"), batch_norm), None), None)
    return same_on_every_device(run(3, resident(), *start(batch_norm)))


def check_rounds(kind, batch_norm, loop, chunk, devices, how="shard_map"):
    algorithm = build(kind, Execution(loop, chunk), batch_norm)
    run = over_devices(rounds_of(algorithm, None if devices is None else AXIS), devices, how)
    actual = same_on_every_device(run(3, resident(), *start(batch_norm)))
    assert_close(actual, rounds_by_scan(kind, batch_norm))


@pytest.mark.parametrize("kind, loop, chunk, devices", FAST)
def test_rounds_are_the_same_under_every_execution(kind, loop, chunk, devices):
    check_rounds(kind, True, loop, chunk, devices)


@pytest.mark.slow
def test_a_merged_round_is_the_same_under_pmap():
    check_rounds("merged", True, "scan", 1, 2, "pmap")


@pytest.mark.slow
@pytest.mark.parametrize("loop, chunk, devices", ONE_DEVICE + MESHES)
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("kind", ["fed_avg", "periodic", "merged"])
def test_all_algorithms_under_all_executions(kind, batch_norm, loop, chunk, devices):
    check_rounds(kind, batch_norm, loop, chunk, devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("loop, chunk", [("scan", 1), ("vmap", 3), ("vmap", 20)])
@pytest.mark.parametrize("kind", ["fed_avg", "periodic", "merged"])
def test_all_algorithms_under_pmap(kind, loop, chunk, devices):
    check_rounds(kind, True, loop, chunk, devices, "pmap")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fed_avg", "periodic", "merged"])
def test_all_algorithms_eagerly(kind):
    algorithm = build(kind, Execution("eager"), True)
    root, data = jax.random.key(3), resident()
    state = start(True)[0]
    rows, history = dict.fromkeys(state), []
    for round in range(ROUNDS):
        inputs = data.read(algorithm.select(jnp.asarray(round), root))
        state, rows, metrics = algorithm.round(
            state, rows, Round(jnp.asarray(round), root, inputs), algorithm.hyper
        )
        history.append(metrics)
    metrics = jax.tree.map(lambda *values: np.stack(values), *history)
    assert_close((state, metrics), rounds_by_scan(kind, True))


@pytest.mark.slow
def test_the_rounds_compared_do_something():
    """Distillation, batch statistics and clients all change what is compared above."""
    initial, _ = start(True)
    states = {kind: rounds_by_scan(kind, True)[0] for kind in ("fed_avg", "periodic", "merged")}
    for pool in ("small", "large"):
        for state in states.values():
            moved = jax.tree.map(
                lambda a, b: np.abs(a - b).max(), state[pool][:2], initial[pool][:2]
            )
            del moved[0]["Dense_0"]["bias"]  # BatchNorm follows: its gradient is zero
            assert min(jax.tree.leaves(moved)) > 1e-3
        weights = [state[pool].params["Dense_1"]["kernel"] for state in states.values()]
        for left, right in ((0, 1), (0, 2), (1, 2)):
            assert np.abs(weights[left] - weights[right]).max() > 1e-3


# --------------------------------------- a toy method that marks clients and their examples


class Seen(NamedTuple):
    """A message in which every client marks the examples that it reads."""

    params: Any
    mutable: Any
    round: Any


def counting_model() -> Model:
    """Its mutable state counts how often each example was read; its loss is linear in `weights`."""

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        shown = jax.nn.one_hot(batch["row"], NUM_ROWS)
        outputs = shown @ variables.params["weights"]
        seen = variables.mutable["seen"] + jnp.sum(shown * mask[:, None], axis=0)
        return outputs, {"seen": seen} if train else variables.mutable

    def init(key):
        return Variables({"weights": jnp.zeros(NUM_ROWS)}, {"seen": jnp.zeros(NUM_ROWS)})

    return Model(init, apply, lambda outputs, batch: outputs, {}, 2)


def counting_method(epochs=2, batch_size=4) -> FederatedMethod:
    model, training = counting_model(), LocalTraining(batch_size=batch_size, epochs=epochs)

    def client_update(message, row, data, key, hyper):
        trained = train_client(model, training, Variables(*message[:2]), data, key, 1.0)
        owner = data.columns["owner"][data.start]
        return ClientResult(
            update=jax.tree.map(jnp.subtract, message.params, trained.variables.params),
            mutable=trained.variables.mutable,
            weight=data.size.astype(jnp.float32),
            client_state={"count": row["count"] + 1, "owner": owner, "round": message.round},
            metrics={"owner": owner, "num_steps": trained.num_steps},
        )

    def init(key):
        return Seen(*model.init(key), jnp.zeros((), jnp.int32))

    return FederatedMethod(
        model=model,
        hyper=(),
        init=init,
        broadcast=lambda server: server,
        client_update=client_update,
        reduce=weighted_mean(),
        server_update=lambda server, aggregate, round, hyper: server._replace(
            round=server.round + 1
        ),
        variables=lambda server: Variables(*server[:2]),
        set_model=lambda server, new, reset_optimizer: Seen(*new, server.round),
        init_client_state=lambda: {
            "count": jnp.zeros((), jnp.int32),
            "owner": jnp.asarray(-1),
            "round": jnp.asarray(-1),
        },
    )


def cohort_of(clients) -> Cohort:
    clients = jnp.asarray(clients, jnp.int32)
    data = resident()
    return Cohort(data.columns, clients, data.starts[clients], data.sizes[clients], data.capacity)


def run_counting(clients, loop, chunk, devices, prepare=None, how="shard_map"):
    method = counting_method()

    def run(clients, key_data):
        message = method.init(None)._replace(round=jnp.asarray(7))
        rows = {"count": 10 * clients, "owner": clients, "round": clients}
        return for_each_client(
            lambda *arguments: method.client_update(*arguments, ()),
            prepare or method.reduce.prepare,
            message,
            rows,
            cohort_of(clients),
            jax.random.wrap_key_data(key_data),
            Execution(loop, chunk),
            None if devices is None else AXIS,
            individual_results=True,
        )

    arguments = (jnp.asarray(clients, jnp.int32), jax.random.key_data(jax.random.key(0)))
    if devices is None and loop == "eager":
        return jax.tree.map(np.asarray, run(*arguments))
    return same_on_every_device(over_devices(run, devices, how)(*arguments))


def own_rows(clients):
    return np.asarray(federated().columns["owner"])[None] == np.asarray(clients)[:, None]


COHORTS = {
    "one": [4],
    "fewer than devices": [9, 2],
    "uneven": [12, 1, 0, 10, 5],
    "everyone, reversed": list(range(13))[::-1],
}
TOY_EXECUTIONS = [
    ("one", "scan", 1, 3),
    ("one", "vmap", 3, 8),
    ("fewer than devices", "vmap", 3, 8),
    ("fewer than devices", "scan", 1, 3),
    ("uneven", "scan", 1, 2),
    ("uneven", "vmap", 3, 8),
    ("uneven", "eager", 1, None),
    ("everyone, reversed", "scan", 1, None),
    ("everyone, reversed", "scan", 1, 8),
    ("everyone, reversed", "vmap", 3, None),
    ("everyone, reversed", "vmap", 3, 2),
    ("everyone, reversed", "vmap", 20, None),
    ("everyone, reversed", "vmap", 20, 3),
]
QUICK = {
    ("uneven", "scan", 1, 2),
    ("everyone, reversed", "vmap", 3, 2),
}


@pytest.mark.parametrize(
    "name, loop, chunk, devices",
    [
        each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow)
        for each in TOY_EXECUTIONS
    ],
)
def test_results_come_back_in_the_cohorts_order_and_every_example_is_seen(
    name, loop, chunk, devices
):
    clients = COHORTS[name]
    sizes = np.array(SIZES)[clients]
    result = run_counting(clients, loop, chunk, devices)

    assert result.metrics["owner"].tolist() == clients
    steps = 2 * -(-sizes // 4)
    assert result.metrics["num_steps"].tolist() == steps.tolist()
    assert result.client_states["owner"].tolist() == clients
    assert result.client_states["count"].tolist() == [10 * client + 1 for client in clients]
    assert result.client_states["round"].tolist() == [7] * len(clients)
    assert result.results.weight.tolist() == sizes.tolist()
    # In two epochs each client reads each of its own examples twice, and no others.
    np.testing.assert_array_equal(result.results.mutable["seen"], 2 * own_rows(clients))
    # Each real example has a share of the mean over its batch; shares of one step sum to one.
    update = result.results.update["weights"]
    np.testing.assert_allclose(update.sum(axis=1), steps, rtol=1e-6)
    assert ((update > 0) == own_rows(clients)).all()

    total_update, total_mutable, total_weight, _ = result.total
    assert total_weight == sizes.sum()
    np.testing.assert_allclose(total_mutable["seen"], 2 * sizes @ own_rows(clients), rtol=1e-6)
    np.testing.assert_allclose(total_update["weights"], sizes @ update, rtol=1e-5)


def test_a_pmapped_cohort_comes_back_in_order():
    clients = COHORTS["uneven"]
    result = run_counting(clients, "vmap", 3, 2, how="pmap")
    assert result.metrics["owner"].tolist() == clients
    np.testing.assert_array_equal(result.results.mutable["seen"], 2 * own_rows(clients))


@pytest.mark.parametrize("loop, chunk, devices", [("scan", 1, 8), ("vmap", 3, None)])
def test_slots_that_only_fill_a_chunk_never_reach_the_sum(loop, chunk, devices):
    """Not even in a reduction that weighs clients evenly, or where a client without steps gives NaN."""

    def prepare(result, key):
        return {
            "clients": jnp.ones((), jnp.int32),
            "per_step": jnp.sum(result.update["weights"]) / result.metrics["num_steps"],
        }

    clients = COHORTS["uneven"]
    total = run_counting(clients, loop, chunk, devices, prepare).total
    assert total["clients"] == len(clients)
    np.testing.assert_allclose(total["per_step"], len(clients), rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("clients", [1, 4, 13, 20, 48])
def test_devices_are_dealt_about_the_same(clients, devices):
    sizes = np.random.default_rng(clients).permutation(np.arange(1, clients + 1) * 7)
    order = dealing_order(sizes, devices)
    assert sorted(order) == list(range(clients))
    np.testing.assert_array_equal(order, dealing_order(jnp.asarray(sizes), devices))
    dealt = [sizes[order[device::devices]].sum() for device in range(devices)]
    assert max(dealt) - min(dealt) <= max(sizes)
    if clients % (2 * devices) == 0:
        assert len(set(dealt)) == 1


@pytest.mark.parametrize(
    "loop, chunk, devices", [("scan", 1, 3), ("vmap", 3, None), ("vmap", 3, 8)]
)
def test_client_rows_are_gathered_and_scattered(loop, chunk, devices):
    rounds = 6
    pools = {
        "even": Pool(counting_method(1), np.arange(0, 13, 2), 3),
        "all": Pool(counting_method(1), np.arange(13), 5),
    }
    algorithm = independent_pools(pools, federated().columns, Execution(loop, chunk))

    def run(seed):
        root, data = jax.random.key(seed), resident()

        def one(carry, round):
            state, stored = carry
            selection = algorithm.select(round, root)
            clients = selection.clients
            state, rows, _ = algorithm.round(
                state,
                client_states.gather(algorithm.client_states, stored, clients),
                Round(round, root, data.read(selection), devices and AXIS),
                algorithm.hyper,
            )
            stored = client_states.scatter(algorithm.client_states, stored, clients, rows)
            return (state, stored), clients

        stored = jax.tree.map(
            lambda leaf: jnp.asarray(leaf[0]),
            client_states.device_client_states(algorithm.client_states, 1),
        )
        (_, stored), selected = jax.lax.scan(
            one, (algorithm.init(root), stored), jnp.arange(rounds)
        )
        return stored, selected

    rows, selected = same_on_every_device(over_devices(run, devices)(5))
    for name, pool in pools.items():
        expected = dict.fromkeys(pool.clients.tolist(), (0, -1, -1))
        for round, clients in enumerate(selected[name].tolist()):
            assert len(set(clients)) == pool.cohort_size
            for client in clients:
                expected[client] = (expected[client][0] + 1, client, round)
        actual = zip(rows[name]["count"], rows[name]["owner"], rows[name]["round"], strict=True)
        assert [tuple(map(int, row)) for row in actual] == list(expected.values())
        assert max(count for count, _, _ in expected.values()) > 1


def test_rows_may_hold_any_dtype_and_shape():
    """Client states come back unchanged from devices: bools, small integers, floats, empty arrays."""
    clients = COHORTS["uneven"]

    def update(message, row, data, key):
        row = row | {"flag": ~row["flag"]}
        return ClientResult({}, {}, data.size.astype(jnp.float32), row, {})

    def run(clients):
        rows = {
            "flag": clients % 2 == 0,
            "small": clients.astype(jnp.uint8),
            "half": clients.astype(jnp.bfloat16)[:, None] * jnp.ones((1, 2), jnp.bfloat16),
            "nothing": jnp.zeros((len(clients), 0)),
        }
        return for_each_client(
            update,
            lambda result, key: result.weight,
            None,
            rows,
            cohort_of(clients),
            jax.random.key(0),
            Execution("vmap", 2),
            AXIS,
        ).client_states

    rows = same_on_every_device(over_devices(run, 3)(jnp.asarray(clients)))
    assert rows["flag"].dtype == bool
    assert rows["flag"].tolist() == [client % 2 == 1 for client in clients]
    assert rows["small"].dtype == np.uint8
    assert rows["small"].tolist() == clients
    assert rows["half"].astype(int).tolist() == [[client, client] for client in clients]
    assert rows["nothing"].shape == (5, 0)


# --------------------------------------------------------------------- unequal clients in one chunk


# Adam's epsilon keeps noise in zero gradients (biases before BatchNorm) from becoming steps.
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(optax.sgd, marks=pytest.mark.slow), lambda rate: optax.adam(rate, eps=1e-2)],
    ids=["sgd", "adam"],
)
def test_a_small_client_is_the_same_beside_a_much_larger_one(optimizer):
    """Padded steps and examples change nothing: not batch statistics, not the optimizer's count."""
    model = from_flax_linen(BatchNormMLP(hidden=(5,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    variables = model.init(jax.random.key(1))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(clients, execution, batch_size=4):
        training = LocalTraining(optimizer, batch_size, epochs=3)

        def update(message, row, data, key):
            trained = train_client(model, training, message, data, key, 0.05)
            return ClientResult(*trained.variables, data.size * 1.0, None, {"loss": trained.loss})

        result = for_each_client(
            update,
            lambda result, key: result.weight,
            variables,
            None,
            cohort_of(clients),
            jax.random.key(0),
            execution,
            individual_results=True,
        )
        return result.results

    small, large = 0, 1  # 3 and 11 examples: 3 steps against 9, and a last batch of 3 in both
    together = run(jnp.array([small, large]), Execution("vmap", 2))
    for index, client in enumerate((small, large)):
        alone = run(jnp.array([client]), Execution("scan"))
        assert_close(
            jax.tree.map(lambda leaf, i=index: leaf[i], together),
            jax.tree.map(lambda leaf: leaf[0], alone),
            rtol=1e-5,
            atol=3e-6,
        )
        running = alone.mutable["batch_stats"]["BatchNorm_0"]["mean"]
        assert np.abs(running).max() > 1e-3

    # Three examples in a batch of three, so that nothing is padded at all.
    unpadded = run(jnp.array([small]), Execution("scan"), SIZES[small])
    assert_close(jax.tree.map(lambda leaf: leaf[:1], together), unpadded, rtol=1e-5, atol=3e-6)


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "execution, message",
    [
        (Execution("parallel"), "execution.loop must be 'scan', 'vmap' or 'eager', got 'parallel'"),
        (Execution("vmap", 0), "execution.chunk_size must be at least 1, got 0"),
    ],
)
def test_an_unknown_execution_is_refused(execution, message):
    with pytest.raises(ValueError, match=message):
        for_each_client(None, weighted_mean().prepare, None, None, cohort_of([1]), None, execution)


def test_eager_clients_are_for_one_device():
    with pytest.raises(
        ValueError, match=r"execution\.loop must be .* on several devices, got 'eager'"
    ):
        run_counting([1, 2], "eager", 1, devices=2)


@pytest.mark.parametrize(("loop", "chunk"), [("scan", 1), ("vmap", 3)])
def test_a_client_update_is_traced_once(loop, chunk):
    """Tracing a client's training is most of what a start takes that finds its programs compiled.

    Of its results some may be Python's numbers.
    """
    traced = []

    def update(message, client_state, data, key):
        traced.append(1)
        weight = data.size.astype(jnp.float32)
        metrics = {"num_steps": data.size, "half": 0.5}
        return ClientResult(message, {}, weight, client_state, metrics)

    @jax.jit
    def run(message):
        cohort = cohort_of([0, 3, 5, 7])
        prepare = lambda result, key: result.weight * result.update
        execution = Execution(loop, chunk)
        return for_each_client(update, prepare, message, None, cohort, jax.random.key(0), execution)

    result = run(jnp.float32(2))
    assert float(result.total) == 2 * sum(SIZES[client] for client in [0, 3, 5, 7])
    assert result.metrics["half"].tolist() == [0.5] * 4
    assert len(traced) == 1


@pytest.mark.parametrize("loop", ["scan", "vmap"])
def test_client_states_are_replaced_in_place(loop):
    size = 2**16
    sizes = jnp.asarray(SIZES)
    cohort = Cohort(
        columns={"x": jnp.zeros((NUM_ROWS, 1))},
        clients=jnp.arange(len(SIZES)),
        starts=jnp.cumsum(sizes) - sizes,
        sizes=sizes,
        capacity=max(SIZES),
    )

    def update(message, state, data, key):
        new = state * 2 + data.size
        return ClientResult({"sum": new[0]}, {}, jnp.float32(1), new, {})

    def round_(states):
        prepare = lambda result, key: result.update
        return for_each_client(
            update, prepare, None, states, cohort, jax.random.key(0), Execution(loop, 2)
        ).client_states

    states = jnp.arange(len(SIZES) * size, dtype=jnp.float32).reshape(len(SIZES), size)
    compiled = jax.jit(round_, donate_argnums=0).lower(states).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < states.nbytes / 2
    expected = 2 * states + sizes[:, None]
    np.testing.assert_array_equal(compiled(states), expected)
