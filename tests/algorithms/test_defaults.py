"""What a method does when nobody sets anything: it trains, on scikit-learn's digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.models.digits import large_digits, small_digits

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, ROUNDS = 30, 20
EXAMPLE = jnp.zeros((1, 8, 8, 1))


def scale(batch, key, positions):
    return {**batch, "image": (batch["image"] / 16.0 - 0.3) / 0.37}


@functools.cache
def digits():
    return fc.load_digits_federated(num_clients=CLIENTS)


def small():
    return fc.from_flax_linen(small_digits(), EXAMPLE)


def accuracy(method, model="main"):
    data = digits()
    pool = fc.Pool(method, np.arange(CLIENTS), cohort_size=10)
    outcome = fc.run_experiment(
        fc.Experiment(
            fc.independent_pools({"main": pool}, data["train"].columns),
            fc.resident_data(data["train"]),
            {"test": data["test"]},
            ROUNDS,
            evaluate_every=ROUNDS,
            evaluation_preprocess=scale,
        ),
        show_progress=False,
    )
    return outcome.summary["final"][model]["test"]["accuracy"][0]


def training(**settings):
    return fc.LocalTraining(batch_size=10, preprocess=scale, **settings)


def test_fed_avg_learns_digits():
    assert accuracy(fc.fed_avg(small(), training())) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed_prox", "fed_gkd", "fed_ntd", "fed_opt", "fetch_sgd"])
def test_other_methods_of_one_model_learn_digits(name):
    assert accuracy(getattr(fc, name)(small(), training())) > 0.7


@pytest.mark.slow
def test_scaffold_learns_digits():
    assert accuracy(fc.scaffold(small(), CLIENTS, training())) > 0.7


@pytest.mark.slow
def test_fed_kd_learns_digits():
    teacher = fc.from_flax_linen(large_digits(), EXAMPLE)
    local = fc.LocalTraining(optax.adam, batch_size=10, preprocess=scale)
    method = fc.fed_kd(teacher, small(), digits()["train"].columns, local)
    assert accuracy(method) > 0.6


def hyper_classes():
    return (fc.FedAvgHyper, fc.FedProxHyper, fc.FedGKDHyper, fc.FedNTDHyper, fc.MoonHyper)


def test_the_default_server_takes_the_clients_mean():
    """By every method that has one: SGD of rate 1."""
    assert all(cls().server_learning_rate == 1 for cls in hyper_classes())
    methods = {
        "fed_avg": fc.fed_avg(small()),
        "fed_prox": fc.fed_prox(small()),
        "fed_gkd": fc.fed_gkd(small()),
        "fed_ntd": fc.fed_ntd(small()),
        "moon": fc.moon(small()),
        "scaffold": fc.scaffold(small(), CLIENTS),
        "fed_dropout": fc.fed_dropout(small(), small(), ("Dense_0", "Dense_1")),
    }
    for name, method in methods.items():
        server = jax.eval_shape(method.init, jax.random.key(0))
        averaging = getattr(server, "averaging", server)
        assert not jax.tree.leaves(averaging.optimizer_state), name  # Adam's would have moments


def test_fed_opt_is_fed_avg_with_adam_on_the_server():
    method = fc.fed_opt(small())
    server = jax.eval_shape(method.init, jax.random.key(0))
    assert len(jax.tree.leaves(server.optimizer_state)) > len(jax.tree.leaves(server.params))
    assert method.hyper.server_learning_rate < 1


def test_mhd_weighs_heads_as_much_as_the_task():
    assert fc.MHDHyper().head_weight == 1
