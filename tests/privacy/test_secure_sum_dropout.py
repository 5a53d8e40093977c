"""Clients that drop out of a secure sum: the sum is that of the others, or is discarded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from scipy import stats
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.top_k import top_k
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult, mask_of_round, weighted_mean
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import Cohort
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.privacy.adaptive_clipping import AdaptiveClip
from fedcodist.privacy.private import private
from fedcodist.privacy.secure_sum import secure_sum
from fedcodist.privacy.secure_sum_bytes import agreement_bytes, vector_bytes
from fedcodist.privacy.secure_sum_dropouts import (
    Attendance,
    dropout_metrics,
    drops_out,
    is_discarded,
    threshold_of,
)
from fedcodist.privacy.secure_sum_protocol import DropOuts, secure_sum_protocol
from fedcodist.privacy.secure_sum_reduce import fixed_point_reduce, resolution, sum_of_masks
from fedcodist.run.experiment import Experiment, check_experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, RANGE, WEIGHT, DROPOUT = 9, 2.0, 9.0, 0.3
MESSAGE = Variables({"w": jnp.zeros((4, 3))}, {"m": jnp.zeros(2)})
# Multiples of 1/256, which no compiler rounds in a way of its own.
DRAWS = np.random.default_rng(3).integers(-512, 513, (CLIENTS, 4 * 3 + 2 + 5)) / 256
WEIGHTS = 1.0 + np.arange(CLIENTS) % 8


def reduction(size=CLIENTS, bits=32, dropout=DROPOUT, masks=True):
    return fixed_point_reduce(weighted_mean(), size, RANGE, WEIGHT, bits, masks, dropout)


def client_update(message, client_state, data, key):
    index = data.columns["seed"][data.start]
    numbers = jnp.float32(DRAWS)[index]
    update, mutable, extra = jnp.split(numbers, [12, 14])
    weight = jnp.float32(WEIGHTS)[index]
    return ClientResult({"w": update.reshape(4, 3)}, {"m": mutable}, weight, None, {}, extra)


@functools.cache
def dropped(seed=11, size=CLIENTS, dropout=DROPOUT, first=0):
    """Who drops out, bool [size], drawn one by one as `mask_of_round` derives the key."""
    shared = keys.derive(jax.random.key(seed), "masks")
    draw = jax.jit(lambda client: drops_out(client, shared, dropout))
    return np.array([draw(first + place) for place in range(size)])


def total_of(reduce, execution, devices=None, seed=11):
    """(the sum before `finalize`, the aggregate), on several devices or on one."""
    places = jnp.arange(CLIENTS, dtype=jnp.int32)
    cohort = Cohort({"seed": places}, places, places, 1 + places % 3, capacity=3)

    def round_(cohort, axis_name=None):
        key = jax.random.key(seed)
        result = for_each_client(
            *(client_update, reduce.prepare, MESSAGE, None, cohort, key, execution, axis_name),
            mask=mask_of_round(reduce, cohort.clients, key),
        )
        return result.total, reduce.finalize(result.total, MESSAGE, key)

    if execution.loop == "eager":
        return round_(cohort)
    if devices is not None:
        round_ = jax.shard_map(
            functools.partial(round_, axis_name="clients"),
            mesh=Mesh(np.array(jax.devices()[:devices]), ("clients",)),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    return jax.jit(round_)(cohort)


def modulo(tree, bits):
    return [np.asarray(leaf) & np.uint32(2**bits - 1) for leaf in jax.tree.leaves(tree)]


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


ONE = [(Execution("vmap", 4), 2)]
ALL = [
    *[(Execution("scan"), None), (Execution("vmap", 3), None), (Execution("vmap", 20), None)],
    *[(Execution("scan"), 2), (Execution("vmap", 2), 4), (Execution("eager"), None)],
]


@pytest.mark.parametrize(
    ("bits", "executions"),
    [
        (32, [*ONE, (Execution("scan"), None)]),
        pytest.param(18, [*ONE, *ALL], marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_every_execution_gives_the_sum_of_those_who_are_left(bits, executions):
    left = ~dropped()
    assert 0 < dropped().sum() <= 4
    weight = WEIGHTS[left].sum()
    expected = (WEIGHTS[:, None] * DRAWS)[left].sum(axis=0)
    step, totals = resolution(CLIENTS, RANGE, WEIGHT, bits), []
    for execution, devices in executions:
        total, aggregate = total_of(reduction(bits=bits), execution, devices)
        totals.append(modulo(total, bits))
        # Half a step per client; float32 has 24 bits, and the sum is below 100.
        close = functools.partial(np.testing.assert_allclose, atol=CLIENTS * step / 2 + 1e-5)
        close(aggregate.weight, weight, rtol=2e-6)
        close(aggregate.extra, DRAWS[left, 14:].sum(axis=0), rtol=2e-6)
        means = aggregate.pseudo_gradient["w"].reshape(-1), aggregate.mutable["m"]
        close(np.concatenate(means) * aggregate.weight, expected[:14], rtol=2e-6)
        assert aggregate.metrics["client_dropped_share"] == pytest.approx(1 - left.mean())
        assert aggregate.metrics["sum_discarded"] == 0
    assert all(same(total, totals[0]) for total in totals[1:])
    # Without masks the sum is the same to the bit, and so are all counts.
    bare = total_of(reduction(bits=bits, masks=False), Execution("vmap", 3))[0]
    assert same(modulo(bare, bits), totals[0])


def sent_by(reduce, clients, seed, numbers):
    """What is summed in place of each client's numbers, weight and flags, uint32 [clients, ...]."""
    key, clients = jax.random.key(seed), jnp.int32(clients)
    mask = mask_of_round(reduce, clients, key)

    def sent(client):
        one = ClientResult(numbers, {}, jnp.float32(1), None, {})
        masked = mask(reduce.prepare(one, key), client)
        leaves = jax.tree.leaves((masked.numbers, masked.flags))
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

    return np.stack([jax.jit(sent)(client) for client in clients])


def test_what_arrives_of_a_client_is_uniform_until_masks_are_taken_away():
    bits, clients = 20, np.arange(5)
    gone = dropped(seed=9, size=5)
    assert gone.sum() == 2
    sent = sent_by(reduction(5, bits), clients, 9, jnp.full(1 << 16, 0.25))[:, : 1 << 16]

    def p_value(vector):
        parts = vector >> (bits - 8) & 255, vector & 255
        return [stats.chisquare(np.bincount(part, minlength=256)).pvalue for part in parts]

    for vector in sent:
        assert min(p_value(vector)) > 1e-4
    # Those who are left have masks with who dropped out: their sum is uniform too.
    arrived = sent[~gone].sum(axis=0, dtype=np.uint32)
    assert min(p_value(arrived)) > 1e-4
    # The masks of the two who dropped out make it the sum of three clients' integers.
    step = resolution(5, RANGE, WEIGHT, bits)
    restored = (arrived + sent[gone].sum(axis=0, dtype=np.uint32)) & (2**bits - 1)
    np.testing.assert_array_equal(restored, np.full(1 << 16, 3 * round(0.25 / step)))


def test_who_drops_out_adds_masks_with_those_who_are_left_alone():
    clients, shared = jnp.arange(5), keys.derive(jax.random.key(9), "masks")
    gone = dropped(seed=9, size=5)
    sent = sent_by(reduction(5), clients, 9, jnp.full(6, 0.25))
    plain = sent_by(reduction(5, masks=False, dropout=0.0), clients, 9, jnp.full(6, 0.25))
    for client in clients:
        others = jnp.where(gone, -1, clients) if gone[client] else clients
        masks = sum_of_masks(client, others, shared, sent.shape[1])
        numbers = 0 if gone[client] else plain[client]
        np.testing.assert_array_equal(sent[client], numbers + masks)


PROTOCOL_SEEDS = (2, 3, 5)  # 2, 3 and 1 of 6 drop out


@pytest.mark.parametrize("seed", PROTOCOL_SEEDS)
def test_the_protocol_restores_the_same_sum(seed):
    pytest.importorskip("cryptography")
    pytest.importorskip("Cryptodome")
    bits, size = 20, 6
    gone = dropped(seed, size)
    key, clients = jax.random.key(seed), jnp.arange(size)
    numbers = np.random.default_rng(seed).uniform(-1, 1, (size, 30)).astype(np.float32)
    plain, reduce = reduction(size, bits, dropout=0.0), reduction(size, bits)
    result = lambda row: ClientResult(jnp.asarray(row), {}, jnp.float32(1), None, {})
    leaves = lambda sent: jax.tree.leaves((sent.numbers, sent.flags))
    flat = lambda sent: np.concatenate([np.ravel(leaf) for leaf in leaves(sent)])
    vectors = {i: flat(plain.prepare(result(row), key)) for i, row in enumerate(numbers)}
    mask = mask_of_round(reduce, clients, key)
    masked = [mask(reduce.prepare(result(numbers[i]), key), clients[i]) for i in range(size)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *masked)
    aggregate = reduce.finalize(total, Variables({}, {}), key)
    told = aggregate.metrics
    left, threshold = np.flatnonzero(~gone).tolist(), int(threshold_of(size))
    protocol = functools.partial(
        secure_sum_protocol, vectors, threshold, bits, DropOuts(vector=np.flatnonzero(gone))
    )
    if told["sum_discarded"]:
        with pytest.raises(ValueError, match=f"at least the threshold's 4 .* got {len(left)} left"):
            protocol()
        return
    found = protocol()
    assert found.summed == left
    np.testing.assert_array_equal(found.total, flat(total) & np.uint32(2**bits - 1))
    np.testing.assert_allclose(aggregate.pseudo_gradient, numbers[left].mean(axis=0), atol=1e-4)
    assert told["client_bytes_up"] == pytest.approx(np.mean(list(found.bytes_up.values())))


def test_the_protocol_was_asked_for_sums_that_are_restored_and_discarded():
    assert [dropped(seed, 6).sum() for seed in PROTOCOL_SEEDS] == [2, 3, 1]


def test_more_than_half_must_be_left():
    assert [int(threshold_of(n)) for n in (0, 1, 2, 3, 4, 5, 10)] == [2, 2, 2, 2, 3, 3, 6]
    counted = lambda there, gone: Attendance(jnp.int32(there), jnp.int32(gone))
    for there in range(2, 9):
        most = (0, 1, 1, 2, 2, 3, 3)[there - 2]
        assert not is_discarded(counted(there, most)) and is_discarded(counted(there, most + 1))
    nobody = dropout_metrics(counted(0, 0), 4, 10)
    assert all(np.isnan(nobody[name]) for name in nobody)


def test_a_probability_is_that_of_every_client_and_round():
    draw = jax.jit(
        jax.vmap(lambda client, round: drops_out(client, jax.random.key(round), 0.2), (0, 0))
    )
    found = draw(jnp.arange(20_000) % 100, jnp.arange(20_000) // 100).reshape(200, 100)
    deviation = (0.2 * 0.8 / 20_000) ** 0.5
    assert abs(found.mean() - 0.2) < 4 * deviation
    for axis in (0, 1):  # neither clients nor rounds drop out together
        counts, trials = found.sum(axis), found.shape[axis]
        assert 0.6 < np.var(counts) / (trials * 0.2 * 0.8) < 1.5


# ------------------------------------------------------------------------------------- whole methods

SIZES, FEATURES, CLASSES, ROUNDS, COHORT = (3, 5, 2, 4, 6, 3), 6, 5, 3, 4
MODEL = softmax_regression(FEATURES, CLASSES)
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=2)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
averaging = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(0.3, 1.0))
secure = functools.partial(secure_sum, num_clients=COHORT, value_range=3.0, max_weight=6.0)
NEARLY_ALL = 1 - 1e-6  # drop out


def experiment_of(method, rounds=ROUNDS):
    pool = Pool(method, np.arange(len(SIZES)), COHORT)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    return Experiment(
        algorithm, resident_data(federated(), {}), {"train": federated()}, rounds, evaluate_every=1
    )


def run(method, rounds=ROUNDS):
    return run_experiment(experiment_of(method, rounds), show_progress=False)


def weights(outcome):
    return outcome.variables["pool"].params["w"][0]


def of_clients(outcome, metric):
    return [r[metric] for r in outcome.records if r["split"] == "clients"]


@functools.cache
def with_dropouts():
    return run(secure(averaging, dropout=0.2), rounds=6)


@functools.cache
def without():
    return run(secure(averaging), rounds=6)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_the_reduction_alone_measures_uploads(is_compressed):
    """A pool refuses two measurements of one name. The check only traces a round."""
    method = compressed(averaging, ROUNDS, uplink=top_k(0.5)) if is_compressed else averaging
    check_experiment(experiment_of(secure(method, dropout=0.2)))


def test_a_run_reports_who_dropped_out_and_their_bytes():
    shares = of_clients(with_dropouts(), "client_dropped_share")
    assert len(set(shares)) > 1 and set(shares) <= {0, 0.25, 0.5, 0.75, 1}
    assert of_clients(with_dropouts(), "sum_discarded") == [float(share > 0.25) for share in shares]
    vector, agreed = vector_bytes(FEATURES * CLASSES + 3, 32), agreement_bytes(COHORT)
    for share, up in zip(shares, of_clients(with_dropouts(), "client_bytes_up"), strict=True):
        gone = round(share * COHORT)
        before = 2 * 32 + 3 * (4 + 28 + 48)  # two keys, and encrypted shares for three others
        after = (COHORT - gone) * (4 + 16) + gone * (4 + 32)  # shares of seeds and of keys
        arrived = vector + (after if share <= 0.25 else 0)
        assert up == pytest.approx(before + (1 - share) * arrived)
        if not gone:
            assert up == vector + agreed.up


def test_the_same_seed_gives_the_same_bits_and_dropouts_another_model():
    again = run(secure(averaging, dropout=0.2), rounds=6)
    np.testing.assert_array_equal(weights(again), weights(with_dropouts()))
    assert np.abs(weights(without()) - weights(with_dropouts())).max() > 1e-3


def test_no_dropout_is_the_sum_of_before_to_the_bit():
    before = fixed_point_reduce(weighted_mean(), CLIENTS, RANGE, WEIGHT, 32, True)
    key, clients = jax.random.key(2), jnp.arange(CLIENTS)
    one = ClientResult({"w": jnp.full(5, 0.5)}, {}, jnp.float32(3), None, {})
    prepared = before.prepare(one, key)
    assert jax.tree.leaves(prepared.attendance) == []
    row = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    found = mask_of_round(before, clients, key)(prepared, clients[4])
    masks = sum_of_masks(clients[4], clients, keys.derive(key, "masks"), row(prepared).size)
    np.testing.assert_array_equal(row(found), row(prepared) + np.asarray(masks))
    assert before.finalize(prepared, Variables({}, {}), key).metrics == {}
    # Rounds in which nobody happens to drop out give the same model.
    few, none = run(secure(averaging, dropout=1e-6), rounds=6), without()
    np.testing.assert_array_equal(weights(few), weights(none))
    assert of_clients(few, "client_dropped_share") == [0] * 6
    assert of_clients(few, "client_bytes_up") == of_clients(none, "client_bytes_up")
    assert not any("dropped" in name for record in none.records for name in record)


@pytest.mark.parametrize("dropout", [0.5, NEARLY_ALL])
def test_below_the_threshold_the_model_stays_as_it_is(dropout):
    found = run(secure(averaging, dropout=dropout), rounds=6)
    discarded = of_clients(found, "sum_discarded")
    assert 0 < sum(discarded) < 6 or (dropout == NEARLY_ALL and sum(discarded) == 6)
    shares = of_clients(found, "client_dropped_share")
    assert discarded == [float(share > 0.25) for share in shares]
    moves = of_clients(found, "pseudo_gradient_norm")
    assert [move == 0 for move in moves] == [bool(flag) for flag in discarded]
    if dropout == NEARLY_ALL:
        np.testing.assert_array_equal(weights(found), MODEL.init(None).params["w"])


def test_a_discarded_sum_leaves_statistics_and_variates_as_they_are():
    assert dropped(seed=12, dropout=0.6).sum() == 6  # of 9: too many, but not all
    total, aggregate = total_of(reduction(dropout=0.6), Execution("scan"), seed=12)
    assert any(leaf.any() for leaf in jax.tree.leaves(total.numbers))
    assert aggregate.weight == 0 and aggregate.metrics["sum_discarded"] == 1
    for leaf in jax.tree.leaves((aggregate.pseudo_gradient, aggregate.mutable, aggregate.extra)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    variates = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(0.1, 1.0))
    found = run(secure(variates, dropout=NEARLY_ALL), rounds=2)
    np.testing.assert_array_equal(weights(found), MODEL.init(None).params["w"])


def test_a_client_without_finite_numbers_who_drops_out_is_not_in_the_sum():
    gone = dropped(seed=9, size=5)
    reduce, key, clients = reduction(5), jax.random.key(9), jnp.arange(5)
    mask = mask_of_round(reduce, clients, key)

    def mean(bad):
        rows = [jnp.array([jnp.nan if i == bad else 0.5]) for i in range(5)]
        sent = [
            mask(reduce.prepare(ClientResult(row, {}, jnp.float32(1), None, {}), key), clients[i])
            for i, row in enumerate(rows)
        ]
        total = jax.tree.map(lambda *leaves: sum(leaves), *sent)
        return reduce.finalize(total, Variables({}, {}), key).pseudo_gradient

    np.testing.assert_allclose(mean(np.flatnonzero(gone)[0]), [0.5], rtol=1e-6)
    assert np.isnan(mean(np.flatnonzero(~gone)[0])).all()


def test_a_private_sum_that_is_discarded_leaves_the_model_as_it_is():
    method = private(averaging, 0.5, 0.8)
    around = dict(num_clients=COHORT, value_range=0.5, max_weight=1.0)
    found = run(secure_sum(method, **around, dropout=NEARLY_ALL), 1)
    assert of_clients(found, "sum_discarded") == [1.0]
    np.testing.assert_array_equal(weights(found), MODEL.init(None).params["w"])
    left = run(secure_sum(method, **around, dropout=1e-9), 1)
    np.testing.assert_array_equal(weights(left), weights(run(secure_sum(method, **around), 1)))


def test_neither_an_adaptive_clip_nor_variates_move_by_a_sum_that_is_discarded():
    around = dict(num_clients=COHORT, value_range=0.5, max_weight=1.0, dropout=NEARLY_ALL)
    adaptive = private(averaging, 0.5, 0.8, adaptive=AdaptiveClip())
    found = run(secure_sum(adaptive, **around), 2)
    assert of_clients(found, "sum_discarded") == [1.0, 1.0]
    np.testing.assert_array_equal(found.state["pool"].clip, [0.5])
    variates = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(0.1, 1.0))
    start = jax.eval_shape(variates.init, jax.random.key(0))
    found = run(secure_sum(private(variates, 0.5, 0.8, extra_clip=0.5), **around), 2)
    assert jax.tree.structure(found.state["pool"].inner) == jax.tree.structure(start)
    for leaf in jax.tree.leaves(found.state["pool"].inner.variate):
        np.testing.assert_array_equal(leaf, 0)


def test_epsilon_of_poisson_cohorts_would_be_too_small():
    method = private(averaging, 0.5, 0.8, expected_clients=COHORT)
    with pytest.raises(ValueError, match=r"^dropout must be 0 for a private method with expected"):
        secure(method, dropout=0.1)


@pytest.mark.parametrize(
    ("dropout", "message"),
    [
        (-0.1, r"^dropout must be at least 0 and below 1, got -0\.1\.$"),
        (1.0, r"^dropout must be at least 0 and below 1, got 1\.0\.$"),
        (np.nan, r"^dropout must be finite and at least 0 and below 1, got nan\.$"),
        ("some", r"^dropout must be a number at least 0 and below 1, got 'some'\.$"),
    ],
)
def test_bad_input_is_one_line(dropout, message):
    with pytest.raises((ValueError, TypeError), match=message):
        secure(averaging, dropout=dropout)
