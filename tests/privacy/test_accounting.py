"""Epsilon against formulas and the library's own accountants, and what a run does with it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from private_runs import AVERAGING, CLIP, MODEL, RATE, SIZES, TRAINING, federated, one_pool, run
from scipy import stats

from fedcodist.algorithms.clients.ditto import DittoHyper, ditto
from fedcodist.algorithms.pools.assemble import private_cohorts
from fedcodist.algorithms.pools.cohorts import PoissonCohort
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.method import PrivateCohorts
from fedcodist.privacy import accounting
from fedcodist.privacy.accounting import (
    PrivacyBudget,
    calibrated_noise_multiplier,
    rounds_within,
    spent,
)
from fedcodist.privacy.private import private
from fedcodist.privacy.private_parties import counted
from fedcodist.run.experiment import Experiment
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.privacy_spent import check_privacy

dp_accounting = pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.usefixtures("compile_quickly")
RELATIONS = dp_accounting.NeighboringRelation
DELTA = 1e-5
NOISES = (2.0, 8.0, 64.0, 1024.0)


def cohorts(clients, size, z=1.0, most="all"):
    clients = np.asarray(clients)
    return PrivateCohorts(clients, z, size, len(clients) if most == "all" else most)


def test_everybody_in_every_round_is_the_gaussian_mechanism():
    """Balle and Wang 2018, theorem 8 (remembered): delta of T Gaussians, in closed form."""
    z, rounds = 3.0, 9
    epsilon = spent({"pool": cohorts(range(20), 20, z)}, rounds, PrivacyBudget(DELTA)).epsilon
    mu = rounds**0.5 / z
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    np.testing.assert_allclose(delta, DELTA, rtol=0.01)


def test_a_client_in_two_pools_pays_in_both():
    """Nested pools, against the library's accountant of the same events."""
    pools = {"small": cohorts(range(30), 6), "large": cohorts(range(10), 5, 2.0)}
    spending = spent(pools, 4, PrivacyBudget(DELTA))
    accountant = dp_accounting.pld.PLDAccountant(
        RELATIONS.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
    )
    gaussian = dp_accounting.GaussianDpEvent
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, gaussian(1.0)), 4)
    of_small = accountant.get_epsilon(DELTA)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, gaussian(2.0)), 4)
    np.testing.assert_allclose(spending.epsilon, accountant.get_epsilon(DELTA), rtol=1e-6)
    np.testing.assert_allclose(spending.by_pools["small"], of_small, rtol=1e-6)
    assert spending.clients == {"small": 20, "small, large": 10}
    assert spending.epsilon > of_small > 0
    apart = {"one": cohorts(range(10), 5), "two": cohorts(range(10, 20), 5)}
    alone = spent({"one": apart["one"]}, 4, PrivacyBudget(DELTA)).epsilon
    assert spent(apart, 4, PrivacyBudget(DELTA)).epsilon == alone  # nobody is in both


@pytest.mark.parametrize("z", [0.05, 0.02, 0.001])
def test_little_noise_is_the_gaussian_mechanism_too(z):
    """Losses are of size 1 / z^2. An interval that does not grow with them takes all memory."""
    everybody = {"pool": cohorts(range(20), 20, z)}
    found = spent(everybody, 20, PrivacyBudget(DELTA)).epsilon
    exact = dp_accounting.get_epsilon_gaussian(z / 20**0.5, DELTA)
    assert exact * (1 - 1e-6) < found < exact * (1 + 3e-4)
    # Beside a pool with much noise, whose losses need the same interval.
    both = everybody | {"noisy": cohorts(range(20), 20, 2.0)}
    assert found < spent(both, 20, PrivacyBudget(DELTA)).epsilon < found * 1.01


def test_next_to_no_noise_is_none():
    for most in ("all", None):
        pools = {"pool": cohorts(range(20), 10, 1e-9, most)}
        assert spent(pools, 20, PrivacyBudget(DELTA)).epsilon == np.inf


def test_a_fixed_size_is_accounted_as_what_it_is():
    """One client in place of another moves the sum by twice the bound, and only RDP knows the draw."""
    pools = {"pool": cohorts(range(30), 6, 4.0, None)}
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=RELATIONS.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        30, 6, dp_accounting.GaussianDpEvent(2.0)
    )
    accountant.compose(event, 7)
    found = spent(pools, 7, PrivacyBudget(DELTA)).epsilon
    np.testing.assert_allclose(found, accountant.get_epsilon(DELTA), rtol=1e-9)
    poisson = {"pool": cohorts(range(30), 6, 4.0)}
    by_rdp = spent(poisson, 7, PrivacyBudget(DELTA, accountant="rdp")).epsilon
    assert spent(poisson, 7, PrivacyBudget(DELTA)).epsilon < by_rdp < found


@pytest.mark.parametrize("size", [4, 20])
def test_a_fixed_size_costs_no_more_than_everybody_and_less_with_more_noise(size):
    """Renyi divergences alone say more than the Gaussian mechanism of a client drawn in all rounds."""
    of_all = [dp_accounting.get_epsilon_gaussian(z / 2 / 10**0.5, DELTA) for z in NOISES]
    found = [
        spent({"pool": cohorts(range(20), size, z, None)}, 10, PrivacyBudget(DELTA)).epsilon
        for z in NOISES
    ]
    assert all(ours <= bound * (1 + 1e-9) for ours, bound in zip(found, of_all, strict=True))
    assert found == sorted(found, reverse=True)
    if size == 20:
        np.testing.assert_allclose(found, of_all, rtol=1e-9)
    else:
        assert found[0] < 0.8 * of_all[0]


@pytest.mark.slow
def test_a_small_budget_needs_no_more_noise_than_everybodys(monkeypatch):
    monkeypatch.setattr("fedcodist.privacy.accounting._TOLERANCE", 1.0)
    half, all_ = (
        calibrated_noise_multiplier(0.12, DELTA, 1, {"pool": cohorts(range(10), size, 1.0, None)})
        for size in (5, 10)
    )
    assert dp_accounting.get_epsilon_gaussian(all_ / 2, DELTA) <= 0.12
    assert 50 < half <= all_ < 60


def test_a_bound_on_a_poisson_cohort_is_accounted_for():
    loose, tight = (
        spent({"pool": cohorts(range(12), 3, most=most)}, 3, PrivacyBudget(DELTA)).epsilon
        for most in (12, 4)
    )
    assert tight != loose  # with four slots a draw is cut in a sixth of the rounds


def test_calibration_is_given_what_private_cohorts_makes():
    pools = {"pool": Pool(AVERAGING, np.arange(6), 2)}
    with pytest.raises(
        TypeError, match=r"^pools\['pool'\] must be PrivateCohorts, as private_cohorts"
    ):
        calibrated_noise_multiplier(4.0, DELTA, 10, pools)


@pytest.mark.parametrize("needed", [0.0, 0.5, 1.4, 6.2, 40.0])
def test_a_bound_near_the_cohorts_size_is_searched_in_few_steps(needed, monkeypatch):
    """Steps of one tolerance took 20 minutes. `needed` tolerances are to be added for the bound."""
    tried = []

    def spent_stub(pools, rounds, budget):
        (pool,) = pools.values()
        bounded = pool.most < 20
        tried.append(bounded)
        least = 2.5 + bounded * needed * accounting._TOLERANCE
        return SimpleNamespace(epsilon=1.0 if pool.noise_multiplier >= least - 1e-9 else 3.0)

    monkeypatch.setattr(accounting, "spent", spent_stub)
    z = calibrated_noise_multiplier(2.0, DELTA, 10, {"pool": cohorts(range(20), 10, most=12)})
    assert 0 <= z - 2.5 - needed * accounting._TOLERANCE <= accounting._TOLERANCE + 1e-9
    assert sum(tried) <= 2 + 2 * np.log2(1 + needed) + 1


def test_calibration_spends_the_budget_and_not_more():
    pools = {"pool": cohorts(range(20), 20)}
    z = calibrated_noise_multiplier(2.0, DELTA, 10, pools)
    epsilon = lambda z: (
        spent(
            {"pool": pools["pool"]._replace(noise_multiplier=z)}, 10, PrivacyBudget(DELTA)
        ).epsilon
    )
    assert epsilon(z) <= 2.0 < epsilon(z - 2e-3)
    calibrated = {"pool": pools["pool"]._replace(noise_multiplier=z)}
    assert rounds_within(calibrated, 50, PrivacyBudget(DELTA, 2.0)) == 10
    assert rounds_within(calibrated, 50, PrivacyBudget(DELTA, 1e-3)) == 0


def test_a_spent_budget_ends_training_and_keeps_the_last_model(tmp_path):
    z = 20.0
    per_round = [
        spent({"pool": cohorts(range(6), 2, z)}, n, PrivacyBudget(DELTA)).epsilon for n in range(6)
    ]
    budget = PrivacyBudget(DELTA, (per_round[3] + per_round[4]) / 2)
    method = private(AVERAGING, CLIP, z, expected_clients=2)
    # As stopped after two rounds and started again: it goes on counting.
    settings = dict(poisson=PoissonCohort(), privacy=budget)
    of_two = run_in(tmp_path, method, 2, settings)
    assert "stopped" not in of_two.summary
    outcome = run_in(tmp_path, method, 5, settings)
    assert outcome.summary["rounds"] == 3
    assert outcome.summary["stopped"]["why"].startswith("the privacy budget is spent: epsilon ")
    three = one_pool(method, 2, rounds=3, poisson=PoissonCohort())
    np.testing.assert_array_equal(
        outcome.variables["pool"].params["w"], three.variables["pool"].params["w"]
    )
    # The budget ends between two evaluations as well.
    between = one_pool(method, 2, rounds=5, evaluate_every=2, **settings)
    assert between.summary["rounds"] == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line["epsilon"] for line in lines if line["split"] == "train"]
    np.testing.assert_allclose(found, per_round[:4], rtol=1e-5)
    summary = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    assert summary["neighbours"] == "add or remove a client" and summary["delta"] == DELTA
    with pytest.raises(RunFolderError, match=r"noise|privacy|clip"):
        run_in(tmp_path, private(AVERAGING, 2 * CLIP, z, expected_clients=2), 5, settings)


def test_a_run_that_ended_at_its_budget_does_not_grow(tmp_path):
    """Its last checkpoint does not say that it was stopped: it had all of its rounds."""
    method = private(AVERAGING, CLIP, 20.0, expected_clients=2)
    spends = spent({"pool": cohorts(range(6), 2, 20.0)}, 2, PrivacyBudget(DELTA)).epsilon
    settings = dict(poisson=PoissonCohort(), privacy=PrivacyBudget(DELTA, spends * 1.0001))
    of_two = run_in(tmp_path, method, 2, settings)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        grown = run_in(tmp_path, method, 4, settings)
        assert grown.summary["rounds"] == 2 and "budget is spent" in grown.summary["stopped"]["why"]
        assert grown.summary["final"] == of_two.summary["final"]
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    np.testing.assert_array_equal(
        grown.variables["pool"].params["w"], of_two.variables["pool"].params["w"]
    )


def test_on_client_splits_the_shared_model_has_epsilon_and_a_fine_tuned_one_has_none():
    method = private(AVERAGING, CLIP, 20.0, expected_clients=2)
    outcome = one_pool(
        method, 2, rounds=1, poisson=PoissonCohort(), client_splits={"own": federated()}
    )
    found = {
        (line["model"], line["split"]): line.get("epsilon")
        for line in outcome.records
        if line["round"] == 1
    }
    assert found["pool", "own"] == found["pool", "train"] > 0
    assert found["pool_fine_tuned", "own"] is None


def test_personal_models_have_no_epsilon():
    """They are trained without noise, and stay with their clients."""
    personal = ditto(MODEL, TRAINING, hyper=DittoHyper(RATE, 1.0))
    method = private(personal, CLIP, 20.0, expected_clients=2)
    outcome = one_pool(method, 2, rounds=1, poisson=PoissonCohort())
    found = {
        line["model"]: line.get("epsilon")
        for line in outcome.records
        if line["round"] == 1 and line["split"] == "train"
    }
    assert found["pool"] > 0 and found["pool_personal"] is None


def test_private_pools_do_not_start_from_another_run():
    """The earlier rounds would not be counted, and their noise would be drawn again."""
    method = private(AVERAGING, CLIP, 20.0, expected_clients=2)
    settings = dict(rounds=1, poisson=PoissonCohort())
    state = one_pool(method, 2, **settings).state
    with pytest.raises(ValueError, match=r"^start must be None for a private algorithm") as raised:
        one_pool(method, 2, start=state, **settings)
    assert "\n" not in str(raised.value)


def test_a_private_pool_called_parties_does_not_start_from_another_run():
    """The name is that of parties' cohorts, whose pre-training shares nothing."""
    method = private(AVERAGING, CLIP, 20.0, expected_clients=2)
    pools = {"parties": Pool(method, np.arange(len(SIZES)), 2, PoissonCohort())}
    algorithm = independent_pools(pools, federated().columns)
    experiment = Experiment(algorithm, federated(), {}, rounds=1, start=())
    with pytest.raises(ValueError, match=r"^start must be None for a private algorithm"):
        check_privacy(experiment)


@pytest.mark.parametrize("of", ["pools", "parties"])
def test_epsilon_is_of_the_clients_that_the_algorithm_draws_itself(of):
    """It would be too small for a client who takes part more often."""
    if of == "pools":
        method = private(AVERAGING, CLIP, 20.0, expected_clients=2)
        pools = {"pool": Pool(method, np.arange(len(SIZES)), 2, PoissonCohort())}
        algorithm = independent_pools(pools, federated().columns)
    else:
        averaging = independent_pools(
            {"pool": Pool(AVERAGING, np.arange(len(SIZES)), 2)}, federated().columns
        )
        algorithm = counted(averaging, 20.0)
    experiment = Experiment(algorithm, federated(), {}, rounds=1)
    check_privacy(experiment)
    others = algorithm._replace(select=lambda round, key: algorithm.select(0, key))
    with pytest.raises(
        ValueError, match=r"^algorithm\.select must be the algorithm's own"
    ) as raised:
        check_privacy(experiment._replace(algorithm=others))
    assert "\n" not in str(raised.value)


def run_in(folder, method, rounds, settings):
    settings = dict(settings)
    pool = Pool(method, np.arange(len(SIZES)), 2, settings.pop("poisson"))
    algorithm = independent_pools({"pool": pool}, federated().columns)
    return run(algorithm, rounds, workdir=folder, **settings)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda: PrivacyBudget(0.0).check("privacy"),
            "privacy.delta must be above 0 and below 1, got 0.",
        ),
        (
            lambda: PrivacyBudget(1.0).check("privacy"),
            "privacy.delta must be above 0 and below 1, got 1.0.",
        ),
        (
            lambda: PrivacyBudget(1e-15).check("privacy"),
            "privacy.delta must be at least 1e-14, below which the accountants' probabilities are "
            "rounded away, got 1e-15.",
        ),
        (lambda: PrivacyBudget(1e-5, -1.0).check("privacy"), "privacy.epsilon must be above 0"),
        (
            lambda: PrivacyBudget(1e-5, None, "rényi").check("privacy"),
            "privacy.accountant must be 'pld' or 'rdp', got 'rényi'.",
        ),
        (
            lambda: spent(
                {"a": cohorts(range(5), 2), "b": cohorts(range(5), 2, most=None)},
                1,
                PrivacyBudget(),
            ),
            "pools must all have Poisson cohorts, or all cohorts of a fixed size",
        ),
        (
            lambda: spent(
                {"a": cohorts(range(5), 2, most=None)}, 1, PrivacyBudget(accountant="pld")
            ),
            "accountant must be 'rdp' for cohorts of a fixed size",
        ),
        (
            lambda: spent({"a": cohorts(range(5), 2, most=3)}, 1, PrivacyBudget(accountant="rdp")),
            "accountant must be 'pld' for a Poisson cohort with a bound, got 'rdp' for 'a'.",
        ),
        (
            lambda: calibrated_noise_multiplier(
                4.0, DELTA, 5, {"a": cohorts(range(20), 30, most=None)}
            ),
            "pools['a'].cohort_size must be at most the 20 clients that can be drawn in a round, got ",
        ),
        (lambda: spent({}, 1, PrivacyBudget()), "pools must hold at least one pool with a private"),
        (
            lambda: calibrated_noise_multiplier(
                4.0, DELTA, 10, private_cohorts({"pool": Pool(AVERAGING, np.arange(6), 2)})
            ),
            "pools must hold at least one pool with a private method, got none",
        ),
        (lambda: one_pool(AVERAGING, privacy=PrivacyBudget()), "privacy must be None"),
    ],
)
def test_bad_input_is_one_line(mistake, message):
    with pytest.raises(ValueError) as raised:
        mistake()
    assert message in str(raised.value) and "\n" not in str(raised.value)
