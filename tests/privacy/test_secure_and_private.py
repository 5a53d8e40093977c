"""Noise on a secure sum: clip, mask, sum, unmask, noise; Poisson cohorts; and an audit of `private`."""

import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.fed_md import fed_md
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.algorithms.pools.cohorts import PoissonCohort
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import Cohort
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.privacy.accounting import PrivacyBudget
from fedcodist.privacy.audit import epsilon_lower_bound, guesses_of
from fedcodist.privacy.banded_noise import BandedNoise
from fedcodist.privacy.fixed_point import FixedPoint, decoded
from fedcodist.privacy.private import private
from fedcodist.privacy.private_parties import counted, private_scores
from fedcodist.privacy.secure_sum import secure_sum
from fedcodist.privacy.secure_sum_reduce import secure_sum_reduce
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")
SIZES, FEATURES, CLASSES, ROUNDS = (3, 5, 2, 4, 6, 3), 6, 5, 3
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=2)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
averaging = fed_avg(
    softmax_regression(FEATURES, CLASSES), TRAINING, optax.sgd, hyper=FedAvgHyper(0.3, 1.0)
)


def weights_after(method, poisson):
    pool = Pool(method, np.arange(len(SIZES)), 3, poisson)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    experiment = Experiment(
        algorithm, resident_data(federated(), {}), {"train": federated()}, ROUNDS, evaluate_every=3
    )
    return run_experiment(experiment, show_progress=False).variables["pool"].params["w"][0]


@pytest.mark.parametrize("poisson", [None, PoissonCohort()], ids=["fixed", "poisson"])
def test_a_secure_sum_of_a_private_method_has_the_same_noise(poisson):
    """Slots without a client share no masks: what is left would be no small error."""
    method = private(averaging, 0.5, 0.8, expected_clients=3 if poisson else None)
    secure = secure_sum(method, 6, value_range=0.5, max_weight=1.0)
    found, expected = weights_after(secure, poisson), weights_after(method, poisson)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_secure_sum_of_noise_that_is_correlated_over_rounds():
    pytest.importorskip("jax_privacy")
    method = private(averaging, 0.5, BandedNoise(0.8, 2, ROUNDS), expected_clients=3)
    secure = secure_sum(method, 3, value_range=0.5, max_weight=1.0)
    found, expected = (weights_after(one, PoissonCohort(cycle=2)) for one in (secure, method))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_parties", [False, True])
def test_rounding_to_few_bits_makes_no_update_longer_than_the_clip(of_parties):
    """The noise is for the clip; rounded to the nearest, this update would be twice as long."""
    clip, size = 0.5, 143
    if of_parties:
        reduce = secure_sum_reduce(10, clip, 1.0, bits=8, reduce=private_scores(clip, 0.0))
    else:
        method = private(averaging, clip, 0.0)
        reduce = secure_sum(method, num_clients=10, value_range=clip, max_weight=1, bits=8).reduce
    update = jnp.full((1, size), 0.0418)
    assert jnp.linalg.norm(update) <= clip
    result = ClientResult({"w": update}, {}, jnp.float32(1), None, {}, None)
    prepared = reduce.prepare(result, jax.random.key(0))
    number, *rest = jax.tree.leaves(prepared.numbers, is_leaf=lambda x: isinstance(x, FixedPoint))
    sent = decoded(number, 1 / 12, 8, jnp.array(False))
    assert jnp.linalg.norm(sent) <= clip
    weight = decoded(rest[-1], 1 / 12, 8, jnp.array(False))
    np.testing.assert_allclose(weight, 1.0, rtol=1e-6)  # a multiple of the step stays what it is


def test_private_goes_inside():
    with pytest.raises(ValueError, match="method must not be one of a secure sum"):
        private(secure_sum(averaging, 6, 0.5, 6.0), 0.5, 0.8)


def test_a_run_of_parties_counts_what_gaussian_mechanisms_cost():
    groups = {"parties": PartyGroup(softmax_regression(FEATURES, CLASSES), np.arange(len(SIZES)))}
    public = random_clients((9,), FEATURES, CLASSES).columns
    made = fed_md(groups, Alignment(public["label"], 6), CLASSES, reduce=private_scores(1.0, NOISE))
    experiment = Experiment(
        counted(made, NOISE),
        resident_data(federated(), {PUBLIC: {"image": public["image"]}}),
        {"train": federated()},
        rounds=4,
        evaluate_every=2,
        privacy=PrivacyBudget(DELTA),
    )
    summary = run_experiment(experiment, show_progress=False).summary
    assert summary["privacy"]["epsilon"] == pytest.approx(claimed(4), rel=1e-3)


# ----------------------------------------------------------------------------------- audit of `private`

CANARIES, GUESSES, DELTA, CLIP, NOISE = 8192, 326, 1e-5, 2.0, 2.5


def canary_method():
    """A method of one vector, whose client sends three times the bound in a direction of its own."""
    model = Model(
        lambda key: Variables({"w": jnp.zeros(CANARIES)}, {}),
        lambda variables, batch, **_: (variables.params["w"][:2], {}),
        cross_entropy,
        {},
        2,
    )

    def client_update(message, client_state, data, key, hyper):
        canary, there = (data.columns[name][data.start] for name in ("canary", "there"))
        update = 3 * CLIP * there * jax.nn.one_hot(canary, CANARIES)
        return ClientResult({"w": update}, {}, jnp.float32(1), None, {"num_steps": jnp.int32(1)})

    return fed_avg(model, TRAINING)._replace(client_update=client_update)


TOOK_PART = np.random.default_rng(7).random(CANARIES) < 0.5


@functools.cache
def summed(clip):
    method = private(canary_method(), clip, NOISE)
    message = method.broadcast(method.init(jax.random.key(0)))
    places = jnp.arange(CANARIES, dtype=jnp.int32)
    columns = {"canary": places, "there": jnp.asarray(TOOK_PART, jnp.float32)}
    cohort = Cohort(columns, places, places, jnp.ones_like(places), capacity=1)
    update = functools.partial(method.client_update, hyper=method.hyper)
    run = jax.jit(
        lambda cohort: (
            for_each_client(
                update,
                *(method.reduce.prepare, message, None, cohort, jax.random.key(0)),
                Execution("vmap", 16),
            ).total
        )
    )
    return run(cohort)


def bound_of(noise, pools=1, clip=CLIP):
    """What the audit proves of sums that are clipped at `clip` and noised for the bound CLIP."""
    method = private(canary_method(), CLIP, noise)
    message = method.broadcast(method.init(jax.random.key(0)))
    released = sum(
        method.reduce.finalize(summed(clip), message, jax.random.key(pool)).pseudo_gradient["w"]
        for pool in range(pools)
    )
    return epsilon_lower_bound(guesses_of(released, TOOK_PART, GUESSES), DELTA)


def claimed(pools=1):
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(NOISE), pools)
    return accountant.get_epsilon(DELTA)


def test_the_audit_refutes_wrong_claims_alone():
    assert 0.3 < bound_of(NOISE) < claimed()
    assert bound_of(NOISE / 2) > claimed()  # half of the noise
    assert bound_of(NOISE, clip=100 * CLIP) > claimed()  # the clip is left out
    assert claimed() < bound_of(NOISE, pools=6) < claimed(6)  # of six nested pools one is counted
