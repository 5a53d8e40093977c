"""Client states: the same on the device and on the host, which holds those of sampled clients only."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import client_states
from fedcodist.core.aggregation import ClientResult, weighted_mean
from fedcodist.core.client_states import ClientStates, HostClientStates, device_client_states
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model, Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES = (3, 1, 4, 2, 5, 2, 6)
POOLS = {"odd": (np.array([1, 3, 5], np.int32), 2), "all": (np.arange(7, dtype=np.int32), 4)}
COLUMNS = {"label": np.arange(sum(SIZES), dtype=np.int32) % 2}


def remembering_method() -> FederatedMethod:
    """A client's state counts its rounds and sums its downloads; both are sent up."""

    def client_update(message, row, data, key, hyper):
        row = {"visits": row["visits"] + 1, "seen": 0.5 * row["seen"] + message.params["w"]}
        update = {"w": -row["visits"] - 0.01 * row["seen"] - jax.random.uniform(key, (2,))}
        return ClientResult(update, {}, jnp.float32(data.size), row, {"num_steps": data.size})

    return FederatedMethod(
        model=Model(
            init=lambda key: Variables({"w": jnp.zeros(2)}, {}),
            apply=lambda variables, batch, **_: (
                jnp.broadcast_to(variables.params["w"], (*batch["label"].shape, 2)),
                variables.mutable,
            ),
            loss=lambda outputs, batch: outputs[:, 0],
            metrics={},
            num_classes=2,
        ),
        hyper={"rate": 0.1},
        init=lambda key: Variables({"w": jax.random.normal(key, (2,))}, {}),
        broadcast=lambda server: server,
        client_update=client_update,
        reduce=weighted_mean(),
        server_update=lambda server, aggregate, round, hyper: Variables(
            jax.tree.map(
                lambda w, g: w - hyper["rate"] * g, server.params, aggregate.pseudo_gradient
            ),
            {},
        ),
        variables=lambda server: server,
        set_model=lambda server, new, reset: new,
        init_client_state=lambda: {"visits": np.float32(0), "seen": np.full(2, 3, np.float32)},
    )


def experiment(source, rounds=6, seeds=2, first=None) -> Experiment:
    federated = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    method = remembering_method()
    if first is not None:
        method = method._replace(init_client_state=lambda: first)
    pools = {name: Pool(method, *pool) for name, pool in POOLS.items()}
    return Experiment(
        algorithm=independent_pools(pools, COLUMNS),
        data=source(federated, {}),
        splits={"held_out": federated},
        rounds=rounds,
        evaluate_every=2,
        seeds=seeds,
    )


def weights(outcome):
    return {name: np.asarray(values.params["w"]) for name, values in outcome.variables.items()}


def test_a_run_remembers_alike_on_the_device_on_the_host_and_in_plain_python():
    on_device = run_experiment(experiment(resident_data), show_progress=False)
    on_host = run_experiment(experiment(StreamedData), show_progress=False)
    for name in POOLS:
        np.testing.assert_allclose(weights(on_device)[name], weights(on_host)[name], rtol=1e-6)
        for seed in range(2):
            np.testing.assert_allclose(
                weights(on_device)[name][seed], plain_run(name, seed), rtol=1e-5
            )


def plain_run(name, seed):
    """One pool, client by client, with client states in a dictionary."""
    from fedcodist.core import keys
    from fedcodist.core.method import client_key

    algorithm = experiment(resident_data).algorithm
    root, method, rows = jax.random.key(seed), remembering_method(), {}
    w = np.asarray(algorithm.init(root)[name].params["w"])
    for round in range(6):
        total, weight = np.zeros(2), 0
        for client in np.asarray(algorithm.select(round, root).clients[name]).tolist():
            visits, seen = rows.get(client, (0, np.full(2, 3.0)))
            rows[client] = visits, seen = visits + 1, 0.5 * seen + w
            draw = jax.random.uniform(
                keys.derive(client_key(root, round, name), np.int32(client)), (2,)
            )
            total += SIZES[client] * (-visits - 0.01 * seen - np.asarray(draw))
            weight += SIZES[client]
        w = w - method.hyper["rate"] * total / weight
    return w


@pytest.mark.slow
@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_a_resumed_run_remembers_what_its_clients_knew(source, tmp_path):
    class Stop(Exception):
        pass

    def stop(records):
        if records[0]["round"] == 4:
            raise Stop

    whole = run_experiment(experiment(source), show_progress=False)
    with pytest.raises(Stop):
        run_experiment(experiment(source), tmp_path, callbacks=[stop], show_progress=False)
    resumed = run_experiment(experiment(source), tmp_path, show_progress=False)
    for name in POOLS:
        np.testing.assert_array_equal(weights(resumed)[name], weights(whole)[name])


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_numbers_of_64_bits_are_resumed(source, tmp_path):
    """The device holds them in 32 bits, and so does the checkpoint."""
    first = {"visits": 0.0, "seen": np.full(2, 3.0)}
    trained = [
        run_experiment(experiment(source, rounds, first=first), tmp_path, show_progress=False)
        for rounds in (2, 6)
    ]
    assert [outcome.summary["rounds"] for outcome in trained] == [2, 6]
    whole = run_experiment(experiment(source), show_progress=False)
    for name in POOLS:
        np.testing.assert_array_equal(weights(trained[1])[name], weights(whole)[name])


FIRST = {"count": np.int32(7), "vector": np.arange(3, dtype=np.float32)}
VISITS = st.lists(st.lists(st.integers(0, 11), min_size=2, max_size=2, unique=True), max_size=9)


@given(VISITS, st.integers(0, 9))
@settings(max_examples=30)
def test_the_host_keeps_what_the_device_keeps(visits, saved_after):
    """Any order of visits, interrupted by a checkpoint anywhere."""
    kept = {"pool": ClientStates(np.arange(12, dtype=np.int32), FIRST), "other": NOTHING}
    host = HostClientStates(kept, seeds=2)
    stacks = jax.tree.map(np.array, device_client_states(kept, seeds=2)["pool"])
    for index, clients in enumerate(visits):
        both = np.array([clients, clients[::-1]], np.int32)
        if index == saved_after:
            state = jax.tree.map(np.copy, host.state())
            host = HostClientStates(kept, seeds=2)
            host.restore(state)
        rows = host.gather({"pool": both, "other": both})
        assert rows["other"] is None
        expected = jax.tree.map(lambda leaf, at=both: leaf[np.arange(2)[:, None], at], stacks)
        jax.tree.map(np.testing.assert_array_equal, rows["pool"], expected)
        new = jax.tree.map(
            lambda leaf, n=index: 2 * leaf + n + np.arange(2)[:, *_nones(leaf)], rows["pool"]
        )
        host.scatter({"pool": both, "other": both}, {"pool": new, "other": None})
        for name, leaf in stacks.items():
            leaf[np.arange(2)[:, None], both] = new[name]


NOTHING = ClientStates(np.arange(3, dtype=np.int32), None)


def _nones(leaf):
    return (None,) * (leaf.ndim - 1)


def test_a_million_clients_that_met_a_thousand_take_memory_for_a_thousand():
    first = {"variate": np.zeros(1000, np.float32)}  # 4 kB, for all clients 4 GB
    kept = {"pool": ClientStates(np.arange(1_000_000, dtype=np.int32), first)}
    draws = np.random.default_rng(0)
    tracemalloc.start()
    host, met = HostClientStates(kept, seeds=1), set()
    for _ in range(50):
        clients = draws.choice(1_000_000, (1, 20), replace=False)
        met |= set(clients[0].tolist())
        rows = host.gather({"pool": clients})
        host.scatter({"pool": clients}, jax.tree.map(lambda leaf: leaf + 1, rows))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 990 < len(met) <= 1000
    assert peak < 3 * len(met) * first["variate"].nbytes
    owners, stack = host.state()["pool"]
    assert len(owners) == len(stack["variate"]) == len(met)


def test_rows_on_the_device_are_found_by_client():
    kept = {"odd": ClientStates(POOLS["odd"][0], {"count": np.int32(0)})}
    stored = {"odd": {"count": jnp.array([10, 30, 50])}}
    clients = {"odd": jnp.array([5, 1])}
    rows = client_states.gather(kept, stored, clients)
    assert rows["odd"]["count"].tolist() == [50, 10]
    stored = client_states.scatter(kept, stored, clients, {"odd": {"count": jnp.array([51, 11])}})
    assert stored["odd"]["count"].tolist() == [11, 30, 51]
