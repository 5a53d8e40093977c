"""Any method with compressed links: against a plain loop in float64, and composed with every method."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.fed_df import fed_df
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed, missed_bytes, plus
from fedcodist.compression.count_sketch import count_sketch
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.svd import svd
from fedcodist.compression.top_k import top_k
from fedcodist.core.client_states import device_client_states
from fedcodist.core.communication import tree_bytes
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.digits import BatchNormMLP
from fedcodist.run.divergence import TrainingDiverged
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, FEATURES, CLASSES, ROUNDS = (3, 5, 2, 4, 6, 3), 6, 5, 4
RATE, EPOCHS = 0.3, 2
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
UNLABELLED_IMAGES = np.random.default_rng(1).normal(size=(9, FEATURES)).astype(np.float32)


MODEL = softmax_regression(FEATURES, CLASSES)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
WHOLE = 4 * FEATURES * CLASSES  # bytes of the model


def averaging(**links):
    method = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))
    return compressed(method, ROUNDS, **links) if links else method


@functools.cache
def plain(cohort_size):
    return run(averaging(), cohort_size)


def run(method, cohort_size=3, source=resident_data, rounds=ROUNDS):
    """(weights after the last round, cohorts, the run's outcome)."""
    pool = Pool(method, np.arange(len(SIZES)), cohort_size)
    algorithm = independent_pools({"pool": pool}, federated().columns)
    experiment = Experiment(
        algorithm, source(federated(), {}), {"train": federated()}, rounds, evaluate_every=1
    )
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    return trained.variables["pool"].params["w"][0], cohorts, trained


def bytes_of(outcome, way):
    """By round, means over the cohort."""
    return [r[f"client_bytes_{way}"] for r in outcome.records if r["split"] == "clients"]


def local(w, client):
    """The client's model after its epochs, in float64."""
    rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
    images = federated().columns["image"][rows].astype(np.float64)
    labels = federated().columns["label"][rows]
    for _ in range(EPOCHS):
        logits = images @ w
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        w = w - RATE * images.T @ (shares - np.eye(CLASSES)[labels]) / len(labels)
    return w


def largest(array, count):
    order = np.argsort(-np.abs(array).reshape(-1), kind="stable")[:count]
    kept = np.zeros(array.size)
    kept[order] = array.reshape(-1)[order]
    return kept.reshape(array.shape)


def leading(array, share):
    """(the matrix of least rank that keeps the share of energy, its bytes)."""
    left, values, right = np.linalg.svd(array, full_matrices=False)
    kept = np.cumsum(values**2) / np.sum(values**2)
    rank = 1 + int(np.argmax(kept >= share))
    cost = rank * (sum(array.shape) + 1)
    if share >= 1 or cost >= array.size:
        return array, 4 * array.size
    return (left[:, :rank] * values[:rank]) @ right[:rank], 4 * cost


def test_a_plain_loop_in_float64():
    """Top-k with error feedback up, SVD of rising thresholds down, three of six clients a round."""
    count, start, end = 5, 0.5, 0.9
    links = dict(uplink=with_error_feedback(top_k(count=count)), downlink=svd(start, end))
    found, cohorts, outcome = run(averaging(**links))
    w = np.asarray(MODEL.init(None).params["w"], np.float64)
    errors, read, sent = [0.0] * len(SIZES), [0] * len(SIZES), WHOLE
    for round, cohort in enumerate(cohorts):
        updates, down = [], []
        for client in cohort:
            wanted = w - local(w, client) + errors[client]
            updates.append(largest(wanted, count))
            errors[client] = wanted - updates[-1]
            down.append(min(sent - read[client], WHOLE))
            read[client] = sent
        change = np.average(updates, axis=0, weights=[SIZES[c] for c in cohort])
        restored, cost = leading(change, start + (end - start) * (round + 1) / ROUNDS)
        w, sent = w - restored, sent + cost
        assert bytes_of(outcome, "up")[round] == 8 * count + 4  # and the weight
        assert bytes_of(outcome, "down")[round] == pytest.approx(np.mean(down), rel=1e-6)
    assert len({c for cohort in cohorts for c in cohort}) == len(SIZES)  # some waited
    np.testing.assert_allclose(found, w, atol=1e-5)
    assert np.abs(found - plain(3)[0]).max() > 1e-2
    # The summary has the measured bytes, not those computed from shapes.
    told = outcome.summary["models"]["pool"]
    assert told["bytes_up_per_participation"] == 8 * count + 4
    assert told["bytes_down_per_participation"] == round_(np.mean(bytes_of(outcome, "down")))


@given(
    st.integers(0, 2**40), st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(1, 2**31)
)
@example(2**32 - 1, 5, 3, 100)
@example(7, 2**32 - 1, 2**32, 100)
def test_bytes_are_counted_beyond_32_bits(first, more, further, most):
    """A server of BERT's size has sent 2**32 after some forty rounds."""
    words = lambda count: jnp.array([count >> 32, count & (2**32 - 1)], jnp.uint32)
    later = plus(words(first), jnp.uint32(more))
    assert (int(later[0]) << 32) + int(later[1]) == first + more
    found = missed_bytes(words(first + further), words(first), most)
    assert found.dtype == jnp.uint32 and int(found) == min(further, most)


def round_(number):
    return int(np.round(number))


@pytest.mark.slow
def test_rows_on_the_host_are_the_same():
    links = dict(uplink=with_error_feedback(top_k(count=5)), downlink=svd(0.5, 0.9))
    resident, streamed = (run(averaging(**links), source=s) for s in (resident_data, StreamedData))
    np.testing.assert_allclose(resident[0], streamed[0], atol=1e-6)
    assert bytes_of(resident[2], "down") == bytes_of(streamed[2], "down")


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("uplink",), ("downlink",), ("uplink", "downlink")])
def test_a_threshold_of_one_is_uncompressed(ways):
    """Models agree to float tolerance, bytes exactly."""
    found, _, outcome = run(averaging(**{way: svd(1.0, 1.0) for way in ways}), len(SIZES))
    without, _, other = plain(len(SIZES))
    np.testing.assert_allclose(found, without, rtol=1e-5, atol=1e-6)
    told, expected = (each.summary["models"]["pool"] for each in (outcome, other))
    assert told == expected


@pytest.mark.slow
def test_a_client_never_downloads_more_than_the_model():
    links = dict(downlink=quantisation(16))  # 60 + 8 bytes a message, 120 a model
    down = np.array(bytes_of(run(averaging(**links), 2)[2], "down"))
    assert down[0] == WHOLE
    assert ((down >= 68) & (down <= WHOLE)).all()
    everybody = bytes_of(run(averaging(**links), len(SIZES))[2], "down")
    assert everybody == [WHOLE, 68, 68, 68]


def test_one_client_without_loss_is_local_training():
    found, cohorts, _ = run(averaging(uplink=svd(1.0, 1.0), downlink=svd(1.0, 1.0)), 1, rounds=1)
    start = np.asarray(MODEL.init(None).params["w"], np.float64)
    np.testing.assert_allclose(found, local(start, cohorts[0][0]), rtol=1e-5, atol=1e-6)


def test_a_divergence_names_its_round():
    method = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(1e38, 1.0))
    with pytest.raises(TrainingDiverged, match=r"^non-finite update in round 1, pool 'pool'"):
        run(compressed(method, ROUNDS, svd(), svd()))


LINKS = {
    "small": dict(uplink=svd(0.5, 0.9), downlink=svd(0.6, 0.95)),
    "large": dict(uplink=with_error_feedback(top_k(0.2)), downlink=quantisation(4)),
    "sketch": dict(
        uplink=with_error_feedback(count_sketch(3, 10, 15)),
        downlink=with_error_feedback(top_k(0.2)),
    ),
}
LINKS["swapped"] = dict(uplink=quantisation(4), downlink=with_error_feedback(top_k(0.3)))
POOLS = {"small": (3, np.arange(6), 3), "large": (5, np.array([1, 3, 4]), 2)}


@functools.cache
def trained(algorithm, local_method, links):
    """(models' variables, metrics, pool -> bytes of its model) after some rounds."""
    columns = federated().columns
    methods = {}
    for name, (hidden, clients, _) in POOLS.items():
        network = BatchNormMLP((hidden,), CLASSES)
        model = from_flax_linen(network, jnp.zeros((1, FEATURES)))
        if local_method == "scaffold":
            method = scaffold(model, len(clients), TRAINING, hyper=FedAvgHyper(0.1, 1.0))
        else:
            adam = lambda rate: optax.adam(rate, eps=1e-3)
            method = fed_avg(model, TRAINING, adam, hyper=FedAvgHyper(0.1, 0.02))
        own = LINKS.get({"small": links[0], "large": links[1]}[name])
        methods[name] = method if own is None else compressed(method, ROUNDS, **own)
    pools = {name: Pool(methods[name], *POOLS[name][1:]) for name in POOLS}
    common = dict(columns=columns, num_unlabelled=9)
    two = dict(pools=pools, num_rounds=ROUNDS, distillation=Distillation(2, 4, mixup_beta=0))
    match algorithm:
        case "none":
            made = independent_pools(pools, columns)
        case "periodic":
            made = periodic_codistillation(period=2, **two, **common)
        case "merged":
            made = merged_codistillation(alpha=0.5, **two, **common)
        case "fed_sdd":
            once = Distillation(2, 4, mixup_beta=0)
            made = fed_sdd(pools["small"], num_models=2, rounds_kept=2, distillation=once, **common)
        case "fed_df":
            made = fed_df(pools, distillation=Distillation(2, 4, mixup_beta=0), **common)
    programs = build_programs(made, ROUNDS)
    data = resident_data(federated(), {UNLABELLED: {"image": UNLABELLED_IMAGES}})
    rows = jax.tree.map(jnp.asarray, device_client_states(made.client_states, 1))
    seeds, hyper = jnp.zeros(1, jnp.uint32), jax.tree.map(jnp.float32, made.hyper)
    state, rows, metrics = programs.train(programs.init(seeds), rows, seeds, 0, ROUNDS, hyper, data)
    models = {
        name: predictor.variables(jax.tree.map(lambda leaf: leaf[0], state))
        for name, predictor in made.predictors.items()
        if name != "ensemble"
    }
    sizes = {name: tree_bytes(variables) for name, variables in models.items()}
    return (*jax.tree.map(np.asarray, (models, metrics)), sizes)


def distance(left, right):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), left, right)))


ONE, OTHER = ("small", "large"), ("sketch", "swapped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "local_method", "links"),
    [
        ("none", "fed_avg", ONE),
        ("none", "fed_avg", OTHER),
        ("none", "scaffold", ONE),
        ("none", "scaffold", OTHER),
        ("periodic", "fed_avg", ONE),
        ("periodic", "fed_avg", OTHER),
        ("merged", "fed_avg", ONE),
        ("merged", "fed_avg", OTHER),
        ("fed_sdd", "fed_avg", ONE),
        ("fed_sdd", "fed_avg", OTHER),
        ("fed_df", "fed_avg", ONE),
        ("fed_df", "fed_avg", OTHER),
    ],
)
def test_every_method_with_every_compressor(algorithm, local_method, links):
    models, metrics, sizes = trained(algorithm, local_method, links)
    # Rounds without a distillation have no loss of one.
    defined = {name: values for name, values in metrics.items() if "distillation" not in name}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((models, defined)))
    without, _, _ = trained(algorithm, local_method, (None, None))
    for name, size in sizes.items():
        assert distance(models[name].params, without[name].params) > 1e-4
        up = metrics[f"{name}/client_bytes_up"]
        down = metrics[f"{name}/client_bytes_down"]
        besides = 4 + (size if local_method == "scaffold" else 0)
        # In one round all tensors may be sent whole; over all rounds fewer bytes are sent.
        assert (up <= size + besides).all() and (down <= size + besides).all()
        assert (up > besides).all() and up.mean() < size + besides
