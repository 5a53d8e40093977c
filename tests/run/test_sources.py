"""Streaming from the host and data on the device are the same experiment."""

import functools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import for_each_client
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Inputs, Selection
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.models.digits import MLP
from fedcodist.run.blocks import Trained, in_blocks
from fedcodist.run.placement import AXIS, own_devices, place_inputs
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data, stack_inputs
from fedcodist.run.stacked import Stacked

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, CLASSES, ROUNDS = 4, 3, 4
SIZES = (3, 9, 1, 7, 4, 2, 5)


class Recorded(np.ndarray):
    """An array that records the indices of the examples that are read."""

    reads: ClassVar[list] = []

    def __getitem__(self, item):
        Recorded.reads.append(item)
        return np.asarray(super().__getitem__(item))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Columns in memory and the same columns memory-mapped."""
    generator, rows = np.random.default_rng(0), sum(SIZES)
    arrays = {
        "image": generator.integers(0, 255, (rows, FEATURES)).astype(np.uint8),
        "label": generator.integers(0, CLASSES, rows).astype(np.int32),
        "unlabelled": generator.integers(0, 255, (19, FEATURES)).astype(np.uint8),
    }
    folder = tmp_path_factory.mktemp("columns")
    mapped = {}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        mapped[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return arrays, mapped


def sources_of(arrays):
    columns = {name: arrays[name] for name in ("image", "label")}
    federated = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))
    return federated, {"unlabelled": {"image": arrays["unlabelled"]}}


@functools.cache
def algorithm(kind):
    scale = lambda batch, key, positions: batch | {"image": batch["image"] / 255 - 0.5}

    def method(hidden):
        return fed_avg(
            from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES))),
            LocalTraining(batch_size=4, preprocess=scale),
            server_optimizer=lambda rate: optax.adam(rate, eps=1e-3),
            hyper=FedAvgHyper(0.1, 0.05),
        )

    pools = {
        "small": Pool(method((3,)), np.arange(0, 5), 3),
        "large": Pool(method((4,)), np.arange(3, 7), 2),
    }
    columns = {
        "image": jax.ShapeDtypeStruct((31, FEATURES), np.uint8),
        "label": jax.ShapeDtypeStruct((31,), np.int32),
    }
    distillation = Distillation(steps=2, batch_size=6, mixup_beta=0, preprocess=scale)
    arguments = (pools, columns, 19, ROUNDS)
    if kind == "merged":
        return merged_codistillation(*arguments, distillation=distillation)
    return periodic_codistillation(*arguments, period=2, distillation=distillation)


@pytest.mark.parametrize("kind", ["merged", "periodic"])
def test_streamed_inputs_are_the_resident_ones_row_for_row(stored, kind):
    arrays, mapped = stored
    select = jax.jit(algorithm(kind).select)
    resident = resident_data(*sources_of(arrays))
    streamed = StreamedData(*sources_of(mapped))
    shapes = set()
    for round in range(2 * ROUNDS):
        selection = jax.tree.map(np.asarray, select(round, jax.random.key(4)))
        views, buffers = resident.read(selection), streamed.read(selection)
        shapes.add(str(jax.tree.map(np.shape, buffers)))
        for pool, view in views.cohorts.items():
            buffer = buffers.cohorts[pool]
            assert buffer.capacity == view.capacity
            np.testing.assert_array_equal(buffer.clients, view.clients)
            np.testing.assert_array_equal(buffer.sizes, view.sizes)
            for name, column in view.columns.items():
                assert buffer.columns[name].dtype == column.dtype
                for here, there, size in zip(view.starts, buffer.starts, view.sizes, strict=True):
                    np.testing.assert_array_equal(
                        buffer.columns[name][there : there + size], column[here : here + size]
                    )
        for name, view in views.examples.items():
            buffer = buffers.examples[name]
            assert buffer.indices.shape == view.indices.shape
            if (view.indices < 0).all():
                assert (buffer.indices < 0).all()
                continue
            for column, values in view.columns.items():
                np.testing.assert_array_equal(
                    buffer.columns[column][buffer.indices], values[view.indices]
                )
        used = kind == "merged" or round % 2 == 1
        assert (views.examples["unlabelled"].indices >= 0).all() == used
    assert len(shapes) == 1


def test_streamed_rounds_have_the_key_of_their_seed(stored):
    """Without training: the state is what the round may draw from its key and read of its data."""
    seed, (federated, _) = 7, sources_of(stored[0])

    def round(state, client_states, round, hyper):
        total = jnp.sum(round.inputs.cohorts["pool"].sizes)
        drawn = jax.random.uniform(jax.random.fold_in(round.key, round.index), (2,))
        return state + total * drawn, client_states, {"drawn": drawn[0]}

    select = lambda round, key: Selection({"pool": jax.random.permutation(key, 7)[:3]}, {})
    drawing = FederatedAlgorithm(
        "draws", {}, lambda key: jnp.zeros(2), {}, select, round, {}, {}, len(SIZES)
    )
    programs, seeds = build_programs(drawing, 2), np.array([seed], np.uint32)
    expected, _, history = programs.train(
        programs.init(seeds), {}, seeds, 0, 2, {}, resident_data(federated)
    )
    state, parts = programs.init(seeds), []
    for index in range(2):
        inputs = StreamedData(federated).read(programs.select(seed, index))
        state, _, part = programs.train_streamed(
            state, {}, seeds, index, {}, stack_inputs([inputs])
        )
        parts.append(part["drawn"])
    np.testing.assert_allclose(state, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), history["drawn"], rtol=1e-6)


@pytest.mark.parametrize(
    "kind, devices",
    [
        ("merged", None),
        pytest.param("periodic", None, marks=pytest.mark.slow),
        pytest.param("merged", 4, marks=pytest.mark.slow),
    ],
)
def test_streamed_training_is_resident_training(stored, kind, devices):
    arrays, mapped = stored
    mesh = devices and Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    programs = build_programs(algorithm(kind), ROUNDS)
    seeds = jnp.array([0, 7], jnp.uint32)
    hyper = jax.tree.map(jnp.float32, algorithm(kind).hyper)
    rows = dict.fromkeys(algorithm(kind).client_states)  # clients of these methods have no state
    state, _, history = programs.train(
        programs.init(seeds), rows, seeds, 0, ROUNDS, hyper, resident_data(*sources_of(arrays))
    )
    source = StreamedData(*sources_of(mapped))
    own = own_devices(mesh)

    def read(round):
        selections = [programs.select(seed, round) for seed in seeds]
        return stack_inputs([source.read(each, devices or 1, own) for each in selections])

    if mesh:
        programs = build_programs(algorithm(kind), ROUNDS, mesh)._replace(select=programs.select)
    streamed_state = programs.init(seeds)
    parts = []
    for round, inputs in enumerate(source.ahead(read, range(ROUNDS))):
        streamed_state, _, part = programs.train_streamed(
            streamed_state, rows, seeds, round, hyper, place_inputs(inputs, mesh)
        )
        parts.append(part)
    streamed_history = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *parts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        (streamed_state, streamed_history),
        (state, history),
    )
    assert programs.train_streamed._cache_size() == 1
    assert programs.select._cache_size() == 1


def test_streaming_reads_no_further_than_the_rounds_that_run(monkeypatch):
    """Rounds here are done when somebody waits for them."""
    events = []

    class Unfinished:
        def __init__(self, round):
            self.round = round

        def block_until_ready(self):
            events.append(f"wait for {self.round}")

        def __array__(self, dtype=None, copy=None):
            return np.full((1, 1, 1), float(self.round))

    def train_streamed(state, client_states, seeds, round, hyper, inputs):
        events.append(f"dispatch {round}")
        structure = jax.tree.structure({"loss": 0})
        return state, {}, Stacked((Unfinished(int(round)),), ((0, 0),), structure)

    data = StreamedData(FederatedData.from_arrays({"x": np.zeros(2)}, offsets=[0, 2]))
    monkeypatch.setattr(data, "read", lambda *arguments: Inputs({}, {}))
    programs = SimpleNamespace(select=lambda seed, round: {}, train_streamed=train_streamed)
    states = SimpleNamespace(gather=lambda clients: {}, scatter=lambda clients, states: None)
    train = in_blocks(programs, data, 5, None, np.zeros(1, np.uint32), {}, states)
    train(Trained({}, None), 0, 1)
    _, history = train(Trained({}, None), 1, 4)
    assert events == [
        *("dispatch 0", "dispatch 1", "dispatch 2", "wait for 1"),
        *("dispatch 3", "wait for 2", "dispatch 4"),
    ]
    np.testing.assert_array_equal(history["loss"], [[1.0, 2.0, 3.0, 4.0]])


# ----------------------------------------------------------------------------- clients of some devices


@pytest.mark.slow
@settings(max_examples=10)
@given(
    cohort=st.permutations(range(len(SIZES))),
    clients=st.integers(1, len(SIZES)),
    devices=st.integers(1, 9),
    chunk=st.integers(1, 4),
)
def test_each_device_gets_the_clients_that_it_runs_and_no_others(cohort, clients, devices, chunk):
    each_device_gets_its_clients(np.array(cohort[:clients], np.int32), devices, chunk)


def test_each_of_two_devices_gets_the_clients_that_it_runs():
    """The largest clients are dealt first, whatever their places in the cohort."""
    each_device_gets_its_clients(np.arange(len(SIZES), dtype=np.int32), devices=2, chunk=2)


def each_device_gets_its_clients(cohort, devices, chunk):
    federated, _ = sources_of(
        {
            "image": np.arange(sum(SIZES), dtype=np.int32).view(Recorded),
            "label": np.zeros(sum(SIZES), np.int32),
            "unlabelled": np.zeros(1, np.int32),
        }
    )
    source, clients = StreamedData(federated), len(cohort)
    slots = slots_of_devices(np.array(SIZES, np.int32)[cohort], devices, chunk)
    lengths = set()
    for device in range(devices):
        Recorded.reads.clear()
        buffer = source.read(one_pool(*cohort), devices, [device]).cohorts["pool"]
        lengths.add(len(buffer.columns["image"]))
        mine = [place for place in slots[device].reshape(-1) if place < clients]
        expected = {row for place in mine for row in rows_of(federated, cohort[place])}
        read = [row for item in Recorded.reads for row in range(item.start, item.stop)]
        assert len(read) == len(expected) and set(read) == expected
        for place in mine:
            start, size = buffer.starts[place], buffer.sizes[place]
            np.testing.assert_array_equal(
                buffer.columns["image"][start : start + size], rows_of(federated, cohort[place])
            )
    assert len(lengths) == 1
    own = list(range(devices))[::2]
    parts = source.read(one_pool(*cohort), devices, own).cohorts["pool"].columns["image"]
    for part, device in zip(np.split(parts, len(own)), own, strict=True):
        alone = source.read(one_pool(*cohort), devices, [device]).cohorts["pool"]
        np.testing.assert_array_equal(part, alone.columns["image"])


def slots_of_devices(sizes, devices, chunk):
    """The clients as `for_each_client` deals them, [devices, chunks, chunk]."""
    execution = Execution("vmap", chunk)
    deal = lambda _: for_each_client._deal(jnp.asarray(sizes), execution, "devices")
    return np.asarray(jax.vmap(deal, axis_name="devices")(jnp.arange(devices)))


def rows_of(federated, client):
    return range(federated.offsets[client], federated.offsets[client + 1])


# ------------------------------------------------------------------------------------------ ahead


def one_pool(*clients):
    return Selection({"pool": np.array(clients, np.int32)}, {})


def test_reading_ahead_keeps_the_order_and_stays_one_round_ahead(stored):
    source = StreamedData(*sources_of(stored[0]))
    clients, asked = (4, 1, 6, 0, 2), []

    def rounds():
        for round in range(5):
            asked.append(round)
            yield round

    received = []
    for inputs in source.ahead(lambda round: source.read(one_pool(clients[round])), rounds()):
        received.append(int(inputs.cohorts["pool"].clients[0]))
        assert len(asked) == min(len(received) + 1, 5)
    assert tuple(received) == clients
    assert list(source.ahead(source.read, [])) == []


def test_a_failure_while_reading_ahead_reaches_the_reader(stored):
    source = StreamedData(*sources_of(stored[0]))
    reader = source.ahead(lambda client: source.read(one_pool(client)), [1, 99])
    next(reader)
    with pytest.raises(IndexError):
        next(reader)


# ---------------------------------------------------------------------------------- large populations


@pytest.fixture(scope="module")
def million():
    sizes = 1 + np.arange(1_000_000) % 2
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    column = np.arange(offsets[-1], dtype=np.int32).view(Recorded)
    return FederatedData.from_arrays({"image": column}, offsets=offsets)


def resident_pages_mb():
    """Of mapped files, in this process."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+) kB", text).group(1)) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_examples_that_were_read_do_not_stay_resident(mode, tmp_path):
    """128 MB on disk, all read: with a shared mapping a round's 2 MB are resident at a time."""
    clients, cohort, width = 1 << 15, 1 << 9, 1 << 12
    path = tmp_path / "column.npy"
    column = np.lib.format.open_memmap(path, "w+", np.uint8, (clients, width))
    column[:] = np.arange(clients, dtype=np.uint8)[:, None]
    column.flush()
    del column
    mapped = {"image": np.load(path, mmap_mode=mode)}
    if mode == "c":
        mapped["image"][5] = 77
    source = StreamedData(FederatedData.from_arrays(mapped, offsets=np.arange(clients + 1)))
    before, most = resident_pages_mb(), 0.0
    for start in range(0, clients, cohort):
        chosen = np.arange(start, start + cohort)
        images = source.read(one_pool(*chosen)).cohorts["pool"].columns["image"]
        most = max(most, resident_pages_mb() - before)
        expected = np.where((chosen == 5) & (mode == "c"), 77, chosen % 256)
        assert (np.sort(images[:, 0]) == np.sort(expected)).all()
    if mode != "c":
        assert most < 32


def test_a_cohort_of_a_million_clients_is_drawn_in_microseconds(million):
    apply = lambda variables, batch, **_: (batch["image"][:, None] * variables.params, {})
    model = Model(
        lambda key: Variables(jnp.zeros(2), {}),
        apply,
        lambda outputs, batch: outputs[:, 0],
        {"accuracy": accuracy()},
        2,
    )
    pools = {"everyone": Pool(fed_avg(model), np.arange(million.num_clients), 20)}
    drawn = independent_pools(pools, {"image": jax.ShapeDtypeStruct((4,), np.float32)})
    select = build_programs(drawn, 1).select
    jax.block_until_ready(select(0, 0))
    seconds, clients = [], []
    for round in range(50):
        started = time.perf_counter()
        selection = jax.block_until_ready(select(0, round))
        seconds.append(time.perf_counter() - started)
        clients.append(np.asarray(selection.clients["everyone"]))
    assert min(seconds) < 1e-3
    assert sorted(seconds)[len(seconds) // 2] < 2e-3
    assert all(len(set(cohort.tolist())) == 20 for cohort in clients)
    everyone = np.concatenate(clients)
    assert everyone.min() < 50_000
    assert everyone.max() > 950_000
    assert select._cache_size() == 1


def test_a_streamed_cohort_reads_its_own_rows_and_no_others(million):
    source = StreamedData(million)
    Recorded.reads.clear()
    clients = np.array([999_999, 5, 123_456], np.int32)
    buffer = source.read(one_pool(*clients)).cohorts["pool"]
    read = [row for item in Recorded.reads for row in range(item.start, item.stop)]
    offsets = million.offsets
    own = [row for client in clients for row in range(offsets[client], offsets[client + 1])]
    assert read == own
    assert len(buffer.columns["image"]) == 6  # room for three clients of the largest size
    np.testing.assert_array_equal(buffer.columns["image"][: len(own)], own)
    assert buffer.sizes.tolist() == [2, 2, 1]
    assert buffer.starts.tolist() == [0, 2, 4]


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_a_client_without_examples_is_refused(source):
    data = FederatedData.from_arrays(
        {"image": np.zeros((3, 1))},
        offsets=[0, 2, 2, 3],
        client_ids=["a", "b", "c"],
        allow_empty=True,
    )
    with pytest.raises(ValueError, match="client 'b' has none"):
        source(data)


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_columns_of_text_are_refused(source):
    """A device has no such type, and JAX's error does not name the column."""
    columns = {"image": np.zeros((2, 1), np.float32), "title": np.array(["a", "b"])}
    text = FederatedData.from_arrays(columns, offsets=[0, 1, 2])
    numbers = FederatedData.from_arrays({"image": columns["image"]}, offsets=[0, 1, 2])
    for arguments, called in (
        ((text,), "federated"),
        ((numbers, {"open": columns}), "data_sets['open']"),
    ):
        with pytest.raises(TypeError, match=re.escape(called)) as error:
            source(*arguments)
        assert "'title' is <U1" in str(error.value)
        assert "\n" not in str(error.value)


def test_ids_of_clients_compile_nothing_again():
    columns = {"x": np.arange(4.0, dtype=np.float32)}
    traced = []

    @jax.jit
    def total(data):
        traced.append(None)
        return data.columns["x"].sum()

    for ids in (["ann", "bob"], ["cy", "dan"]):
        data = resident_data(FederatedData.from_arrays(columns, offsets=[0, 2, 4], client_ids=ids))
        assert float(total(data)) == 6 and data.client_ids.tolist() == ids
    assert len(traced) == 1
