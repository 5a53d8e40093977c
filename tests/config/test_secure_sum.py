"""`training.secure_sum` of a config: what is built, and mistakes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from softmax_regression import softmax_regression

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.config import pool_methods
from fedcodist.config.experiment import build_experiment
from fedcodist.config.secure_sum import with_secure_sum
from fedcodist.configs import digits_codist, digits_methods, digits_secure_sum
from fedcodist.core.aggregation import ClientResult


def built(run, **differs):
    config = digits_secure_sum.get_config(run)
    config.training.secure_sum.update(differs)
    return build_experiment(config).algorithm


def test_the_largest_client_is_the_largest_weight():
    algorithm = built("fed_avg,secure")
    assert algorithm.name == "fed_avg" and "main" in algorithm.predictors
    config = digits_secure_sum.get_config("fed_avg,secure")
    assert config.training.secure_sum.max_weight is None and config.training.secure_sum.bits == 32
    assert digits_secure_sum.get_config("fed_avg").training.get("secure_sum") is None


def test_dropouts_are_as_the_config_says():
    config = digits_secure_sum.get_config("fed_avg,secure")
    assert config.training.secure_sum.dropout == 0
    data = SimpleNamespace(splits={"train": SimpleNamespace(client_sizes=np.array([3, 5]))})
    one = ClientResult(jnp.ones(2), {}, jnp.float32(1), None, {})
    counted = []
    for dropout in (0.0, 0.25):
        config.training.secure_sum.dropout = dropout
        method = with_secure_sum(config, fed_avg(softmax_regression(2, 2)), 4, data)
        prepared = method.reduce.prepare(one, jax.random.key(0))
        counted.append(len(jax.tree.leaves(prepared.attendance)))
    assert counted == [0, 2]  # who is there, and who dropped out


@pytest.mark.parametrize(
    ("method", "groups", "clients"),
    [
        ("fed_avg", {}, 8),
        ("fed_sdd", dict(num_models=4), 2),
        ("fed_sdd", dict(num_models=2, group_sizes=[3, 5]), 5),
        ("fed_ensemble", dict(num_models=2), 4),
    ],
)
def test_a_sum_is_of_as_many_clients_as_train_one_model(monkeypatch, method, groups, clients):
    counted = []

    def record(config, method, num_clients, data):
        counted.append(num_clients)
        return method

    monkeypatch.setattr(pool_methods, "with_secure_sum", record)
    config = digits_methods.get_config(method)
    config.algorithm.update(groups)
    build_experiment(config)
    assert counted == [clients] and config.pools.main.cohort_size == 8


def test_a_client_alone_has_no_secure_sum():
    config = digits_secure_sum.get_config("fed_sdd,secure")
    config.algorithm.num_models = 8
    message = (
        r"^training\.secure_sum must sum .* at least 2 clients, .* a group of a cohort, of 1\.$"
    )
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (dict(value_range=0.0), r"^training\.secure_sum\.value_range must be above 0"),
        (dict(bits=40), r"^training\.secure_sum\.bits must be at most 32, got 40"),
        (dict(bits=2), r"^training\.secure_sum\.bits must be enough for 8 clients"),
        (dict(max_weight=-1.0), r"^training\.secure_sum\.max_weight must be above 0"),
        (
            dict(dropout=1.0),
            r"^training\.secure_sum\.dropout must be at least 0 and below 1, got 1\.0",
        ),
        (
            dict(dropout=-0.5),
            r"^training\.secure_sum\.dropout must be at least 0 and below 1, got -0\.5",
        ),
        (dict(range=1.0), r"^training\.secure_sum\.range is not a setting of secure_sum"),
    ],
)
def test_mistakes_are_one_line(differs, message):
    with pytest.raises(ValueError, match=message) as raised:
        built("fed_avg,secure", **differs)
    assert "\n" not in str(raised.value)


def test_levels_of_one_network_have_none():
    config = digits_codist.get_config("hetero_fl")
    config.training.secure_sum = dict(value_range=1.0)
    with pytest.raises(ValueError, match="training must have neither a method, compression nor"):
        build_experiment(config)
