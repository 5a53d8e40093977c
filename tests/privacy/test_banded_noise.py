"""Noise that is correlated over rounds: against NumPy, who is drawn when, what it costs, resuming."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from private_runs import (
    AVERAGING,
    CLASSES,
    CLIP,
    FEATURES,
    MODEL,
    RATE,
    SIZES,
    federated,
    one_pool,
    run,
)

from fedcodist.algorithms.clients.fetch_sgd import fetch_sgd
from fedcodist.algorithms.pools.assemble import private_cohorts
from fedcodist.algorithms.pools.cohorts import PoissonCohort, number_drawn
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.communication import communication_of
from fedcodist.core.method import client_key, message_to_reduce
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.privacy.accounting import PrivacyBudget, calibrated_noise_multiplier, spent
from fedcodist.privacy.adaptive_clipping import AdaptiveClip
from fedcodist.privacy.banded_noise import BandedNoise, correlated, first_noise_state, strategy
from fedcodist.privacy.private import private

dp_accounting = pytest.importorskip("dp_accounting")
jax_privacy = pytest.importorskip("jax_privacy", reason="the matrices are jax-privacy's")
pytestmark = pytest.mark.usefixtures("compile_quickly")
ROUNDS, BANDS, DELTA = 6, 3, 1e-5
EVERYONE = np.arange(len(SIZES))


def matrix(bands, rounds=ROUNDS):
    """C, float64 [rounds, rounds], as it is optimised for 6 rounds."""
    column = strategy(bands, ROUNDS).astype(np.float64)
    return sum(np.diag(np.full(rounds - k, c), -k) for k, c in enumerate(column))


def banded(z=1.0, bands=BANDS, rounds=ROUNDS, method=AVERAGING, **settings):
    noise = BandedNoise(z, bands, rounds)
    return private(method, CLIP, noise, expected_clients=1, **settings)


@pytest.mark.parametrize("bands", [1, 3])
def test_a_rounds_noise_is_a_row_of_the_inverse_times_independent_draws(bands):
    noise = BandedNoise(1.0, bands, ROUNDS)
    rows = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    state, found = first_noise_state(noise, {"update": {"w": jnp.zeros(5)}}), []
    for row in rows:
        alone = jnp.ones(3)  # of a part whose noise stays independent
        draws, state = correlated({"update": {"w": jnp.asarray(row)}, "extra": alone}, state)
        assert draws["extra"] is alone
        found.append(draws["update"]["w"])
    expected = np.linalg.solve(matrix(bands, 12), rows.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if bands == 1:
        np.testing.assert_array_equal(found, rows)


def test_the_matrix_has_columns_of_norm_1_and_sums_have_less_noise():
    """That of a sum of all updates so far, root mean square over rounds, from C in NumPy."""

    def deviation(of_matrix):
        sums = np.tril(np.ones((ROUNDS, ROUNDS))) @ np.linalg.inv(of_matrix)
        return np.sqrt(np.mean(np.sum(sums**2, axis=1)))

    independent, least = deviation(matrix(1)), deviation(matrix(3))
    assert least < 0.81 * independent
    column = strategy(3, ROUNDS)
    np.testing.assert_allclose(np.linalg.norm(column), 1, rtol=1e-6)
    # Its neighbours are worse: it is optimised.
    for change in np.random.default_rng(0).normal(size=(20, 3)) * 0.05:
        other = (column + change) / np.linalg.norm(column + change)
        assert deviation(sum(np.diag(np.full(6 - k, c), -k) for k, c in enumerate(other))) > least


class Wide:
    """A model of 2,000 parameters."""

    params, mutable = {"w": jnp.zeros(2000)}, {"mean": jnp.zeros(2000)}


WIDE = AVERAGING._replace(init=lambda key: Wide(), broadcast=lambda server: server)


def noise_of_rounds(method, clips):
    """What the server adds to a sum of nothing in each round, by its clip there; [rounds, 2000]."""
    server, found = method.init(jax.random.key(0)), []
    zeros = jnp.zeros(2000)
    for round, clip in enumerate(clips):
        server = server._replace(clip=jnp.float32(clip))
        message = message_to_reduce(method, server, method.broadcast(server))
        sent = ClientResult({"w": zeros}, {"mean": zeros}, jnp.float32(1), None, {})
        total = method.reduce.prepare(sent, None)
        aggregate = method.reduce.finalize(total, message, jax.random.key(round))
        if method.server_message is not None:
            server = server._replace(noise=aggregate.extra.noise)
        found.append(aggregate.pseudo_gradient["w"])
    return np.array(found)


def test_the_servers_noise_has_the_covariance_of_the_inverse():
    """Two bounded parts, so the deviation is sqrt(2) z times the bound. Clips may differ."""
    clips = CLIP * 2.0 ** np.arange(ROUNDS)
    found = noise_of_rounds(banded(3.0, method=WIDE, statistics_clip=1.0), clips)
    inverse = np.linalg.inv(matrix(3))
    expected = inverse @ inverse.T
    found = np.cov(found / (2**0.5 * 3.0 * clips[:, None]))
    scale = np.sqrt(np.diag(expected))
    assert np.abs((found - expected) / np.outer(scale, scale)).max() < 0.12  # five deviations
    assert expected[1, 0] < -0.3 * expected[0, 0]  # so independent noise would be far off


def test_one_band_is_independent_noise_to_the_bit():
    one = private(WIDE, CLIP, BandedNoise(1.5, 1, ROUNDS), expected_clients=1)
    independent = private(WIDE, CLIP, 1.5, expected_clients=1)
    assert independent.server_message is None
    found, expected = noise_of_rounds(one, [CLIP] * 3), noise_of_rounds(independent, [CLIP] * 3)
    np.testing.assert_array_equal(found, expected)
    assert np.std(expected) > CLIP


@pytest.mark.parametrize(("bands", "expected"), [(1, None), (BANDS, ROUNDS)])
def test_a_run_may_not_be_longer_than_its_correlated_noise(bands, expected):
    method = private(WIDE, CLIP, BandedNoise(1.5, bands, ROUNDS), expected_clients=1)
    assert method.num_rounds == expected
    fewer = private(WIDE._replace(num_rounds=2), CLIP, BandedNoise(1.5, bands, ROUNDS), 1)
    assert fewer.num_rounds == 2


def draw(round, count):
    """The clients of a round of one pool, as they are selected."""
    pool = Pool(banded(), EVERYONE, 1, PoissonCohort(cycle=BANDS))
    algorithm = independent_pools({"pool": pool}, federated().columns)
    return algorithm.select(round, jax.random.key(0)).clients["pool"].tolist()[:count]


def step(client, w):
    """A client's update at a model after one step on all of its examples, in float64, clipped."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    shares = np.exp(images @ w)
    shares /= shares.sum(1, keepdims=True)
    labels = np.eye(CLASSES)[federated().columns["label"][rows]]
    update = RATE * images.T @ (shares - labels) / len(labels)
    return update * min(1, CLIP / np.linalg.norm(update))


def test_a_run_is_a_numpy_loop_over_rounds():
    """Cohorts of one group after the other, and noise drawn again from keys that the server derives."""
    z, root = 0.8, jax.random.key(0)
    w, draws = np.asarray(MODEL.init(None).params["w"], np.float64), []
    for round in range(3):
        count = int(number_drawn(len(SIZES) // BANDS, 1, "pool", round, root))
        clients = draw(round, count)
        assert all(client % BANDS == round % BANDS for client in clients)
        key = keys.derive(client_key(root, round, "pool"), "reduce", "pool", "noise", "update")
        normal = jax.random.normal(key, (FEATURES, CLASSES))
        draws.append(np.asarray(normal, np.float64))
        noise = np.tensordot(np.linalg.inv(matrix(BANDS))[round, : round + 1], draws, 1)
        w = w - (sum(step(client, w) for client in clients) + z * CLIP * noise)
    found = one_pool(banded(z), 1, PoissonCohort(cycle=BANDS), rounds=3)
    np.testing.assert_allclose(found.variables["pool"].params["w"][0], w, atol=2e-6)


def test_the_noises_state_stays_with_the_server():
    method = banded()
    server = method.init(jax.random.key(0))
    assert jax.tree.leaves(server.noise.buffers) and method.broadcast(server).noise is None
    plain = private(AVERAGING, CLIP, 1.0, expected_clients=1)
    columns = federated().columns
    assert communication_of(method, columns) == communication_of(plain, columns)


@pytest.mark.slow
def test_with_a_clip_that_moves():
    """A part of the budget is the count's."""
    adaptive = AdaptiveClip(quantile=0.5, learning_rate=0.3, count_deviation=3.0)
    outcome = one_pool(banded(2.0, adaptive=adaptive), 1, PoissonCohort(cycle=BANDS), rounds=3)
    state = outcome.state["pool"]
    assert state.clip[0] != np.float32(CLIP) and state.noise_multiplier[0] > 2
    assert np.any(state.noise.buffers["update"]["w"])


def test_nobody_is_drawn_twice_in_a_cycle():
    pool = Pool(banded(), EVERYONE, 1, PoissonCohort(cycle=3))
    select = jax.jit(independent_pools({"pool": pool}, federated().columns).select)
    key, last = jax.random.key(5), {}
    for round in range(60):
        count = int(number_drawn(2, 1, "pool", round, key))
        drawn = select(round, key).clients["pool"].tolist()
        assert len(set(drawn)) == 2
        for client in drawn[:count]:
            assert round - last.get(client, -3) >= 3
            last[client] = round
    assert set(last) == set(range(6))  # and everybody is drawn at some time


@pytest.mark.parametrize("most", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_epsilon_is_the_librarys(most):
    """jax-privacy's own accountant of banded noise, for all numbers of rounds."""
    from jax_privacy import accounting

    pools = {
        "pool": Pool(
            private(AVERAGING, CLIP, BandedNoise(1.3, 3, ROUNDS), 3),
            np.arange(30),
            3,
            PoissonCohort(most or 10, cycle=3),
        )
    }
    config = accounting.PldAccountantConfig(value_discretization_interval=1e-3)
    accountant = accounting.DpsgdTrainingAccountant(config)
    parameters = accounting.DpParams(
        noise_multipliers=1.3,
        num_samples=30,
        batch_size=3,
        delta=DELTA,
        cycle_length=3,
        truncated_batch_size=most,
    )
    cohorts = private_cohorts(pools)
    found = [spent(cohorts, rounds, PrivacyBudget(DELTA)).epsilon for rounds in range(8)]
    expected = [accountant.compute_epsilon(rounds, parameters) for rounds in range(8)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[1] == found[3] < found[4] == found[6] < found[7]


def test_a_multiplier_for_a_budget_knows_the_cycle():
    algorithm = independent_pools(
        {"pool": Pool(banded(), EVERYONE, 1, PoissonCohort(cycle=BANDS))}, federated().columns
    )
    z = calibrated_noise_multiplier(4.0, DELTA, 6, algorithm.privacy)
    cohorts = {"pool": algorithm.privacy["pool"]._replace(noise_multiplier=z)}
    epsilon = spent(cohorts, 6, PrivacyBudget(DELTA)).epsilon
    assert 3.9 < epsilon <= 4.0
    assert spent(cohorts, 7, PrivacyBudget(DELTA)).epsilon > 4.0


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    pool = Pool(banded(), EVERYONE, 1, PoissonCohort(cycle=BANDS))
    algorithm = independent_pools({"pool": pool}, federated().columns)
    once = run(algorithm, 5)
    for rounds in (2, 5):
        again = run(algorithm, rounds, workdir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.state, once.state)
    epsilons = [record["epsilon"] for record in once.records if record["split"] == "train"]
    assert epsilons[1] == epsilons[3] < epsilons[4] == epsilons[5]


@pytest.mark.slow
def test_pools_that_teach_each_other_keep_noise_of_their_own():
    images = np.random.default_rng(1).normal(size=(9, FEATURES)).astype(np.float32)
    poisson = PoissonCohort(cycle=BANDS)
    pools = {
        "small": Pool(banded(), EVERYONE, 1, poisson),
        "large": Pool(banded(), np.arange(3), 1, poisson),
    }
    distillation = Distillation(steps=2, batch_size=4, mixup_beta=0)
    algorithm = merged_codistillation(pools, federated().columns, 9, 2, distillation=distillation)
    outcome = run(algorithm, 2, {UNLABELLED: {"image": images}})
    small, large = (outcome.state[name].noise.buffers["update"]["w"] for name in pools)
    assert np.any(small) and not np.allclose(small, large)
    privacy = outcome.summary["privacy"]
    assert privacy["by_pools"]["small, large"]["epsilon"] == privacy["epsilon"]


def fed_sdd_of(method):
    pool = Pool(method, EVERYONE, 4)
    distillation = Distillation(steps=2, batch_size=4, mixup_beta=0)
    return fed_sdd(pool, federated().columns, 9, 2, distillation=distillation)


def fetch():
    return fetch_sgd(MODEL, sketch_rows=1, sketch_columns=5, k=2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: banded(-1.0), "noise_multiplier.noise_multiplier must be at least 0, got -1.0."),
        (lambda: banded(bands=0), "noise_multiplier.bands must be at least 1, got 0."),
        (lambda: banded(bands=7), "noise_multiplier.bands must be at most rounds=6, got 7."),
        (lambda: banded(rounds=0), "noise_multiplier.rounds must be at least 1, got 0."),
        (
            lambda: one_pool(banded(), 1, PoissonCohort(cycle=2)),
            "poisson must be PoissonCohort(cycle=3) or of a longer cycle: noise of 3 bands hides a",
        ),
        (lambda: one_pool(banded(), 1), "poisson must be PoissonCohort(cycle=3) or of a longer"),
        (lambda: fed_sdd_of(banded()), "poisson must be PoissonCohort(cycle=3) or of a longer"),
        (
            lambda: one_pool(banded(), 1, PoissonCohort(cycle=4)),
            "pools['pool'].poisson.cycle must divide the pool's 6 clients, got 4.",
        ),
        (
            lambda: one_pool(banded(), 1, PoissonCohort(cycle=0)),
            "pools['pool'].poisson.cycle must be at least 1, got 0.",
        ),
        (
            lambda: one_pool(banded(), 3, PoissonCohort(cycle=3)),
            "pools['pool'].cohort_size must be at most 2, the pool's 6 clients by cycle=3, got 3.",
        ),
        (
            lambda: one_pool(banded(), 1, PoissonCohort(most=4, cycle=3)),
            "poisson.most must be between cohort_size=1 and 2, the pool's 6 clients by cycle=3, got 4.",
        ),
        (
            lambda: one_pool(banded(method=fetch()), 1, PoissonCohort(cycle=3)),
            "noise_multiplier must be a number for fetch_sgd, whose updates have other shapes than",
        ),
    ],
)
def test_bad_input_is_one_line(mistake, message):
    with pytest.raises(ValueError) as raised:
        mistake()
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError) as raised:
        banded()
    assert str(raised.value) == (
        'noise that is correlated over rounds needs jax-privacy: pip install "fedcodist[privacy]"'
    )
