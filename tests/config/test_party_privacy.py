"""`algorithm.privacy` of a config: private sums of parties, their budgets, and mistakes."""

import jax
import jax.numpy as jnp
import pytest

from fedcodist.config import defaults
from fedcodist.config.experiment import build_experiment
from fedcodist.config.party_privacy import private_sum
from fedcodist.config.settings import check_settings
from fedcodist.configs import digits_parties, digits_private, digits_private_parties
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.method import PARTIES
from fedcodist.privacy.accounting import PrivacyBudget, spent
from fedcodist.run.experiment import check_experiment

pytest.importorskip("dp_accounting")


def of_method(name, **settings):
    config = digits_parties.get_config(name)
    if name == "fed_proto":
        config.algorithm.weighting = "parties"
    with config.unlocked():
        config.algorithm.privacy = defaults.party_privacy(**settings)
    return config


def test_the_multiplier_spends_nearly_all_of_the_budget():
    experiment = build_experiment(digits_private_parties.get_config("fed_md,8"))
    assert experiment.privacy == PrivacyBudget(1e-5, 8.0)
    (cohorts,) = experiment.algorithm.privacy.values()
    assert len(cohorts.clients) == cohorts.cohort_size == 100
    assert 7.9 < spent(experiment.algorithm.privacy, 5, experiment.privacy).epsilon <= 8
    check_experiment(experiment._replace(start="the parties after their phases"))


def test_a_smaller_budget_needs_more_noise():
    multipliers = {
        run: build_experiment(digits_private_parties.get_config(run))
        .algorithm.privacy[PARTIES]
        .noise_multiplier
        for run in ("fed_md,inf", "fed_md,8", "fed_md,2")
    }
    assert 0 == multipliers["fed_md,inf"] < multipliers["fed_md,8"] < multipliers["fed_md,2"]


def test_without_the_setting_nothing_is_counted():
    experiment = build_experiment(digits_private_parties.get_config("local_only"))
    assert experiment.privacy is None and not experiment.algorithm.privacy


@pytest.mark.parametrize("name", ["fed_md", "ds_fl", "fd", "fed_proto"])
def test_methods_that_send_scores_or_class_means_can_be_private(name):
    experiment = build_experiment(of_method(name, clip=1.0, noise_multiplier=2.0))
    check_experiment(experiment)
    assert experiment.algorithm.privacy[PARTIES].noise_multiplier == 2.0


def test_prototypes_weighted_by_examples_cannot_be_private():
    """Counts are cut to 1, so every party of a class would weigh the same, without a word."""
    config = of_method("fed_proto", noise_multiplier=2.0)
    config.algorithm.weighting = "examples"
    with pytest.raises(ValueError, match=r"^algorithm\.weighting must be 'parties' with"):
        build_experiment(config)


def test_weights_of_parties_are_bounded_by_the_largest():
    config = of_method("fed_md", noise_multiplier=2.0)
    with config.ignore_type():
        config.algorithm.weights = (1.0, 2.0, 0.5, 1.0, 1.0, 1.0)
    check_experiment(build_experiment(config))
    result = ClientResult(jnp.ones((1, 2)), {}, jnp.float32(3.0), None, {})
    _, weight = private_sum(config, 2.0).prepare(result, jax.random.key(0))
    assert weight == pytest.approx(2.0 / 6.5)  # FedMD divides weights by their sum
    config.algorithm.weights = (1.0, -2.0, 0.5, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"algorithm.weights\[1\] must be at least 0, got -2"):
        build_experiment(config)


@pytest.mark.parametrize("method", ["fd", "ds_fl"])
def test_weights_are_those_of_fed_md_alone(method):
    config = of_method(method, noise_multiplier=2.0)
    expected = private_sum(config, 2.0)
    with config.ignore_type():
        config.algorithm.weights = (1.0, 2.0, 0.5, 1.0, 1.0, 1.0)
    found = private_sum(config, 2.0)
    result = ClientResult(jnp.ones((1, 2)), {}, jnp.float32(3.0), None, {})
    if method == "ds_fl":
        key = jax.random.key(0)
        assert found.prepare(result, key)[1] == expected.prepare(result, key)[1]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fed_md", dict(), "algorithm.privacy must have a noise_multiplier, or an epsilon"),
        (
            "kt_pfl",
            dict(noise_multiplier=1.0),
            r"algorithm.privacy must be of one of \['ds_fl', 'fd', 'fed_md', 'fed_proto'\], got "
            "algorithm.name=kt_pfl",
        ),
    ],
)
def test_what_it_cannot_do_is_said(method, settings, message):
    with pytest.raises(ValueError, match=message):
        build_experiment(of_method(method, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(clip=0.0), "algorithm.privacy.clip must be above 0, got 0"),
        (dict(epsilon=0.0), "algorithm.privacy.epsilon must be above 0, got 0"),
        (dict(delta=1.0), "algorithm.privacy.delta must be above 0 and below 1, got 1"),
        (dict(noise_multiplier=-1.0), "algorithm.privacy.noise_multiplier must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check_settings(of_method("fed_md", **settings))


def test_weights_that_are_all_zero_are_one_line():
    config = digits_private_parties.get_config("fed_md,8")
    with config.ignore_type():
        config.algorithm.weights = (0,) * config.data.num_parties
    with pytest.raises(ValueError, match=r"^algorithm\.weights must not be all 0"):
        build_experiment(config)


def test_methods_with_pools_have_another_setting():
    config = digits_private.get_config("fed_avg,inf")
    with config.unlocked():
        config.algorithm.privacy = defaults.party_privacy(noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"algorithm.privacy must be of methods of parties, got"):
        build_experiment(config)
