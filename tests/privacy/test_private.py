"""Private methods: bounds and noise against NumPy, cohorts one by one, and under servers of pools."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from private_runs import (
    AVERAGING,
    CLASSES,
    CLIP,
    FEATURES,
    MODEL,
    RATE,
    SIZES,
    TRAINING,
    federated,
    one_pool,
    run,
)

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_dropout import fed_dropout
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.cohorts import PoissonCohort, draw_slots, number_drawn
from fedcodist.algorithms.pools.fed_df import fed_df
from fedcodist.algorithms.pools.fed_ensemble import fed_ensemble
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.fed_sdd_pools import fed_sdd_pools
from fedcodist.algorithms.pools.hetero_fl import HeteroFLAdjustments, hetero_fl
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.top_k import top_k
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.for_each_client import for_each_client
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import client_key
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.digits import BatchNormMLP
from fedcodist.privacy.adaptive_clipping import AdaptiveClip
from fedcodist.privacy.banded_noise import BandedNoise
from fedcodist.privacy.clipping import clipped, clipped_weight, is_within, noised
from fedcodist.privacy.noised_mean import moved_statistics, noised_mean
from fedcodist.privacy.private import private
from fedcodist.privacy.private_checks import check_sends
from fedcodist.privacy.secure_sum import secure_sum
from fedcodist.run.privacy_spent import check_privacy
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")
pytest.importorskip("dp_accounting", reason="the accounting of a run is by dp-accounting")


def step(client):
    """A client's update after one step on all of its examples, in float64."""
    w = np.asarray(MODEL.init(None).params["w"], np.float64)
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    shares = np.exp(images @ w)
    shares /= shares.sum(1, keepdims=True)
    labels = np.eye(CLASSES)[federated().columns["label"][rows]]
    return RATE * images.T @ (shares - labels) / len(labels)


def bounded(update, clip=CLIP):
    return update * min(1, clip / np.linalg.norm(update))


def test_the_new_model_is_the_mean_of_clipped_updates_and_noise_of_the_server():
    """NumPy in float64; the noise is drawn again from the key that only the server derives."""
    z, cohort = 1.5, 4
    outcome = one_pool(private(AVERAGING, CLIP, z), cohort)
    drawn = run_cohort(cohort)
    total = sum(bounded(step(client)) for client in drawn)
    assert np.linalg.norm(step(drawn[0])) > CLIP  # so the clip is felt
    key = keys.derive(client_key(jax.random.key(0), 0, "pool"), "reduce", "pool", "noise", "update")
    noise = jax.random.normal(key, (FEATURES, CLASSES))
    start = np.asarray(MODEL.init(None).params["w"])
    expected = start - (total + z * CLIP * np.asarray(noise)) / cohort
    found = outcome.variables["pool"].params["w"][0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # No client's key leads to it: they are derived from the same parent by numbers.
    clients = client_key(jax.random.key(0), 0, "pool")
    for client in range(len(SIZES)):
        theirs = keys.derive(clients, client)
        assert not np.array_equal(jax.random.key_data(theirs), jax.random.key_data(key))


def run_cohort(cohort_size):
    pools = {"pool": Pool(AVERAGING, np.arange(len(SIZES)), cohort_size)}
    algorithm = independent_pools(pools, federated().columns)
    return algorithm.select(0, jax.random.key(0)).clients["pool"].tolist()


def test_without_noise_and_with_a_wide_clip_it_is_the_unweighted_mean():
    found = one_pool(private(AVERAGING, 1e6, 0.0), len(SIZES)).variables["pool"].params["w"][0]
    mean = np.mean([step(client) for client in range(len(SIZES))], axis=0)
    np.testing.assert_allclose(found, np.asarray(MODEL.init(None).params["w"]) - mean, atol=1e-6)


def result(values, weight=1.0, extra=None, mutable=None):
    update = {"a": jnp.asarray(values[:3]), "b": jnp.asarray(values[3:])}
    return ClientResult(update, mutable or {}, jnp.float32(weight), None, {}, extra)


class Message:
    inner = ClientResult(None, {"mean": jnp.zeros(2000)}, None, None, {})
    mutable = inner.mutable
    clip, noise_multiplier, noise = jnp.float32(0.5), jnp.float32(2.0), None


def test_a_weight_that_is_not_a_number_is_none():
    weights = clipped_weight(jnp.array([np.nan, -1.0, 0.5, 3.0, np.inf]), 2.0)
    np.testing.assert_array_equal(weights, [0, 0, 0.5, 2, 2])


@pytest.mark.parametrize("name", ["bn/var", "batch_norm/~/var_ema/average"])
def test_noise_makes_no_variance_negative(name):
    *path, last = name.split("/")
    state = functools.reduce(lambda inner, part: {part: inner}, reversed(path), {last: jnp.ones(2)})
    moved = moved_statistics(state, jax.tree.map(lambda leaf: leaf - 3, state))
    np.testing.assert_array_equal(jax.tree.leaves(moved)[0], [0, 0])


@pytest.mark.parametrize("module", ["bn", "variant_block", "var_net"])
def test_noise_moves_a_mean_below_zero(module):
    mean = moved_statistics({module: {"mean": jnp.ones(2)}}, {module: {"mean": -2 * jnp.ones(2)}})
    np.testing.assert_array_equal(mean[module]["mean"], [-1, -1])


@pytest.mark.parametrize(
    ("update", "mutable", "message"),
    [
        (jnp.ones(2, jnp.bfloat16), {}, "must send float32, .* got bfloat16 in "),
        (jnp.ones(2, jnp.int32), {}, "must send floats, .* got int32 in "),
        (jnp.ones(2), {"counter": jnp.zeros((), jnp.int32)}, "no whole numbers .* in counter"),
    ],
)
def test_what_noise_would_spoil_is_refused(update, mutable, message):
    sent = result(np.zeros(4, np.float32), mutable=mutable)._replace(update=update)
    with pytest.raises(ValueError, match=message):
        check_sends(AVERAGING, sent, 1.0 if mutable else None, None)


def test_what_is_not_finite_is_sent_as_zeros_and_so_is_within_any_clip():
    for value, expected in ((0.5, True), (2.0, False), (np.nan, True), (np.inf, True)):
        assert is_within({"w": jnp.array([value])}, 1.0) == expected


def test_a_client_whose_update_is_not_finite_once_keeps_its_memory():
    """Its error feedback would be NaN for ever, and it would send zeros in every later round.

    Of an update whose norm overflows zeros are sent too, so its memory must not count it as sent.
    """
    bad = lambda fails: LocalTraining(batch_size=20, optimizer=lambda rate: optax.sgd(rate * fails))
    states = []
    for fails in (np.inf, 1e25, 1.0):
        method = compressed(
            fed_avg(MODEL, bad(fails), optax.sgd), 5, uplink=with_error_feedback(top_k(0.1))
        )
        hiding = private(method, CLIP, 0.0)
        message = hiding.broadcast(hiding.init(jax.random.key(0)))
        state = hiding.init_client_state()
        columns = {name: jnp.asarray(c[:4]) for name, c in federated().columns.items()}
        data = ClientData(columns, jnp.int32(0), jnp.int32(4), jnp.int32(4), 4, False)
        result = hiding.client_update(message, state, data, jax.random.key(1), hiding.hyper)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.update))
        states.append(result.client_state)
    for failed in states[:2]:
        jax.tree.map(np.testing.assert_array_equal, failed, state)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(states[2].memory))


def test_noise_on_nothing_is_nothing():
    assert noised((), 1.0, jax.random.key(0)) == ()


def test_noise_deviates_as_said_and_differs_between_parts():
    """Three bounded parts: each has noise of sqrt(3) z times its bound, on the sum."""
    bounds = {"statistics": 4.0, "extra": 7.0}
    reduce = noised_mean(AVERAGING.reduce, bounds, 10, None)
    zeros = jnp.zeros(2000)
    total = reduce.prepare(
        ClientResult(zeros, {"mean": zeros}, jnp.float32(1), None, {}, zeros), None
    )
    found = reduce.finalize(total, Message, jax.random.key(1))
    parts = (found.pseudo_gradient * 10, found.mutable["mean"] * 10, found.extra)
    for part, bound in zip(parts, (0.5, 4.0, 7.0), strict=True):
        deviation = 2.0 * 3**0.5 * bound
        assert abs(np.std(part) / deviation - 1) < 0.08  # five times the estimate's own deviation
        assert abs(np.mean(part)) < 5 * deviation / 2000**0.5
    assert max(abs(np.corrcoef(parts)[0, 1:])) < 0.12


@pytest.mark.parametrize("per_layer", [False, True])
def test_no_client_moves_the_sum_by_more_than_the_bound(per_layer):
    """Sensitivity: also for values that are huge, or not finite."""
    draws = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e30, np.inf, np.nan):
        values = (scale * draws.normal(size=7)).astype(np.float32)
        sent = clipped(result(values).update, 0.5, per_layer)
        norms = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(sent)]
        assert np.linalg.norm(norms) <= 0.5 * (1 + 1e-6)
        if per_layer:
            assert max(norms) <= 0.5 / 2**0.5 * (1 + 1e-6)
    small = result(np.full(7, 1e-3, np.float32)).update
    jax.tree.map(np.testing.assert_array_equal, clipped(small, 0.5, per_layer), small)


def test_every_part_that_a_client_sends_is_bounded():
    """SCAFFOLD's variates and batch statistics."""
    images = jnp.zeros((1, FEATURES))
    model = from_flax_linen(BatchNormMLP(hidden=(8,), classes=CLASSES), images)
    method = private(
        scaffold(model, len(SIZES), TRAINING, hyper=FedAvgHyper(5.0, 1.0)),
        clip=0.1,
        noise_multiplier=1.0,
        statistics_clip=0.1,
        extra_clip=0.3,
    )
    pools = {"pool": Pool(method, np.arange(len(SIZES)), 3)}
    algorithm = independent_pools(pools, federated().columns)
    read = resident_data(federated(), {}).read(algorithm.select(0, jax.random.key(0)))
    inputs = jax.tree.map(jnp.asarray, read)
    server = method.init(jax.random.key(0))
    message = method.broadcast(server)
    states = jax.tree.map(
        lambda leaf: jnp.stack([jnp.asarray(leaf)] * 3), method.init_client_state()
    )
    update = lambda *client: method.client_update(*client, method.hyper)

    @jax.jit
    def sent_and_received():
        result = for_each_client(
            update,
            method.reduce.prepare,
            message,
            states,
            inputs.cohorts["pool"],
            jax.random.key(0),
            individual_results=True,
        )
        aggregate = method.reduce.finalize(result.total, message, jax.random.key(1))
        after = method.server_update(server, aggregate, jnp.int32(0), method.hyper)
        return result.results, method.variables(after).mutable

    sent, statistics = sent_and_received()
    for part, bound in ((sent.update, 0.1), (sent.mutable, 0.1), (sent.extra, 0.3)):
        norms = jax.vmap(optax.tree.norm)(part)
        np.testing.assert_allclose(norms, bound, rtol=1e-5)  # a rate of 5 goes beyond all bounds
    np.testing.assert_array_equal(sent.weight, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(statistics))


def test_clipped_weights():
    """Weights are shares of their bound, and the mean is by the noised sum of them."""
    method = private(AVERAGING, 1e6, 0.0, weight_clip=4.0)
    found = one_pool(method, len(SIZES)).variables["pool"].params["w"][0]
    weights = np.minimum(SIZES, 4)
    mean = sum(w * step(client) for client, w in enumerate(weights)) / weights.sum()
    np.testing.assert_allclose(found, np.asarray(MODEL.init(None).params["w"]) - mean, atol=1e-6)


def test_small_weights_without_noise_have_their_mean():
    """With noise the divisor is at least 1, the weight of one client."""
    method = private(AVERAGING, 1e6, 0.0, weight_clip=1e4)
    found = one_pool(method, len(SIZES)).variables["pool"].params["w"][0]
    mean = sum(size * step(client) for client, size in enumerate(SIZES)) / sum(SIZES)
    np.testing.assert_allclose(found, np.asarray(MODEL.init(None).params["w"]) - mean, atol=1e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda method: private(method, 1e3, 0.0, extra_clip=0.1),
        lambda method: private(compressed(method, 9, top_k(0.5)), 1e3, 0.0, extra_clip=0.1),
        lambda method: private(method, 1e3, 1e-9, extra_clip=0.1, adaptive=AdaptiveClip()),
        lambda method: secure_sum(method, 2, value_range=0.1, max_weight=1.0, masks=False),
        lambda method: secure_sum(
            private(method, 1e3, 0.0, extra_clip=9.0), 2, 0.1, 1.0, masks=False
        ),
        lambda method: secure_sum(
            private(method, 1e3, 1e-9, extra_clip=9.0, adaptive=AdaptiveClip()),
            *(2, 0.1, 1.0),
            masks=False,
        ),
    ],
    ids=["private", "compressed", "adaptive", "secure", "secure, private", "secure, adaptive"],
)
def test_scaffolds_variate_stays_the_mean_of_the_clients_variates(wrap):
    """A client's variate changes by what it sends, and not by what was clipped away."""
    method = wrap(scaffold(MODEL, 2, TRAINING, hyper=FedAvgHyper(4.0, 1.0)))
    columns = {name: jnp.asarray(column) for name, column in federated().columns.items()}
    columns["image"] = 10 * columns["image"]  # variates beyond a secure sum's range of 1
    server = method.init(jax.random.key(0))
    states = [jax.tree.map(jnp.asarray, method.init_client_state())] * 2
    for round in range(3):
        message = method.broadcast(server)
        total = None
        for client in range(2):
            key = jax.random.fold_in(jax.random.key(round), client)
            data = ClientData(columns, jnp.int32(5 * client), jnp.int32(4), jnp.int32(4), 4, False)
            result = method.client_update(message, states[client], data, key, method.hyper)
            states[client] = result.client_state
            sent = method.reduce.prepare(result._replace(client_state=None), key)
            total = sent if total is None else jax.tree.map(jnp.add, total, sent)
        aggregate = method.reduce.finalize(total, message, jax.random.key(round))
        server = method.server_update(server, aggregate, jnp.int32(round), method.hyper)
    variate, variates = server, states
    while not hasattr(variate, "variate"):
        variate = variate.inner
    variates = [getattr(state, "inner", state) for state in states]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 2, *variates)
    assert np.abs(variate.variate["w"]).max() > 0.01
    np.testing.assert_allclose(variate.variate["w"], mean["w"], atol=1e-5)


def test_the_clip_follows_the_quantile():
    """Andrew et al., algorithm 1, with next to no noise: b is the share of clients within the bound."""
    adaptive = AdaptiveClip(quantile=0.5, learning_rate=0.3, count_deviation=1e-6)
    method = private(AVERAGING, CLIP, 1e-7, adaptive=adaptive)
    outcome = one_pool(method, len(SIZES))
    share = np.mean([np.linalg.norm(step(client)) <= CLIP for client in range(len(SIZES))])
    expected = CLIP * np.exp(-0.3 * (share - 0.5))
    np.testing.assert_allclose(outcome.state["pool"].clip[0], expected, rtol=1e-4)
    # The rest of the budget, theorem 1: with sigma_b = z it is z / sqrt(3/4).
    split = private(AVERAGING, CLIP, 2.0, adaptive=AdaptiveClip(count_deviation=2.0))
    server = split.init(jax.random.key(0))
    np.testing.assert_allclose(server.noise_multiplier, 2 / 0.75**0.5, rtol=1e-6)


def test_poisson_cohorts_are_drawn_one_by_one():
    """Every client's rate, and every pair's, as of independent draws; the bound counts its failures."""
    clients, expected, slots, rounds = jnp.arange(6), 3, 5, 2000

    def draw(round):
        key = jax.random.key(3)
        count = number_drawn(6, expected, "pool", round, key)
        places = draw_slots(clients, slots, "pool", round, key)
        taken = jnp.arange(slots) < count
        return jnp.zeros(6).at[places].add(taken), jnp.maximum(count - slots, 0), places

    taken, left_out, places = jax.vmap(draw)(jnp.arange(rounds))
    assert (np.diff(np.sort(places, axis=1), axis=1) > 0).all()  # nobody is there twice
    assert abs(np.mean(left_out) - 1 / 64) < 0.012  # all six with probability 1/64: one too many
    pairs = np.asarray(taken.T @ taken) / rounds
    rate = (3 - 1 / 64) / 6
    both = 1 / 4 - (1 - 2 / 3) / 64  # of all six, five are left, and two thirds of their pairs
    np.testing.assert_allclose(np.diag(pairs), rate, atol=0.05)
    np.testing.assert_allclose(pairs[~np.eye(6, dtype=bool)], both, atol=0.05)


@pytest.mark.slow
def test_a_rare_client_is_not_drawn_more_often_than_accounted():
    """One of 2^24 clients: a float32 draw would take each with probability 2^-23."""
    count = jax.jit(lambda round: number_drawn(2**24, 1, "pool", round, jax.random.key(0)))
    assert 20 < sum(int(count(round)) for round in range(40)) < 60


def test_a_diverged_client_of_a_poisson_cohort_is_seen_in_the_metrics():
    columns = {**federated().columns, "image": np.array(federated().columns["image"])}
    columns["image"][: SIZES[0]] = np.nan
    broken = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))
    pool = Pool(AVERAGING, np.arange(len(SIZES)), 2, PoissonCohort())
    algorithm = independent_pools({"pool": pool}, columns)
    data = jax.tree.map(jnp.asarray, resident_data(broken, {}))

    @jax.jit
    def loss(seed):
        key = jax.random.key(seed)
        selection = algorithm.select(0, key)
        round = Round(0, key, data.read(selection))
        _, _, metrics = algorithm.round(algorithm.init(key), {"pool": ()}, round, algorithm.hyper)
        count = number_drawn(len(SIZES), 2, "pool", 0, key)
        is_there = (selection.clients["pool"] == 0) & (jnp.arange(len(SIZES)) < count)
        return metrics["pool/client_loss"], jnp.any(is_there), count

    drawn = [tuple(map(np.asarray, loss(seed))) for seed in range(12)]
    assert any(is_there and count > 1 for _, is_there, count in drawn)
    for value, is_there, count in drawn:
        assert np.isnan(value) == (is_there or count == 0)


def test_slots_without_a_client_change_nothing():
    """Against NumPy: the sum is over those drawn, and divided by the expected number."""
    method = private(AVERAGING, CLIP, 0.0, expected_clients=2)
    outcome = one_pool(method, 2, PoissonCohort(), rounds=3)
    pools = {"pool": Pool(method, np.arange(len(SIZES)), 2, PoissonCohort())}
    selection = independent_pools(pools, federated().columns).select(0, jax.random.key(0))
    count = int(number_drawn(len(SIZES), 2, "pool", 0, jax.random.key(0)))
    drawn = selection.clients["pool"].tolist()
    assert len(drawn) == len(SIZES)  # six slots: with so few clients a bound would be felt
    total = sum((bounded(step(client)) for client in drawn[:count]), np.zeros((FEATURES, CLASSES)))
    first = one_pool(method, 2, PoissonCohort()).variables["pool"].params["w"][0]
    np.testing.assert_allclose(
        first, np.asarray(MODEL.init(None).params["w"]) - total / 2, atol=1e-6
    )
    lines = [r for r in outcome.records if r["split"] == "clients"]
    assert {line["clients_left_out"] for line in lines} == {0}
    losses = [line["client_loss"] for line in lines if line["client_loss"] is not None]
    assert losses and min(losses) > 0


def test_a_client_who_is_not_drawn_keeps_its_state():
    """SCAFFOLD's variates of absent slots are as before."""
    base = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(RATE, 1.0))
    method = private(base, CLIP, 0.0, expected_clients=2, extra_clip=1.0)
    pool = Pool(method, np.arange(len(SIZES)), 2, PoissonCohort())
    algorithm = independent_pools({"pool": pool}, federated().columns)
    key = jax.random.key(2)  # draws some of the clients
    selection = algorithm.select(0, key)
    read = resident_data(federated(), {}).read(selection)
    inputs = jax.tree.map(jnp.asarray, read)
    before = jax.tree.map(
        lambda leaf: jnp.stack([jnp.asarray(leaf) + 7.0] * 6), method.init_client_state()
    )
    server = algorithm.init(key)["pool"]
    # Even without a step a client's variate moves by the server's.
    inner = server.inner._replace(variate=jax.tree.map(jnp.ones_like, server.inner.variate))
    state, round = {"pool": server._replace(inner=inner)}, Round(0, key, inputs)
    train = lambda: algorithm.round(state, {"pool": before}, round, algorithm.hyper)
    after = jax.jit(train)()[1]["pool"]
    count = int(number_drawn(len(SIZES), 2, "pool", 0, key))
    changed = [not np.array_equal(a, b) for a, b in zip(after["w"], before["w"], strict=True)]
    assert changed == [slot < count for slot in range(6)] and 0 < count < 6


UNLABELLED_IMAGES = np.random.default_rng(1).normal(size=(9, FEATURES)).astype(np.float32)
DISTILLATION = Distillation(steps=2, batch_size=4, mixup_beta=0)


def servers(method, poisson=None):
    columns = federated().columns
    everyone, few = np.arange(len(SIZES)), np.arange(3)
    pools = {"small": Pool(method, everyone, 2, poisson), "large": Pool(method, few, 2, poisson)}
    return {
        "periodic": lambda: periodic_codistillation(pools, columns, 9, 2, 1, DISTILLATION),
        "merged": lambda: merged_codistillation(pools, columns, 9, 2, distillation=DISTILLATION),
        "fed_sdd": lambda: fed_sdd(
            Pool(method, everyone, 4, poisson), columns, 9, 2, distillation=DISTILLATION
        ),
        "fed_sdd_pools": lambda: fed_sdd_pools(
            {name: pool._replace(cohort_size=2) for name, pool in pools.items()},
            columns,
            9,
            2,
            distillation=DISTILLATION,
        ),
        "fed_df": lambda: fed_df(pools, columns, 9, DISTILLATION),
        "fed_ensemble": lambda: fed_ensemble(Pool(method, everyone, 4, poisson), columns, 2),
    }


@pytest.mark.parametrize("server", ["periodic", "merged", "fed_sdd"])
def test_under_servers_of_pools(server):
    """Nested pools: a client in both pays in both, and the run tells the largest."""
    algorithm = servers(private(AVERAGING, CLIP, 1.0))[server]()
    outcome = run(algorithm, 2, {UNLABELLED: {"image": UNLABELLED_IMAGES}})
    privacy = outcome.summary["privacy"]
    assert privacy["neighbours"] == "replace a client"
    if server == "fed_sdd":
        assert list(privacy["by_pools"]) == ["main"]  # one cohort, whichever model a client trains
    else:
        assert {name: of["clients"] for name, of in privacy["by_pools"].items()} == {
            "small": 3,
            "small, large": 3,
        }
        epsilons = [of["epsilon"] for of in privacy["by_pools"].values()]
        assert max(epsilons) == privacy["epsilon"] > min(epsilons)
    final = [r["epsilon"] for r in outcome.records if r["round"] == 2 and r["split"] == "train"]
    assert set(final) == {privacy["epsilon"]}


@pytest.mark.parametrize("server", ["periodic", "merged", "fed_sdd", "fed_sdd_pools"])
def test_epsilon_is_of_the_clients_that_the_server_draws(server):
    algorithm = servers(private(AVERAGING, CLIP, 1.0))[server]()
    assert algorithm.privacy
    for cohorts in algorithm.privacy.values():
        assert cohorts.select is algorithm.select
    check_privacy(SimpleNamespace(privacy=None, start=None, algorithm=algorithm))


def chain(width):
    return from_flax_linen(
        nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(CLASSES)]), jnp.zeros((1, FEATURES))
    )


def test_hetero_fl_is_private_level_by_level():
    """Its clients count the same already: with a wide clip and no noise nothing changes."""

    def hetero(wrapped):
        levels = {
            "part": HeteroFLLevel(chain(2), np.arange(3, 6), 2),
            "whole": HeteroFLLevel(chain(4), np.arange(3), 2),
        }
        adjustments = HeteroFLAdjustments(masked=False, wrapped=wrapped)
        names, columns = ["layers_0", "layers_2"], federated().columns
        return hetero_fl(chain(4), levels, names, columns, TRAINING, adjustments)

    plain = run(hetero(lambda method: method))
    clipped_only = run(hetero(lambda method: private(method, 1e6, 0.0)))
    for level in ("part", "whole"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6),
            clipped_only.variables[level].params,
            plain.variables[level].params,
        )
    cohorts = hetero(lambda method: private(method, 0.1, 1.0)).privacy
    assert {name: pool.noise_multiplier for name, pool in cohorts.items()} == {
        "part": 1,
        "whole": 1,
    }
    with pytest.raises(ValueError, match="whose reduction is not one"):
        names, level = ["layers_0", "layers_2"], HeteroFLLevel(chain(4), np.arange(3), 2)
        masked = HeteroFLAdjustments(wrapped=lambda method: private(method, 0.1, 1.0))
        hetero_fl(chain(4), {"whole": level}, names, federated().columns, TRAINING, masked)


@pytest.mark.parametrize(
    "more", [dict(adaptive=AdaptiveClip()), dict(noise_multiplier=BandedNoise(1.0, 2, 4))]
)
def test_privacy_with_a_state_is_not_for_levels_of_one_server(more):
    settings = dict(clip=0.1, noise_multiplier=1.0) | more
    level = {"whole": HeteroFLLevel(chain(4), np.arange(3), 2)}
    adjustments = HeteroFLAdjustments(
        masked=False, wrapped=lambda method: private(method, **settings)
    )
    with pytest.raises(ValueError, match=r"^adjustments\.wrapped must make methods private with a"):
        hetero_fl(
            chain(4), level, ["layers_0", "layers_2"], federated().columns, TRAINING, adjustments
        )


def test_models_of_one_cohort_have_noise_of_their_own():
    """FedSDD's groups share the clients' stream of keys: were the noise shared too, it would cancel."""
    method = private(AVERAGING, CLIP, 1e4)
    algorithm = fed_sdd(
        Pool(method, np.arange(len(SIZES)), 4),
        federated().columns,
        9,
        2,
        distillation=DISTILLATION._replace(steps=0),
    )
    models = run(algorithm).variables
    start = np.asarray(MODEL.init(None).params["w"])
    moves = [(models[name].params["w"][0] - start).ravel() for name in ("main", "model_1")]
    assert abs(np.corrcoef(moves)[0, 1]) < 0.9


def test_compressed_links_are_within():
    method = private(compressed(AVERAGING, 2, uplink=quantisation(4)), CLIP, 1.0)
    outcome = one_pool(method, rounds=2)
    (line,) = [r for r in outcome.records if r["round"] == 2 and r["split"] == "clients"]
    assert line["client_bytes_up"] < 4 * FEATURES * CLASSES


@pytest.mark.parametrize("is_compressed", [False, True])
def test_metrics_can_stay_at_home(is_compressed):
    method = compressed(AVERAGING, 1, uplink=quantisation(4)) if is_compressed else AVERAGING
    outcome = one_pool(private(method, CLIP, 1.0, metrics=False))
    (line,) = [r for r in outcome.records if r["split"] == "clients"]
    assert "client_loss" not in line and line["client_num_steps"] is None
    # Sizes of messages are no secret from whoever transports them.
    assert line.get("client_bytes_up", 0) < 4 * FEATURES * CLASSES
    assert ("client_bytes_up" in line) == is_compressed


def dropout():
    nets = (nn.Sequential([nn.Dense(n), nn.Dense(CLASSES)]) for n in (4, 2))
    models = (from_flax_linen(net, jnp.zeros((1, FEATURES))) for net in nets)
    return fed_dropout(*models, ["layers_0", "layers_1"])


POISSON = private(AVERAGING, CLIP, 1.0, expected_clients=2)
FIXED = private(AVERAGING, CLIP, 1.0)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: private(AVERAGING, 0.0, 1.0), "clip must be above 0, got 0.0."),
        (lambda: private(AVERAGING, 1.0, -1.0), "noise_multiplier must be at least 0, got -1.0."),
        (lambda: private(FIXED, 1.0, 1.0), "method must not be private already."),
        (lambda: private(dropout(), 1.0, 1.0), "fed_dropout, whose reduction is not one"),
        (
            lambda: one_pool(private(scaffold(MODEL, 6, TRAINING), 1.0, 1.0)),
            "extra_clip must be given for scaffold, which sends more than its update.",
        ),
        (
            lambda: one_pool(private(AVERAGING, 1.0, 1.0, statistics_clip=1.0)),
            "statistics_clip must be None for fed_avg",
        ),
        (
            lambda: private(AVERAGING, 1.0, 4.0, adaptive=AdaptiveClip(count_deviation=2.0)),
            "adaptive.count_deviation must be above half of noise_multiplier=4, got 2.",
        ),
        (
            lambda: servers(FIXED)["fed_df"](),
            "must not be private: the server would need every client",
        ),
        (lambda: servers(FIXED)["fed_ensemble"](), "a sampling without an accountant"),
        (
            lambda: servers(private(AVERAGING, CLIP, 1.0, 4), PoissonCohort())["fed_sdd"](),
            "poisson=None for fed_sdd",
        ),
        (
            lambda: servers(private(AVERAGING, CLIP, 1.0, 4))["fed_sdd"](),
            "without expected_clients",
        ),
        (
            lambda: one_pool(FIXED, 2, PoissonCohort()),
            "must be private with expected_clients=2: otherwise the size of a Poisson cohort",
        ),
        (lambda: one_pool(POISSON, 3), "expected_clients=3, the pool's cohort_size, got 2."),
        (
            lambda: one_pool(POISSON, 2, PoissonCohort(most=1)),
            "poisson.most must be between cohort_size=2 and the pool's 6 clients, got 1.",
        ),
        (
            lambda: compressed(FIXED, 2, uplink=quantisation(4)),
            "method must not be private: private(compressed(method, ...), ...)",
        ),
    ],
)
def test_bad_input_is_one_line(mistake, message):
    with pytest.raises(ValueError) as raised:
        mistake()
    assert message in str(raised.value) and "\n" not in str(raised.value)
