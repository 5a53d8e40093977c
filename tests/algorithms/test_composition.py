"""Codistillation composes: every codistillation over every local method."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_gkd import FedGKDHyper, fed_gkd
from fedcodist.algorithms.clients.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.client_states import device_client_states
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.digits import MLP
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, FEATURES, CLASSES, ROUNDS = (3, 5, 2, 4, 6, 3), 4, 3, 4
CLIENTS = {"small": np.arange(6), "large": np.array([1, 3, 4])}
UNLABELLED_IMAGES = np.random.default_rng(1).normal(size=(9, FEATURES)).astype(np.float32)
TRAINING = LocalTraining(batch_size=2, epochs=2)
QUICK_PAIRS = (("merged", "scaffold"),)


def method(local, hidden, clients):
    model = from_flax_linen(MLP(hidden=(hidden,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    rates = FedAvgHyper(0.1, 1.0)
    if local == "fed_avg":
        return fed_avg(model, TRAINING, optax.sgd, hyper=rates)
    if local == "fed_prox":
        return fed_prox(model, TRAINING, optax.sgd, hyper=FedProxHyper(*rates, 0.5))
    if local == "fed_gkd":
        return fed_gkd(model, TRAINING, 2, optax.sgd, hyper=FedGKDHyper(*rates, 2.0))
    return scaffold(model, clients, TRAINING, hyper=rates)


@functools.cache
def compiled(codistillation, local):
    """(pools, algorithm, programs, data); one pool each way to draw."""
    generator = np.random.default_rng(0)
    columns = {
        "image": generator.normal(size=(sum(SIZES), FEATURES)).astype(np.float32),
        "label": generator.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
    }
    clients = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))
    pools = {
        "small": Pool(method(local, 3, 6), CLIENTS["small"], 3),
        "large": Pool(method(local, 5, 3), CLIENTS["large"], 2),
    }
    common = dict(pools=pools, columns=columns, num_unlabelled=9, num_rounds=ROUNDS)
    distillation = Distillation(2, 4, mixup_beta=0)
    match codistillation:
        case "none":
            algorithm = independent_pools(pools, columns)
        case "periodic":
            algorithm = periodic_codistillation(period=2, distillation=distillation, **common)
        case "merged" | "merged, alpha 1":
            alpha = 1.0 if "1" in codistillation else 0.5
            algorithm = merged_codistillation(alpha=alpha, distillation=distillation, **common)
    data = resident_data(clients, {UNLABELLED: {"image": UNLABELLED_IMAGES}})
    return pools, algorithm, build_programs(algorithm, ROUNDS), data


@functools.cache
def trained(codistillation, local, rounds=ROUNDS):
    """(models' parameters, all client states) after some rounds."""
    pools, algorithm, programs, data = compiled(codistillation, local)
    rows = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 1))
    seeds, hyper = jnp.zeros(1, jnp.uint32), jax.tree.map(jnp.float32, algorithm.hyper)
    state, rows, _ = programs.train(programs.init(seeds), rows, seeds, 0, rounds, hyper, data)
    models = {n: pool.method.variables(state[n]).params for n, pool in pools.items()}
    return jax.tree.map(np.asarray, (models, rows))


def distance(left, right):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), left, right)))


@pytest.mark.parametrize(
    ("codistillation", "local"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in QUICK_PAIRS))
        for pair in itertools.product(
            ["periodic", "merged"], ["fed_avg", "fed_prox", "fed_gkd", "scaffold"]
        )
    ],
)
def test_every_pair(codistillation, local):
    models, rows = trained(codistillation, local)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((models, rows)))
    alone, _ = trained("none", local)
    assert distance(models, alone) > 1e-3
    # Codistillation does not reach clients: their states after the first round are the same.
    first, first_alone = trained(codistillation, local, 1)[1], trained("none", local, 1)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first, first_alone)


@pytest.mark.slow
@pytest.mark.parametrize("codistillation", ["periodic", "merged"])
@pytest.mark.parametrize("local", ["fed_prox", "fed_gkd", "scaffold"])
def test_the_local_method_tells(codistillation, local):
    models, of_fed_avg = (trained(codistillation, each)[0] for each in (local, "fed_avg"))
    assert distance(models, of_fed_avg) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("local", ["fed_prox", "scaffold"])
def test_alpha_one_is_the_local_method_alone(local):
    models, rows = trained("merged, alpha 1", local)
    alone = trained("none", local)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), (models, rows), alone)


@pytest.mark.parametrize("local", ["fed_avg", "fed_prox", "fed_gkd", "scaffold"])
def test_a_baseline_is_called_by_its_clients_method(local):
    """A run with FedProx is called FedProx, not FedAvg, in its progress and in tables."""
    columns = {"image": jax.ShapeDtypeStruct((9, FEATURES), np.float32)}
    columns |= {"label": jax.ShapeDtypeStruct((9,), np.int32)}
    pools = {"small": Pool(method(local, 3, 6), CLIENTS["small"], 3)}
    assert independent_pools(pools, columns).name == local
    assert independent_pools(pools, columns, name="ours").name == "ours"
    both = pools | {"large": Pool(method("fed_avg", 5, 3), CLIENTS["large"], 2)}
    names = {local: None, "fed_avg": None}
    assert independent_pools(both, columns).name == ", ".join(names)
