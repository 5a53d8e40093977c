"""Secure sums: equal to plain ones for every execution, uniform before they are added, never wrapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from scipy import stats
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_dropout import fed_dropout
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.party import PARTIES, PartyResult, run_parties
from fedcodist.algorithms.parties.reductions import sums
from fedcodist.algorithms.pools.fed_df import fed_df
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.compressed_reduce import compressed_reduce
from fedcodist.compression.quantisation import quantisation
from fedcodist.core.aggregation import ClientResult, mask_of_round, weighted_mean
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Cohort, Inputs, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.distillation.settings import Distillation
from fedcodist.models import MLP
from fedcodist.privacy.private import private
from fedcodist.privacy.secure_sum import secure_sum
from fedcodist.privacy.secure_sum_bytes import agreement_bytes, vector_bytes
from fedcodist.privacy.secure_sum_reduce import fixed_point_reduce, resolution, secure_sum_reduce
from fedcodist.run.divergence import TrainingDiverged
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.fedjax_adapter import as_fedjax
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, RANGE, WEIGHT = 7, 2.0, 9.0
SHAPES = {"w": (4, 3), "b": (3,)}
MESSAGE = Variables({name: jnp.zeros(shape) for name, shape in SHAPES.items()}, {"m": jnp.zeros(2)})


def returned(seed):
    """What a client returns: the same numbers however clients are executed."""
    key = jax.random.fold_in(jax.random.key(3), seed)
    # Multiples of 1/256, which no compiler rounds in a way of its own.
    draw = lambda n, shape: jax.random.randint(jax.random.fold_in(key, n), shape, -512, 513) / 256
    update = {name: draw(n, shape) for n, (name, shape) in enumerate(SHAPES.items())}
    weight = 1.0 + seed % 8
    return ClientResult(update, {"m": draw(9, (2,))}, weight, None, {}, extra={"e": draw(8, (5,))})


def client_update(message, client_state, data, key):
    return returned(data.columns["seed"][data.start])


def cohort_of(size):
    places = jnp.arange(size, dtype=jnp.int32)
    sizes = 1 + places % 3
    return Cohort({"seed": jnp.arange(size)}, 5 * places + 2, places, sizes, capacity=3)


def total_of(reduce, execution, devices=None, size=CLIENTS):
    """(the sum before `finalize`, the aggregate), on every device or on one."""

    def round_(cohort, axis_name=None):
        key = jax.random.key(11)
        result = for_each_client(
            client_update,
            reduce.prepare,
            MESSAGE,
            None,
            cohort,
            key,
            execution,
            axis_name,
            mask=mask_of_round(reduce, cohort.clients, key),
        )
        return result.total, reduce.finalize(result.total, MESSAGE, key)

    cohort = cohort_of(size)
    if execution.loop == "eager":
        return round_(cohort)
    return over_devices(round_, devices)(cohort)


def over_devices(round_, devices):
    """The round, compiled for some devices, or for one without a mesh."""
    if devices is None:
        return jax.jit(round_)
    over = jax.shard_map(
        functools.partial(round_, axis_name="clients"),
        mesh=Mesh(np.array(jax.devices()[:devices]), ("clients",)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(over)


def modulo(tree, bits):
    return [np.asarray(leaf) & np.uint32(2**bits - 1) for leaf in jax.tree.leaves(tree)]


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


FEW = [(Execution("scan"), None), (Execution("vmap", 3), 2)]
MANY = [
    *[(Execution("scan"), 2), (Execution("vmap", 2), 3), (Execution("vmap", 20), None)],
    *[(Execution("scan"), None), (Execution("vmap", 3), None), (Execution("eager"), None)],
]


@pytest.mark.parametrize(
    ("bits", "executions"),
    [
        (32, FEW),
        pytest.param(32, MANY, marks=pytest.mark.slow),
        pytest.param(18, MANY, marks=pytest.mark.slow),
    ],
    ids=["few", "many", "18_bits"],
)
def test_every_execution_gives_the_plain_sum_up_to_half_a_step_per_client(bits, executions):
    reduce = secure_sum_reduce(CLIENTS, RANGE, WEIGHT, bits)
    plain = total_of(weighted_mean(), Execution("scan"))[1]
    totals = []
    for execution, devices in executions:
        total, aggregate = total_of(reduce, execution, devices)
        totals.append(modulo(total, bits))
        half = CLIENTS * resolution(CLIENTS, RANGE, WEIGHT, bits) / 2
        # float32 has 24 bits, the sum is below 100.
        sums = lambda a: jax.tree.map(
            lambda leaf: leaf * plain.weight, (a.pseudo_gradient, a.mutable)
        )
        for found, expected in zip(
            jax.tree.leaves((sums(aggregate), aggregate.weight)),
            jax.tree.leaves((sums(plain), plain.weight)),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=half + 1e-5)
    assert all(same(total, totals[0]) for total in totals[1:])
    # Without masks the sum is the same to the bit.
    bare = secure_sum_reduce(CLIENTS, RANGE, WEIGHT, bits, masks=False)
    total = total_of(bare, Execution("vmap", 3))[0]
    assert same(modulo(total, bits), totals[0])


@settings(max_examples=15)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=6),
    st.integers(4, 32),
    st.floats(0.1, 100),
)
def test_sums_in_exact_arithmetic(values, bits, value_range):
    """Each client's number is clipped and rounded, and integers are added up without wrapping."""
    count = len(values)
    if (2 ** (bits - 1) - 1) // count < 1:
        return
    reduce = secure_sum_reduce(count, value_range, 1.0, bits)
    places, key = jnp.arange(count), jax.random.key(0)
    results = ClientResult(jnp.float32(values), {}, jnp.ones(count), None, {})
    with jax.disable_jit():
        prepared = [
            reduce.mask(
                reduce.prepare(jax.tree.map(lambda leaf, i=i: leaf[i], results), key),
                *(places[i], places, key),
            )
            for i in range(count)
        ]
        total = jax.tree.map(lambda *leaves: sum(leaves), *prepared)
        mean = reduce.finalize(total, Variables({}, {}), key).pseudo_gradient
    step = resolution(count, value_range, 1.0, bits)
    clipped = np.clip(np.float64(values), -value_range, value_range)
    bound = count * step / 2 + 1e-6 * np.abs(clipped).sum()
    weight = float(reduce.finalize(total, Variables({}, {}), key).weight)
    assert abs(weight - count) <= count * step / 2 + 1e-6 * count
    if weight > 0:
        assert abs(float(mean) * weight - clipped.sum()) <= bound * 1.001 + 1e-6


def p_values(vector, bits):
    """Of chi-square tests that the highest and the lowest eight bits are uniform."""
    high, low = vector >> max(bits - 8, 0), vector & 255
    return [stats.chisquare(np.bincount(part, minlength=256)).pvalue for part in (high, low)]


def sent_by(client, reduce, numbers, clients=(3, 8, 21), seed=5):
    """The vector that leaves a client whose numbers are these, as the server gets it."""
    key = jax.random.key(seed)
    prepared = reduce.prepare(ClientResult(numbers, {}, jnp.float32(1), None, {}), key)
    masked = reduce.mask(prepared, jnp.int32(client), jnp.int32(clients), key)
    return np.asarray(jax.tree.leaves(masked)[0])


@pytest.mark.parametrize("bits", [32, 20])
def test_what_leaves_a_client_is_uniform(bits):
    numbers = jnp.full(1 << 16, 0.25)
    reduce = secure_sum_reduce(3, 1.0, bits=bits)
    vectors = [sent_by(client, reduce, numbers) for client in (3, 8, 21)]
    for vector in vectors:
        assert vector.max() < 2**bits
        assert min(p_values(vector, bits)) > 1e-4
    # Two of three clients' sum is still masked by the third; all three give the sum.
    assert min(p_values((vectors[0] + vectors[1]) & (2**bits - 1), bits)) > 1e-4
    assert len(np.unique((vectors[0] + vectors[1] + vectors[2]) & (2**bits - 1))) == 1
    # Masks of another round are others.
    other = sent_by(3, reduce, numbers, seed=6)
    assert min(p_values((vectors[0] - other) & (2**bits - 1), bits)) > 1e-4
    # The test can fail: without masks it does.
    bare = sent_by(3, secure_sum_reduce(3, 1.0, bits=bits, masks=False), numbers)
    assert max(p_values(bare, bits)) < 1e-9


def test_slots_without_a_client_share_no_masks():
    reduce = secure_sum_reduce(4, 1.0)
    key, clients, present = jax.random.key(0), jnp.array([5, 2, 2, 9]), [True, True, False, True]
    mask = mask_of_round(reduce, clients, key, jnp.array(present))
    result = ClientResult(jnp.array([0.25, -0.5]), {}, jnp.float32(1), None, {})
    sent = [mask(reduce.prepare(result, key), clients[i]) for i in range(4) if present[i]]
    total = jax.tree.map(lambda *leaves: sum(leaves), *sent)
    mean = reduce.finalize(total, Variables({}, {}), key).pseudo_gradient
    np.testing.assert_allclose(mean, [0.25, -0.5], rtol=1e-6)


@pytest.mark.parametrize("masks", [True, False])
def test_a_client_who_is_alone_sends_nothing(masks):
    """The sum would be its vector. A model then stays as after a cohort without clients."""
    reduce = secure_sum_reduce(4, 1.0, masks=masks)
    key, clients = jax.random.key(0), jnp.array([5, 2, 7])
    result = ClientResult(jnp.array([0.25, -0.5]), {}, jnp.float32(1), None, {})
    for present, expected in (([True, False, False], 0), ([True, True, False], 1)):
        mask = mask_of_round(reduce, clients, key, jnp.array(present))
        sent = [mask(reduce.prepare(result, key), clients[i]) for i in range(3) if present[i]]
        total = jax.tree.map(lambda *leaves: sum(leaves), *sent)
        mean = reduce.finalize(total, Variables({}, {}), key).pseudo_gradient
        np.testing.assert_allclose(mean, expected * np.array([0.25, -0.5]), rtol=1e-6)


def test_groups_of_a_single_client_are_refused():
    method = secure_sum(averaging, 4, value_range=3.0, max_weight=6.0)
    make = functools.partial(fed_sdd, columns=federated().columns, num_unlabelled=4)
    distillation = Distillation(0)
    with pytest.raises(
        ValueError, match=r"^pool must have at least 2 clients per model .*\[2, 1\]"
    ):
        make(Pool(method, np.arange(4), 3), num_models=2, distillation=distillation)
    assert make(Pool(method, np.arange(4), 4), num_models=2, distillation=distillation).name


def test_the_mean_over_those_who_had_a_parameter_is_the_plain_one():
    """Federated Dropout's clients say with 0 and 1 which parameters they had, beyond a small range."""
    network, small = (
        from_flax_linen(MLP(hidden=(width,), classes=CLASSES), jnp.zeros((1, FEATURES)))
        for width in (4, 2)
    )
    method = fed_dropout(
        network, small, ("Dense_0", "Dense_1"), LocalTraining(), hyper=FedAvgHyper(0.01, 1.0)
    )
    secure = secure_sum(method, 4, value_range=0.25, max_weight=6.0)
    found, expected = (run(each) for each in (secure, method))
    assert of_clients(found, "client_clipped_share") == [0.0] * ROUNDS
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        found.variables["pool"].params,
        expected.variables["pool"].params,
    )


def test_without_metrics_nothing_is_told_about_clipping():
    for metrics in (True, False):
        inner = private(averaging, 1.0, 0.0, metrics=metrics)
        outcome = run(secure_sum(inner, 4, value_range=3.0, max_weight=6.0))
        is_told = [any("clipped_share" in name for name in line) for line in outcome.records]
        assert any(is_told) == metrics


@pytest.mark.parametrize("is_private", [True, False])
def test_a_private_client_does_not_send_that_it_was_clipped(is_private):
    """The exact number of such clients is no part of what epsilon covers."""
    arguments = dict(value_range=1.0, max_weight=1.0, bits=32, masks=False, is_private=is_private)
    reduce = fixed_point_reduce(weighted_mean(), 2, **arguments)
    result = ClientResult({"a": jnp.array([5.0])}, {}, jnp.float32(1), None, {})
    clipped, _ = reduce.prepare(result, jax.random.key(0)).flags
    assert int(clipped.values) == (not is_private)


def test_a_number_out_of_range_is_clipped_and_told():
    reduce = secure_sum_reduce(2, 1.0, max_weight=3.0)
    key, clients = jax.random.key(0), jnp.arange(2)
    results = [
        ClientResult({"a": jnp.array([5.0, 0.5])}, {}, jnp.float32(2), None, {}),
        ClientResult({"a": jnp.array([-0.5, -0.25])}, {}, jnp.float32(4), None, {}),
    ]
    prepared = [
        reduce.mask(reduce.prepare(result, key), clients[i], clients, key)
        for i, result in enumerate(results)
    ]
    total = jax.tree.map(jnp.add, *prepared)
    aggregate = reduce.finalize(total, Variables({}, {}), key)
    # The first client's 5 counts as 1, and the second's weight of 4 as 3.
    np.testing.assert_allclose(aggregate.weight, 5, rtol=1e-6)
    expected = [(2 * 1 - 3 * 0.5) / 5, (2 * 0.5 - 3 * 0.25) / 5]
    np.testing.assert_allclose(aggregate.pseudo_gradient["a"], expected, rtol=1e-5)
    assert aggregate.metrics["client_clipped_share"] == 1
    assert aggregate.metrics["client_bytes_up"] == 4 * (2 + 1 + 2) + agreement_bytes(2).up
    inside = [results[0]._replace(update={"a": jnp.array([1.0, 0.5])}), results[0]]
    prepared = [reduce.prepare(result, key) for result in inside]
    total = jax.tree.map(jnp.add, *prepared)
    aggregate = reduce.finalize(total, Variables({}, {}), key)
    assert aggregate.metrics["client_clipped_share"] == 0.5


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_client_without_finite_numbers_makes_the_sum_nan(wrong):
    reduce = secure_sum_reduce(2, 1.0, bits=12)
    key = jax.random.key(0)
    results = [
        ClientResult(jnp.array([wrong, 0.5]), {}, jnp.float32(1), None, {}),
        ClientResult(jnp.array([0.5, 0.5]), {}, jnp.float32(1), None, {}),
    ]
    total = jax.tree.map(jnp.add, *(reduce.prepare(result, key) for result in results))
    assert np.isnan(reduce.finalize(total, Variables({}, {}), key).pseudo_gradient).all()


def parties_in_a_round(reduce, devices):
    """(the sum of 0.5, -0.25 and 0.125, metrics) of parties of two architectures."""
    model = softmax_regression(2, 2)
    groups = {
        "pair": PartyGroup(model, np.array([0, 2])),
        "single": PartyGroup(model, np.array([1])),
    }
    columns = {"number": jnp.array([0.5, -0.25, 0.125])}
    places = jnp.arange(3, dtype=jnp.int32)
    cohort = Cohort(columns, places, places, jnp.ones(3, jnp.int32), capacity=1)
    states = {"pair": jnp.zeros(2), "single": jnp.zeros(1)}

    def update(model, message, state, data, key):
        number = data.columns["number"][data.start] * (data.size > 0)
        return PartyResult(state, {"num_steps": data.size}, {"number": number})

    def round_(cohort, axis_name=None):
        round = Round(0, jax.random.key(0), Inputs({PARTIES: cohort}, {}), axis_name)
        found = run_parties(groups, update, None, states, round, jax.random.key(1), reduce=reduce)
        return found.combined["number"], found.metrics

    return over_devices(round_, devices)(cohort)


@pytest.mark.parametrize("devices", [None, 2])
def test_parties_of_several_architectures_share_masks(devices):
    reduce = secure_sum_reduce(3, 1.0, reduce=sums())
    total, metrics = parties_in_a_round(reduce, devices)
    assert total == pytest.approx(0.375, abs=1e-6)
    for party in ("pair_0", "pair_2", "single"):
        assert metrics[f"{party}/client_bytes_up"] == 4 * (2 + 2) + agreement_bytes(3).up
        assert metrics[f"{party}/client_clipped_share"] == 0


# ------------------------------------------------------------------------------------- whole methods

SIZES, FEATURES, CLASSES, ROUNDS = (3, 5, 2, 4, 6, 3), 6, 5, 3
MODEL = softmax_regression(FEATURES, CLASSES)
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=2)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
averaging = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(0.3, 1.0))


def run(method, cohort_size=4):
    pool = Pool(method, np.arange(len(SIZES)), cohort_size)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    experiment = Experiment(
        algorithm, resident_data(federated(), {}), {"train": federated()}, ROUNDS, evaluate_every=1
    )
    return run_experiment(experiment, show_progress=False)


def weights(outcome):
    return outcome.variables["pool"].params["w"][0]


def of_clients(outcome, metric):
    return [r[metric] for r in outcome.records if r["split"] == "clients"]


@functools.cache
def plain():
    return run(averaging)


def test_a_run_is_the_plain_one_and_counts_its_bytes():
    secure = run(secure_sum(averaging, 4, value_range=3.0, max_weight=6.0))
    np.testing.assert_allclose(weights(secure), weights(plain()), rtol=1e-5, atol=1e-6)
    assert of_clients(secure, "client_clipped_share") == [0] * ROUNDS
    size = FEATURES * CLASSES
    told = secure.summary["models"]["pool"]
    # The model, the weight, and two flags; keys and shares.
    assert told["bytes_up_per_participation"] == 4 * (size + 1 + 2) + agreement_bytes(4).up
    assert told["bytes_down_per_participation"] == 4 * size + agreement_bytes(4).down
    assert secure_sum(averaging, 4, 3.0, 6.0).client_update is not averaging.client_update
    coarse = run(secure_sum(averaging, 4, value_range=0.05, max_weight=6.0, bits=12))
    assert 0 < of_clients(coarse, "client_clipped_share")[0] <= 1
    assert np.abs(weights(coarse) - weights(plain())).max() > 1e-3
    up = coarse.summary["models"]["pool"]["bytes_up_per_participation"]
    assert up == vector_bytes(size + 3, 12) + agreement_bytes(4).up


def nothing_leaves(reduce):
    """The reduction with a mask that takes everything away, and remembers between whom it was."""
    seen = []

    def mask(prepared, client, clients, key):
        seen.append(len(clients))
        return jax.tree.map(jnp.zeros_like, prepared)

    return reduce._replace(mask=mask), seen


def test_masks_are_between_all_clients_of_a_round():
    """In pools, among parties of all architectures, and with FedJAX's interface."""
    reduce, seen = nothing_leaves(weighted_mean())
    found = weights(run(averaging._replace(reduce=reduce)))
    np.testing.assert_array_equal(found, MODEL.init(None).params["w"])
    assert set(seen) == {4}

    reduce, seen = nothing_leaves(sums())
    assert parties_in_a_round(reduce, None)[0] == 0 and set(seen) == {3}

    reduce, seen = nothing_leaves(weighted_mean())
    as_in_fedjax = as_fedjax(averaging._replace(reduce=reduce), execution=Execution("scan"))
    server = as_in_fedjax.init(jax.random.key(0))
    clients = [(n, federated().client(n), jax.random.key(n)) for n in (1, 3)]
    after, _ = as_in_fedjax.apply(server, clients, round=0)
    np.testing.assert_array_equal(after.params["w"], server.params["w"])
    assert set(seen) == {2}


def test_a_divergence_is_still_reported():
    method = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(1e38, 1.0))
    with pytest.raises(TrainingDiverged, match=r"^non-finite update in round \d, pool 'pool'"):
        run(secure_sum(method, 4, 1e6, 6.0))


@pytest.mark.slow
def test_around_compression_and_variates():
    links = dict(num_rounds=ROUNDS, uplink=quantisation(8))
    inner = compressed(averaging, **links)
    found = run(secure_sum(inner, 4, 3.0, 6.0))
    np.testing.assert_allclose(weights(found), weights(run(inner)), rtol=1e-5, atol=1e-6)
    size = FEATURES * CLASSES
    assert of_clients(found, "client_bytes_up")[0] == 4 * (size + 3) + agreement_bytes(4).up
    variates = scaffold(MODEL, len(SIZES), TRAINING, hyper=FedAvgHyper(0.1, 1.0))
    found, without = run(secure_sum(variates, 4, 10.0, 6.0)), run(variates)
    np.testing.assert_allclose(weights(found), weights(without), rtol=1e-4, atol=1e-5)
    assert of_clients(found, "client_bytes_up")[0] == 4 * (2 * size + 3) + agreement_bytes(4).up


def test_servers_that_distil_compose_and_those_that_need_models_refuse():
    secure = secure_sum(averaging, 4, 3.0, 6.0)
    pools = {"small": Pool(secure, np.arange(6), 4), "large": Pool(averaging, np.arange(3), 2)}
    distillation = Distillation(2, 4, mixup_beta=0)
    common = dict(columns=federated().columns, num_unlabelled=9, distillation=distillation)
    periodic_codistillation(pools, num_rounds=ROUNDS, period=2, **common)
    with pytest.raises(
        ValueError, match=r"pools\['small'\]\.method must send changes of whole models.* secure sum"
    ):
        fed_df(pools, **common)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (dict(num_clients=1), "num_clients must be at least 2, got 1"),
        (dict(value_range=0.0), "value_range must be above 0, got 0"),
        (dict(max_weight=-1.0), "max_weight must be above 0, got -1"),
        (dict(bits=33), "bits must be at most 32, got 33"),
        (dict(bits=4, num_clients=8), "bits must be enough for 8 clients .* at least 5, got 4"),
        (dict(masks=1), "masks must be True or False"),
    ],
)
def test_bad_input_is_one_line(differs, message):
    good = dict(num_clients=4, value_range=1.0, max_weight=1.0)
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        secure_sum(averaging, **(good | differs))
    assert "\n" not in str(raised.value)


def test_what_does_not_go_together():
    secure = secure_sum(averaging, 4, 1.0, 1.0)
    with pytest.raises(ValueError, match="method must not be one of a secure sum already"):
        secure_sum(secure, 4, 1.0, 1.0)
    with pytest.raises(ValueError, match="reduce must not be a secure sum"):
        compressed_reduce(quantisation(8), secure_sum_reduce(4, 1.0))
    with pytest.raises(ValueError, match=r"num_clients must be at least .* a cohort of 4\."):
        run(secure_sum(averaging, 3, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"the cohort at least 2 clients .* a cohort of 1\."):
        run(secure_sum(averaging, 3, 1.0, 1.0), cohort_size=1)
