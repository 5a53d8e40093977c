"""The choice of a chunk size: its arithmetic, and the memory that compiled programs report."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import memory
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.memory import available_bytes, machine_bytes
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.digits import MLP
from fedcodist.run import chunk_size, programs
from fedcodist.run.chunk_size import (
    ChunkSize,
    choose_chunk_size,
    chunk_sizes,
    largest_that_fits,
    needed_bytes,
)
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, EXAMPLES, FEATURES, CLASSES = 12, 32, 8, 3


@given(st.integers(1, 300))
def test_chunks_worth_trying_waste_least_for_their_number(clients):
    sizes = chunk_sizes(clients)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == clients
    for chunk in range(1, clients + 1):
        # As many chunks of equal size, at most as large.
        same = [size for size in sizes if -(-clients // size) == -(-clients // chunk)]
        assert len(same) == 1 and same[0] <= chunk


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40, unique=True).map(sorted),
    st.integers(1, 9),
    st.integers(0, 60),
    st.integers(0, 600),
)
def test_the_largest_that_fits_is_found_in_few_trials(sizes, each, fixed, available):
    tried = []

    def bytes_of(chunk):
        tried.append(chunk)
        return fixed + each * chunk

    fitting = [size for size in sizes if fixed + each * size <= available]
    if not fitting:
        with pytest.raises(ValueError, match=f"not even {sizes[0]} client at a time fits"):
            largest_that_fits(sizes, bytes_of, available)
    else:
        chosen = largest_that_fits(sizes, bytes_of, available)
        assert chosen == ChunkSize(max(fitting), fixed + each * max(fitting), available)
    assert tried[0] == sizes[-1] and len(tried) == len(set(tried))
    assert len(tried) <= math.log2(len(sizes)) + 2


def test_a_program_that_the_compiler_refuses_does_not_fit():
    bytes_of = {1: 10, 2: math.inf, 4: math.inf}.get
    assert largest_that_fits([1, 2, 4], bytes_of, 20).clients == 1


def test_the_line_that_is_printed():
    chosen = ChunkSize(5, 3 << 30, 10 << 30)
    assert str(chosen) == "5 clients at once, 3,072 MiB of the 10,240 MiB that a device may use"
    assert str(chosen._replace(clients=1)).startswith("1 client at once")


def test_available_memory_of_an_accelerator(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 7})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert available_bytes(processes_here=4) == 900


def test_available_memory_of_a_processor_is_shared(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 1200)
    assert available_bytes(processes_here=3) == 100


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    none, some = tmp_path / "memory.max", tmp_path / "limit"
    none.write_text("max\n")
    some.write_text("123456\n")
    monkeypatch.setattr(memory, "_LIMITS", (str(none), str(tmp_path / "missing")))
    installed = machine_bytes()
    assert installed > 2**28
    monkeypatch.setattr(memory, "_LIMITS", (str(none), str(some)))
    assert machine_bytes() == 123456


def federated(clients=CLIENTS):
    draws = np.random.default_rng(0)
    columns = {
        "image": draws.normal(size=(clients * EXAMPLES, FEATURES)).astype(np.float32),
        "label": draws.integers(0, CLASSES, clients * EXAMPLES).astype(np.int64),
    }
    return FederatedData.from_arrays(columns, offsets=np.arange(clients + 1) * EXAMPLES)


@functools.cache
def experiment_of(chunk, evaluated=2, stream=False, with_rows=False):
    """Two pools, or one whose layer's outputs are most of what a client needs."""
    model = from_flax_linen(MLP(hidden=(512,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    training = LocalTraining(batch_size=EXAMPLES)
    pools = {"many": Pool(fed_avg(model, training), np.arange(CLIENTS), 6)}
    if with_rows:
        variates = scaffold(model, CLIENTS, training)
        pools["few"] = Pool(variates, np.arange(CLIENTS), 2)
    data = federated()
    algorithm = independent_pools(pools, data.columns, Execution("vmap", chunk))
    source = StreamedData(data) if stream else resident_data(data)
    splits = {"test": federated(evaluated)}
    return Experiment(algorithm, source, splits, rounds=2, evaluate_every=1, seeds=2)


@functools.cache
def bytes_of(chunk, evaluated=2):
    """On one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcodist.run.chunk_size.all_devices", lambda: None)
        patch.setattr("fedcodist.run.experiment.all_devices", lambda: None)
        patch.setattr(jax, "device_count", lambda: 1)
        return needed_bytes(experiment_of(chunk, evaluated))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_measured_is_what_runs(stream, monkeypatch):
    """Compiled programs refuse arguments of other shapes or on other devices."""
    for module in ("chunk_size", "experiment"):
        monkeypatch.setattr(f"fedcodist.run.{module}.all_devices", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    experiment = experiment_of(1, stream=stream, with_rows=True)
    compiled = chunk_size._lowered(experiment).compile()
    name = "train_streamed" if stream else "train"
    build, calls = programs.build_programs, []

    def measured(*arguments):
        calls.append(arguments)
        return compiled(*arguments)

    monkeypatch.setattr(
        "fedcodist.run.experiment.build_programs",
        lambda *settings: build(*settings)._replace(**{name: measured}),
    )
    outcome = run_experiment(experiment, show_progress=False)
    assert outcome.summary["finished"] and len(calls) == experiment.rounds


@pytest.mark.slow
def test_each_client_of_a_chunk_needs_its_activations():
    activations = EXAMPLES * 512 * 4
    two, three, six = (bytes_of(chunk) for chunk in (2, 3, 6))
    assert three - two > activations
    assert six - three == pytest.approx(3 * (three - two), rel=0.3)


@pytest.mark.slow
def test_data_that_are_evaluated_count():
    one, two = (sum(c.nbytes for c in federated(n).columns.values()) for n in (1, 2))
    assert bytes_of(2) - bytes_of(2, evaluated=1) == two - one


@pytest.mark.slow
def test_the_chunk_that_fits_is_chosen(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(chunk_size, "needed_bytes", bytes_of)
    needed = {chunk: bytes_of(chunk) for chunk in (1, 2, 3, 6)}
    assert sorted(needed.values()) == list(needed.values())

    def choose(limit):
        monkeypatch.setattr(chunk_size, "available_bytes", lambda processes: limit)
        chosen = []

        def experiment(chunk):
            chosen.append(chunk)
            return experiment_of(chunk) if len(chosen) == 1 else chunk

        return choose_chunk_size(experiment)

    for limit, expected in ((needed[6], 6), (needed[6] - 1, 3), (needed[3] - 1, 2), (needed[1], 1)):
        assert choose(limit) == ChunkSize(expected, needed[expected], limit)
    with pytest.raises(ValueError, match="not even 1 client at a time fits") as caught:
        choose(needed[1] - 1)
    assert "\n" not in str(caught.value)


def test_devices_share_the_cohort(monkeypatch):
    """Six clients over eight devices are one for each."""
    monkeypatch.setattr(chunk_size, "available_bytes", lambda processes: 1000)
    monkeypatch.setattr(chunk_size, "needed_bytes", lambda experiment: 10)
    assert choose_chunk_size(experiment_of) == ChunkSize(1, 10, 1000)
