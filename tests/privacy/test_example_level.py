"""DP-SGD on clients: against NumPy in float64, its noise, and what it costs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from private_runs import CLASSES, FEATURES, MODEL, RATE, SIZES, federated, one_pool
from scipy import stats

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.p_fed_me import p_fed_me
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.parties.fd import fd
from fedcodist.algorithms.parties.fed_gen import fed_gen
from fedcodist.algorithms.parties.fed_gh import fed_gh
from fedcodist.algorithms.parties.fed_proto import fed_proto
from fedcodist.algorithms.parties.fed_tgp import fed_tgp
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.pools.fed_rolex import fed_rolex
from fedcodist.algorithms.pools.hetero_fl import hetero_fl
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.headed import headed
from fedcodist.privacy.example_level import example_epsilon, example_private

pytestmark = pytest.mark.usefixtures("compile_quickly")
CLIP, BATCH = 0.7, max(SIZES)


def averaging(clip=CLIP, noise=0.0, microbatch=None, model=MODEL):
    private = example_private(clip, noise, microbatch)
    training = LocalTraining(batch_size=BATCH, differentiate=private)
    return fed_avg(model, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))


@functools.cache
def trained(**settings):
    outcome = one_pool(averaging(**settings), len(SIZES))
    return outcome.variables["pool"].params["w"][0]


def test_a_step_is_the_clipped_sum_over_the_batch_size():
    w = np.asarray(MODEL.init(None).params["w"], np.float64)
    updates = []
    for client, size in enumerate(SIZES):
        rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
        images = federated().columns["image"][rows].astype(np.float64)
        shares = np.exp(images @ w)
        shares /= shares.sum(1, keepdims=True)
        errors = shares - np.eye(CLASSES)[federated().columns["label"][rows]]
        gradients = images[:, :, None] * errors[:, None]
        norms = np.linalg.norm(gradients, axis=(1, 2))
        clipped = gradients * np.minimum(1, CLIP / norms)[:, None, None]
        assert client or (norms > CLIP).any()  # so the clip is felt
        updates.append(size * clipped.sum(0) / BATCH)
    expected = w - RATE * sum(updates) / sum(SIZES)
    np.testing.assert_allclose(trained(), expected, atol=1e-6)
    np.testing.assert_allclose(trained(microbatch=2), expected, atol=1e-6)


def gradient_of(noise, key):
    """Of a model of 2,000 coordinates on one batch of four examples, one of them padding."""

    def loss(params, mutable, batch, mask, key):
        return jnp.sum(batch @ params * mask) / jnp.maximum(jnp.sum(mask), 1), mutable

    batch = jnp.ones((4, 2000)).at[2].set(jnp.nan)
    mask = jnp.array([1.0, 1.0, 1.0, 0.0])
    private = example_private(CLIP, noise)(loss)
    return private(jnp.zeros(2000), {}, batch, mask, key)[1]


def test_noise_deviates_as_said_and_no_example_counts_more_than_the_clip():
    noisy = gradient_of(3.0, jax.random.key(0))
    quiet = gradient_of(0.0, jax.random.key(0))
    # Two good examples of the same direction, one without a finite gradient, and padding.
    np.testing.assert_allclose(np.linalg.norm(quiet), 2 * CLIP / 4, rtol=1e-5)
    assert abs(np.std(noisy - quiet) / (3 * CLIP / 4) - 1) < 0.08
    again = gradient_of(3.0, jax.random.key(1))
    assert abs(np.corrcoef(noisy - quiet, again - quiet)[0, 1]) < 0.12


def test_every_example_has_all_of_a_column_that_is_not_of_examples():
    def loss(params, mutable, batch, mask, key):
        pulled = jnp.sum((params - batch["center"]) ** 2) / 2
        return jnp.sum(batch["image"] @ params * mask) / jnp.sum(mask) + pulled, mutable

    images = jnp.array([[0.1, 0.2], [0.3, 0.1], [0.0, 0.1]])
    batch = {"image": images, "center": jnp.array([0.2, -0.1])}
    private = example_private(10.0, 0.0)(loss)
    (_, _), gradient = private(jnp.zeros(2), {}, batch, jnp.ones(3), jax.random.key(0))
    np.testing.assert_allclose(gradient, images.mean(0) - batch["center"], rtol=1e-6)


def test_epsilon_is_of_an_example_in_every_epoch():
    """The Gaussian mechanism in closed form (Balle and Wang 2018, theorem 8; remembered)."""
    pytest.importorskip("dp_accounting")
    epsilon = example_epsilon(4.0, epochs=2, participations=5, delta=1e-5)
    mu = 10**0.5 / 4
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    np.testing.assert_allclose(delta, 1e-5, rtol=0.01)
    # Many steps with little noise, whose losses are too many for a grid.
    assert example_epsilon(0.05, 5, 100, 1e-5) > 0.5 * 500 / 0.05**2
    assert example_epsilon(1.0, 5, 100, 1e-5) == pytest.approx(344.451, abs=1e-3)
    assert example_epsilon(1e-9, 1, 1, 1e-5) == np.inf
    assert example_epsilon(4.0, 2, 0, 1e-5) == 0 and example_epsilon(0.0, 2, 1, 1e-5) == np.inf


TRAINING = LocalTraining(batch_size=BATCH, differentiate=example_private(1.0, 1.0))
BATCH_NORM = from_flax_linen(BatchNormMLP((4,), CLASSES), jnp.zeros((1, FEATURES)))
HEADED = headed(nn.Dense(4), jnp.zeros((1, FEATURES)), CLASSES)
PARTIES = {"a": PartyGroup(HEADED, np.arange(6))}
CHAIN = from_flax_linen(
    nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(CLASSES)]), jnp.zeros((1, FEATURES))
)
LEVELS, CHAIN_LAYERS = {"whole": HeteroFLLevel(CHAIN, np.arange(6), 6)}, ["layers_0", "layers_2"]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: example_private(0.0, 1.0), "clip must be above 0, got 0.0."),
        (lambda: example_private(1.0, -1.0), "noise_multiplier must be at least 0, got -1.0."),
        (lambda: example_epsilon(1.0, 1, 1, 1.0), "delta must be above 0 and below 1, got 1.0."),
        (
            lambda: one_pool(averaging(microbatch=4)),
            "microbatch must divide the batch size 6, got 4.",
        ),
        (lambda: one_pool(averaging(model=BATCH_NORM)), "whose batch statistics mix examples"),
        (
            lambda: scaffold(MODEL, 6, TRAINING, option=1),
            "option must be 2 with training.differentiate",
        ),
        (
            lambda: one_pool(p_fed_me(MODEL, TRAINING)),
            "training.differentiate must be None for a method",
        ),
        *(
            (
                lambda method=method: method(PARTIES, CLASSES, TRAINING),
                f"training.differentiate must be None for {method.__name__}, whose parties also send",
            )
            for method in (fd, fed_proto, fed_gh, fed_tgp)
        ),
        (
            lambda: fed_gen(PARTIES, TRAINING),
            "training.differentiate must be None for fed_gen, whose parties also send counts of",
        ),
        (
            lambda: hetero_fl(CHAIN, LEVELS, CHAIN_LAYERS, federated().columns, TRAINING),
            "adjustments.masked must be False with training.differentiate: with masks, clients tell",
        ),
        (
            lambda: fed_rolex(CHAIN, LEVELS, CHAIN_LAYERS, federated().columns, TRAINING),
            "adjustments.masked must be False with training.differentiate",
        ),
    ],
)
def test_bad_input_is_one_line(mistake, message):
    with pytest.raises(ValueError) as raised:
        mistake()
    assert message in str(raised.value) and "\n" not in str(raised.value)
