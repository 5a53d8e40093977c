"""Fed-ensemble: which clients train which model in which round, and the ensemble."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.fed_ensemble import fed_ensemble
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.local_training import LocalTraining
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3, 4, 1), 3, 4
RATE, EPOCHS = 0.3, 2
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
MODEL = softmax_regression(FEATURES, CLASSES, several_starts=True)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


@functools.cache
def algorithm(num_models, cohort=len(SIZES), clients=len(SIZES)):
    method = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    pool = Pool(method, np.arange(clients), cohort)
    return fed_ensemble(pool, federated().columns, num_models)


compiled = functools.cache(jax.jit)


def groups(algorithm, round, key=0):
    """Model -> its clients."""
    found = compiled(algorithm.select)(round, jax.random.key(key)).clients
    return {name: sorted(clients.tolist()) for name, clients in found.items()}


@settings(max_examples=8)
@given(st.sampled_from([(1, 6), (3, 6), (2, 4)]), st.integers(0, 3), st.integers(0, 99))
def test_in_k_rounds_no_client_trains_a_model_twice(sizes, block, key):
    """Of all clients each trains every model once."""
    num_models, cohort = sizes
    ours = algorithm(num_models, cohort)
    rounds = [groups(ours, block * num_models + turn, key) for turn in range(num_models)]
    for name in rounds[0]:
        trainers = list(itertools.chain(*(each[name] for each in rounds)))
        assert len(trainers) == len(set(trainers)) == cohort
        assert all(len(each[name]) == cohort // num_models for each in rounds)
    for each in rounds:
        assert len(set(itertools.chain(*each.values()))) == cohort


def test_strata_are_drawn_anew_after_k_rounds():
    ours = algorithm(2)
    drawn = [tuple(map(tuple, groups(ours, 2 * block).values())) for block in range(6)]
    assert len(set(drawn)) > 2


def test_other_clients_are_drawn_in_every_round():
    ours = algorithm(2, cohort=2)
    everybody = {c for n in range(12) for c in itertools.chain(*groups(ours, n).values())}
    assert everybody == set(range(len(SIZES)))


def plain_loop(models, selections):
    for selection in selections:
        for name, clients in selection.items():
            results = []
            for c in clients:
                rows = slice(sum(SIZES[:c]), sum(SIZES[: c + 1]))
                images = federated().columns["image"][rows].astype(np.float64)
                one_hot = np.eye(CLASSES)[federated().columns["label"][rows]]
                w = models[name]
                for _ in range(EPOCHS):
                    shares = np.exp(images @ w)
                    shares /= shares.sum(1, keepdims=True)
                    w = w - RATE * images.T @ (shares - one_hot) / len(images)
                results.append(w)
            weights = [SIZES[c] for c in clients]
            models = models | {name: np.average(results, axis=0, weights=weights)}
    return models


def test_rounds_are_a_plain_loop_and_the_ensemble_is_the_mean_of_logits():
    ours = algorithm(3)
    outcome = run_experiment(
        Experiment(ours, resident_data(federated(), {}), {"train": federated()}, 4),
        show_progress=False,
    )
    init = {
        name: np.float64(ours.predictors[name].variables(ours.init(jax.random.key(0))).params["w"])
        for name in ours.client_states
    }
    assert len({w.tobytes() for w in init.values()}) == 3
    expected = plain_loop(init, [groups(ours, round) for round in range(4)])
    for name, w in expected.items():
        np.testing.assert_allclose(outcome.variables[name].params["w"][0], w, rtol=1e-4, atol=1e-6)
    images = federated().columns["image"]
    logits = np.mean([images @ w for w in expected.values()], axis=0)
    own = np.take_along_axis(logits, federated().columns["label"][:, None], axis=1)[:, 0]
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - own)
    found = outcome.summary["final"]["ensemble"]["train"]["loss"][0]
    assert found == pytest.approx(loss, rel=1e-4)


def test_of_one_model_it_is_fed_avg():
    ours = algorithm(1, cohort=3)
    method = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    theirs = independent_pools(
        {"main": Pool(method, np.arange(len(SIZES)), 3)}, federated().columns
    )
    for round in range(4):
        assert groups(ours, round) == groups(theirs, round)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: algorithm(0), "num_models must be at least 1, got 0"),
        (lambda: algorithm(4), "num_models must divide the cohort's 6 clients .*, got 4"),
        (lambda: algorithm(2, cohort=7), r"^pool\.cohort_size must be between 1 and"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_client_is_evaluated_with_the_ensemble():
    own, sizes = federated(), np.array(SIZES)
    outcome = run_experiment(
        Experiment(algorithm(2), resident_data(own), {}, rounds=1, client_splits={"own": own})
    )
    lines = {r["model"]: r["loss"] for r in outcome.records if r["split"] == "own"}
    weights = outcome.state.values()
    logits = np.mean([own.columns["image"] @ server.params["w"][0] for server in weights], axis=0)
    shifted = logits - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(logits)), own.columns["label"]]
    of_clients = [part.mean() for part in np.split(losses, np.cumsum(sizes)[:-1])]
    assert lines["ensemble"] == pytest.approx(np.mean(of_clients), rel=1e-4)
