"""Whole rounds of both codistillations against NumPy loops, on the batches the library draws."""

import functools
import itertools
from typing import Any, NamedTuple

import codistillation_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compilation import QUICK

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_opt
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData, Examples, Round
from fedcodist.core.local_training import LocalTraining, _example_order
from fedcodist.core.method import client_key
from fedcodist.core.model import Variables
from fedcodist.core.schedules import linear_decay
from fedcodist.data import augmentation
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, batch_of_step
from fedcodist.models.digits import MLP
from fedcodist.run.sources import resident_data

# Compiling is most of this file's time; the programs are too small for optimisation to pay.
CLIENT_SIZES = (1, 9, 4, 7, 2, 5, 3, 8)
NUM_UNLABELLED = 11  # less than two rounds use, so that the stream goes through several passes
HIDDEN = {"small": (5,), "large": (8,), "third": (4, 4)}
CLIENTS = {"small": range(8), "large": (1, 3, 4, 6, 7), "third": (0, 2, 3, 5)}
TRAINING = LocalTraining(batch_size=4, epochs=2)  # most clients' last batch is partial
TEACHING = {
    "small": TeachingHyper(0.02, 0.3, 0.2, 1.0, 2.0, 1.0),
    "large": TeachingHyper(0.01, 0.5, 0.05, 3.0, 0.5, 3.0),
    "third": TeachingHyper(0.03, 0.1, 0.4, 0.7, 1.0, 0.5),
}
RATES = {
    "small": FedAvgHyper(0.3, 0.05),
    "large": FedAvgHyper(0.3, 0.03),
    "third": FedAvgHyper(0.3, 0.04),
}


class Case(NamedTuple):
    method: str
    pools: tuple[str, ...]
    rounds: int
    total: int  # T of the schedules
    direction: str
    options: dict[str, Any]


CASES = {
    "merged": Case(
        "merged", ("small", "large"), 3, 7, "forward", {"alpha": {"small": 0.6, "large": 0.3}}
    ),
    "merged, three pools, reverse": Case(
        "merged",
        ("small", "large", "third"),
        2,
        7,
        "reverse",
        {"alpha": 0.8, "alpha_schedule": lambda alpha, round: alpha * (1 - round / 7)},
    ),
    "periodic, period 2": Case("periodic", ("small", "large"), 4, 7, "forward", {"period": 2}),
    "periodic, three pools, reverse": Case(
        "periodic", ("small", "large", "third"), 2, 3, "reverse", {"period": 1}
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("merged", "float64", 1e-8),
        pytest.param("merged, three pools, reverse", "float64", 1e-8, marks=pytest.mark.slow),
        ("periodic, period 2", "float64", 1e-8),
        pytest.param("periodic, period 2", "float32", 1e-3, marks=pytest.mark.slow),
        pytest.param("periodic, three pools, reverse", "float64", 1e-8, marks=pytest.mark.slow),
        pytest.param("merged", "float32", 1e-3, marks=pytest.mark.slow),
        pytest.param("merged, three pools, reverse", "float32", 1e-3, marks=pytest.mark.slow),
        pytest.param("periodic, three pools, reverse", "float32", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_rounds_agree_with_the_reference(name, dtype, tolerance):
    case = CASES[name]
    ours, rounds = _run_library(name, dtype)
    theirs = reference.run(
        case.method,
        _starts(case),
        rounds,
        {name: _reference_settings(name, case) for name in case.pools},
        num_rounds=case.total,
        period=case.options.get("period"),
    )
    for round, expected in enumerate(theirs):
        for name in case.pools:
            for layer, (actual, wanted) in enumerate(
                zip(ours[round][name], expected[name], strict=True)
            ):
                for got, want in zip(actual, wanted, strict=True):
                    assert got.dtype == dtype
                    error = np.linalg.norm(got - want) / np.linalg.norm(want)
                    assert error < tolerance, (round, name, layer, error)


def test_the_runs_compared_are_not_trivial():
    """Clients differ in size, some batches are partial, and the models move."""
    case = CASES["merged"]
    ours, rounds = _run_library("merged", "float64")
    examples = [client.num_examples for r in rounds for client in r.clients["small"]]
    assert len(set(examples)) > 2
    assert any(len(client.batches[-1][1]) < 4 for r in rounds for client in r.clients["small"])
    for name, start in _starts(case).items():
        assert np.linalg.norm(ours[-1][name][0][0] - start[0][0]) > 0.05


@functools.cache
def _run_library(name: str, dtype: str):
    """Runs rounds; returns every round's parameters and the reference's inputs."""
    with jax.enable_x64(dtype == "float64"):
        return _run_case(CASES[name], np.dtype(dtype))


def _run_case(case, dtype):
    data = _federated(dtype)
    unlabelled = {"image": np.random.default_rng(5).normal(size=(NUM_UNLABELLED, 2, 3, 1))}
    unlabelled = {name: column.astype(dtype) for name, column in unlabelled.items()}
    example = jnp.zeros((1, 2, 3, 1))
    pools = {
        name: Pool(
            fed_opt(
                from_flax_linen(MLP(hidden=HIDDEN[name], classes=3), example),
                TRAINING,
                schedule=linear_decay(case.total),
                hyper=RATES[name],
            ),
            np.array(CLIENTS[name]),
            3,
        )
        for name in case.pools
    }
    settings = _distillation(case.direction)
    build = {"merged": merged_codistillation, "periodic": periodic_codistillation}[case.method]
    algorithm = build(
        pools,
        data.columns,
        NUM_UNLABELLED,
        case.total,
        distillation=settings,
        teaching={name: TEACHING[name] for name in case.pools},
        **case.options,
    )
    resident = jax.tree.map(jnp.asarray, resident_data(data, {UNLABELLED: unlabelled}))
    root = jax.random.key(3)
    state = jax.eval_shape(algorithm.init, root)
    for name, start in _starts(case).items():
        state[name] = pools[name].method.set_model(
            state[name],
            Variables(_to_flax(start, dtype), {}),
            reset_optimizer=True,
        )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def one_round(state, round, hyper):
        selection = algorithm.select(round, root)
        inputs = resident.read(selection)
        state = algorithm.round(state, dict.fromkeys(pools), Round(round, root, inputs), hyper)[0]
        return state, selection

    trajectory, rounds = [], []
    for round in range(case.rounds):
        state, selection = one_round(state, round, algorithm.hyper)
        trajectory.append({name: _from_flax(state[name].params) for name in pools})
        indices = selection.examples[UNLABELLED]
        batches = []
        if int(indices[0, 0]) >= 0:
            key = keys.derive(root, "distillation", round)
            batches = list(np.asarray(_augmented_batches(resident.data_sets, indices, key)))
        clients = {
            name: [
                _client_round(data, int(client), client_key(root, round, name)) for client in drawn
            ]
            for name, drawn in selection.clients.items()
        }
        rounds.append(reference.RoundInputs(clients, dict.fromkeys(pools, batches)))
    return trajectory, rounds


def _distillation(direction):
    preprocess = augmentation.image_preprocess(augmentation.random_axis_flip)
    return Distillation(steps=3, batch_size=5, direction=direction, preprocess=preprocess)


@functools.partial(jax.jit, compiler_options=QUICK)
def _augmented_batches(rows, indices, key):
    unlabelled = Examples(rows[UNLABELLED], indices)

    def one_step(step):
        step_key = keys.derive(key, step)
        return batch_of_step(unlabelled, step, step_key, _distillation("forward"), None)[0]["image"]

    return jax.lax.map(one_step, jnp.arange(len(indices)))


@functools.partial(jax.jit, compiler_options=QUICK)
def _client_order(key, client, start, size):
    rows = ClientData({}, start, size, size, max(CLIENT_SIZES), False)
    client_order_key = keys.derive(key, client, "order")
    return _example_order(client_order_key, rows, TRAINING.batch_size, TRAINING.epochs)


def _client_round(data, client, key):
    size = int(data.client_sizes[client])
    order = np.asarray(_client_order(key, client, int(data.offsets[client]), size))
    batches = []
    for epoch in order[:, :size]:
        for first in range(0, size, TRAINING.batch_size):
            chosen = epoch[first : first + TRAINING.batch_size]
            batches.append((data.columns["image"][chosen], data.columns["label"][chosen]))
    return reference.ClientRound(batches, size)


def _reference_settings(name, case):
    teaching, rates = TEACHING[name], RATES[name]
    others = {other: TEACHING[other].weight for other in case.pools if other != name}
    alpha = case.options.get("alpha", 1.0)
    alpha = alpha[name] if isinstance(alpha, dict) else alpha
    schedule = case.options.get("alpha_schedule", lambda alpha, round: alpha)
    return reference.PoolSettings(
        client_learning_rate=rates.client_learning_rate,
        server_learning_rate=rates.server_learning_rate,
        distillation_learning_rate=teaching.learning_rate,
        distillation_decay=teaching.decay,
        teacher_temperature=teaching.temperature,
        self_teacher_weight=teaching.interpolation,
        self_teacher_temperature=teaching.self_teacher_temperature,
        teacher_weights={other: w / sum(others.values()) for other, w in others.items()},
        kl_direction=case.direction,
        alpha=lambda round: schedule(alpha, round),
    )


def _federated(dtype):
    generator = np.random.default_rng(4)
    rows = sum(CLIENT_SIZES)
    return FederatedData.from_arrays(
        {
            "image": generator.normal(size=(rows, 2, 3, 1)).astype(dtype),
            "label": generator.integers(0, 3, rows).astype(np.int32),
        },
        offsets=np.concatenate([[0], np.cumsum(CLIENT_SIZES)]),
    )


def _starts(case):
    """Models that differ clearly: otherwise they teach the same before and after an update."""
    starts = {}
    for index, name in enumerate(case.pools):
        generator = np.random.default_rng(10 + index)
        widths = (6, *HIDDEN[name], 3)
        # Drawn in float32, so that every precision starts from the same values.
        starts[name] = [
            (
                generator.normal(size=(before, after)).astype(np.float32),
                generator.normal(size=after).astype(np.float32) * np.float32(0.3),
            )
            for before, after in itertools.pairwise(widths)
        ]
    return starts


def _to_flax(layers, dtype):
    return {
        f"Dense_{index}": {"kernel": kernel.astype(dtype), "bias": bias.astype(dtype)}
        for index, (kernel, bias) in enumerate(layers)
    }


def _from_flax(params):
    return [
        (np.asarray(params[f"Dense_{i}"]["kernel"]), np.asarray(params[f"Dense_{i}"]["bias"]))
        for i in range(len(params))
    ]
