"""Ranks and singular values of clients' updates: NumPy's, over the rounds, and in the run folder."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.spectra import spectra
from fedcodist.compression.svd import svd
from fedcodist.config.experiment import build_experiment
from fedcodist.configs import digits_fed_kd
from fedcodist.core.inputs import Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, FEATURES, CLASSES, ROUNDS, RATE, START, END = 3, 20, 12, 4, 0.5, 0.5, 0.9


def test_ranks_and_singular_values_are_numpys():
    draws = np.random.default_rng(0)
    update = {
        "dense": draws.normal(size=(9, 7)) * 0.5 ** np.arange(7),
        "conv": draws.normal(size=(3, 3, 2, 5)) * 0.3 ** np.arange(5),
        "bias": draws.normal(size=7),
    }
    for progress, share in ((0.25, 0.6), (1.0, 0.9)):
        tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), update)
        found = spectra(0.5, 0.9)(tree, progress)
        assert set(found) == {
            f"{what}/{n}" for what in ("rank", "spectrum") for n in ("conv", "dense")
        }
        for name in ("conv", "dense"):
            matrix = update[name].reshape(-1, update[name].shape[-1])
            values = np.linalg.svd(matrix, compute_uv=False)
            np.testing.assert_allclose(found[f"spectrum/{name}"], values, rtol=1e-4, atol=1e-5)
            kept = np.cumsum(values**2) / np.sum(values**2)
            assert found[f"rank/{name}"] == 1 + np.argmax(kept >= share)
            half = spectra(0.5, 0.9)({name: tree[name].astype(jnp.bfloat16)}, progress)
            np.testing.assert_allclose(half[f"spectrum/{name}"], values, atol=0.01 * values[0])


@pytest.mark.slow
def test_a_run_tells_them_over_its_rounds(tmp_path):
    """As in plain loops in float64; as many bytes are sent as the ranks say."""
    draws = np.random.default_rng(1)
    columns = {
        "image": draws.normal(size=(8 * CLIENTS, FEATURES)).astype(np.float32),
        "label": draws.integers(0, CLASSES, 8 * CLIENTS).astype(np.int32),
    }
    data = FederatedData.from_arrays(columns, offsets=8 * np.arange(CLIENTS + 1))
    first = draws.normal(size=(FEATURES, CLASSES))
    model = Model(
        lambda key: Variables({"w": jnp.asarray(first, jnp.float32)}, {}),
        lambda variables, batch, **_: (batch["image"] @ variables.params["w"], {}),
        cross_entropy,
        {},
        CLASSES,
    )
    training = LocalTraining(optax.sgd, batch_size=8, epochs=1)
    method = fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    links = compressed(method, ROUNDS, svd(START, END), observe=spectra(START, END))
    algorithm = independent_pools({"pool": Pool(links, np.arange(CLIENTS), CLIENTS)}, columns)
    experiment = Experiment(
        algorithm, resident_data(data), {"train": data}, ROUNDS, evaluate_every=1
    )
    run_experiment(experiment, tmp_path, show_progress=False)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["split"] == "clients"]
    w = first.astype(np.float64)
    for round, record in enumerate(records):
        share = START + (END - START) * (round + 1) / ROUNDS
        sent, ranks, values = [], [], []
        for rows in np.split(np.arange(8 * CLIENTS), CLIENTS):
            images, labels = columns["image"][rows].astype(np.float64), columns["label"][rows]
            shares = np.exp(images @ w)
            shares /= shares.sum(axis=1, keepdims=True)
            update = RATE * images.T @ (shares - np.eye(CLASSES)[labels]) / len(rows)
            left, sigma, right = np.linalg.svd(update, full_matrices=False)
            rank = 1 + int(np.argmax(np.cumsum(sigma**2) / np.sum(sigma**2) >= share))
            sent.append((left[:, :rank] * sigma[:rank]) @ right[:rank])
            ranks.append(rank)
            values.append(sigma)
        assert record["client_rank/w"] == pytest.approx(np.mean(ranks), rel=1e-6)
        np.testing.assert_allclose(record["client_spectrum/w"], np.mean(values, 0), atol=1e-4)
        cost = 4 * (FEATURES + 1 + CLASSES) * record["client_rank/w"]
        assert record["client_bytes_up"] == pytest.approx(cost + 4, rel=1e-5)  # and the weight
        w = w - np.mean(sent, axis=0)
    assert records[0]["client_rank/w"] < records[-1]["client_rank/w"]


def test_a_config_asks_for_them():
    config = digits_fed_kd.get_config("fed_kd")
    config.training.compression.spectra = True
    experiment = build_experiment(config)
    data = jax.tree.map(jnp.asarray, experiment.data)
    inputs = jax.eval_shape(lambda: data.read(experiment.algorithm.select(0, jax.random.key(0))))
    state = jax.eval_shape(experiment.algorithm.init, jax.random.key(0))
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((4, *np.shape(leaf)), np.asarray(leaf).dtype),
        {"main": experiment.algorithm.client_states["main"].first},
    )
    metrics = jax.eval_shape(
        lambda state, rows, inputs: experiment.algorithm.round(
            state, rows, Round(0, jax.random.key(0), inputs), experiment.algorithm.hyper
        )[2],
        state,
        rows,
        inputs,
    )
    assert metrics["main/client_rank/Dense_0/kernel"].shape == ()
    assert metrics["main/client_spectrum/Dense_0/kernel"].shape == (32,)
