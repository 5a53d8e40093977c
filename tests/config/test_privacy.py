"""`training.privacy` of a config: methods, cohorts and budgets that it makes, and its mistakes."""

import pytest

from fedcodist.config import defaults
from fedcodist.config.config_errors import as_settings
from fedcodist.config.experiment import build_experiment
from fedcodist.configs import digits_codist, digits_mhd, digits_parties, digits_private
from fedcodist.privacy.accounting import PrivacyBudget, spent
from fedcodist.run.experiment import check_experiment

pytest.importorskip("dp_accounting")


def built(run, **settings):
    config = digits_private.get_config(run)
    config.rounds = 3
    config.training.privacy.update(settings)
    return build_experiment(config)


@pytest.mark.slow
def test_one_multiplier_keeps_all_pools_within_the_budget():
    experiment = built("merged_codistillation,8")
    assert experiment.privacy == PrivacyBudget(1e-5, 8.0)
    pools = experiment.algorithm.privacy
    assert set(pools) == {"small", "large"} and pools["large"].cohort_size == 20
    assert len({pool.noise_multiplier for pool in pools.values()}) == 1
    spending = spent(pools, 3, experiment.privacy)
    assert 7.8 < spending.epsilon <= 8  # nearly all of it
    assert spending.by_pools["small"] < spending.epsilon  # nested pools: large clients pay twice
    assert pools["small"].most is not None


@pytest.mark.parametrize("method", digits_private.METHODS)
def test_without_noise_there_is_no_limit(method):
    experiment = built(f"{method},inf")
    pools = experiment.algorithm.privacy
    assert experiment.privacy == PrivacyBudget(1e-5)
    assert {pool.noise_multiplier for pool in pools.values()} == {0.0}
    assert all((pool.most is None) == (method == "fed_sdd") for pool in pools.values())


def test_banded_noise_has_clients_in_one_of_so_many_rounds():
    pytest.importorskip("jax_privacy")
    pools = built("fed_avg,inf", noise="banded", bands=2).algorithm.privacy
    assert {name: (pool.cycle, pool.most) for name, pool in pools.items()} == {
        "small": (2, 50),
        "large": (2, 20),
    }


@pytest.mark.slow
def test_a_budget_for_banded_noise_counts_the_rounds_of_one_client():
    pytest.importorskip("jax_privacy")
    experiment = built("fed_avg,8", noise="banded", bands=2)
    spending = spent(experiment.algorithm.privacy, 3, experiment.privacy)
    assert 7.8 < spending.epsilon <= 8
    assert spent(experiment.algorithm.privacy, 4, experiment.privacy).epsilon == spending.epsilon


def test_levels_of_hetero_fl_are_private():
    config = digits_codist.get_config("hetero_fl")
    config.algorithm.masked = False
    config.training.privacy = defaults.privacy(noise_multiplier=2.0, sampling="fixed")
    pools = build_experiment(config).algorithm.privacy
    assert {name: pool.noise_multiplier for name, pool in pools.items()} == {
        "small": 2.0,
        "large": 2.0,
    }


def test_examples_are_private_where_it_says_so():
    config = digits_private.get_config("fed_avg,inf")
    config.training.example_privacy = dict(clip=1.0, noise_multiplier=1.0, microbatch=5)
    build_experiment(config)
    config.training.example_privacy.microbatch = 3
    with pytest.raises(
        ValueError,
        match=r"^training.example_privacy.microbatch must divide",
    ):
        build_experiment(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(clip=0.0), "training.privacy.clip must be above 0, got 0.0."),
        (
            dict(noise_multiplier=-1.0),
            "training.privacy.noise_multiplier must be at least 0, got -1",
        ),
        (dict(delta=0.0), "training.privacy.delta must be above 0"),
        (
            dict(delta=1.0, epsilon=8.0),
            "training.privacy.delta must be above 0 and below 1, got 1.0.",
        ),
        (dict(sampling="shuffled"), "training.privacy.sampling must be one of"),
        (
            dict(noise_multiplier=None),
            "must have a noise_multiplier, or an epsilon from which it follows",
        ),
        (
            dict(most=3),
            "training.privacy.most must be between cohort_size=20 and the pool's 40 clients, got 3.",
        ),
        (
            dict(most=30, sampling="fixed"),
            "training.privacy.most must not be set for sampling='fixed', whose cohorts have one size",
        ),
        (dict(extra_clip=1.0), "training.privacy.extra_clip must be None for fed_avg"),
        (
            dict(quantile=0.5, noise_multiplier=30.0),
            "training.privacy.count_deviation must be above half",
        ),
        (
            dict(accountant="rdp", sampling="poisson"),
            "training.privacy.accountant must be 'pld' for a Poisson cohort",
        ),
        (dict(noise="pink"), "training.privacy.noise must be one of ['banded', 'independent']"),
        (dict(bands=2), "training.privacy.bands must not be set for noise='independent', got 2."),
        (dict(noise="banded"), "training.privacy.bands must be set for noise='banded'."),
        (
            dict(noise="banded", bands=2, sampling="fixed"),
            "training.privacy.sampling must be 'poisson' for noise='banded', whose clients can be",
        ),
        (
            dict(noise="banded", bands=4),
            "pools.large.cohort_size must be at most 10, the pool's 40 clients by "
            "training.privacy.bands=4, got 20.",
        ),
        (
            dict(noise="banded", bands=3),
            "training.privacy.bands must divide the pool's 40 clients, got 3.",
        ),
    ],
)
def test_bad_input_is_one_line(settings, message):
    with pytest.raises(ValueError) as raised, as_settings(digits_private.get_config("fed_avg,inf")):
        check_experiment(built("fed_avg,inf", **settings))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_cohort_larger_than_its_pool_is_named_before_the_noise_is_calibrated(sampling):
    config = digits_private.get_config("fed_avg,8")
    config.training.privacy.sampling = sampling
    config.pools.large.cohort_size = 50
    with (
        pytest.raises(
            ValueError, match=r"^pools\.large\.cohort_size must be at most .*40.*, got 50\.$"
        ),
        as_settings(config),
    ):
        build_experiment(config)


SETTINGS = {
    "privacy": dict(clip=1.0),
    "example_privacy": dict(clip=1.0, noise_multiplier=1.0),
    "secure_sum": dict(value_range=1.0),
    "compression": dict(uplink="svd"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("of", [digits_parties, digits_mhd])
def test_protections_that_parties_and_graphs_do_not_read_are_refused(name, of):
    config = of.get_config()
    with config.unlocked():
        config.training = dict(config.get("training") or {}) | {name: SETTINGS[name]}
    with pytest.raises(ValueError, match=rf"^training\.{name} must be of methods with pools, got"):
        build_experiment(config)


@pytest.mark.parametrize("setting", [dict(quantile=0.5), dict(noise="banded", bands=2)])
def test_levels_have_no_privacy_with_a_state(setting):
    config = digits_codist.get_config("hetero_fl")
    config.algorithm.masked = False
    config.training.privacy = defaults.privacy(sampling="fixed", noise_multiplier=1.0, **setting)
    with pytest.raises(ValueError, match=r"^training\.privacy\.(quantile|bands) must be None for"):
        build_experiment(config)


def test_a_method_of_parties_is_refused():
    from fedcodist.configs import digits_parties

    config = digits_parties.get_config("fed_md")
    with config.unlocked():
        config.training = dict(privacy=defaults.privacy(noise_multiplier=1.0))
    with pytest.raises(ValueError, match=r"training.privacy must be of methods with pools, got"):
        build_experiment(config)
