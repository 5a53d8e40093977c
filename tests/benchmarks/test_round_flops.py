"""FLOPs of the workloads' rounds, beside those that `report/forward_flops.py` counts in the networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fedavg_cnn, round_flops
from benchmarks.round_flops import LEARNING, forward_flops, work
from fedcodist.models import cnn, digits, emnist, fed_md, resnet
from fedcodist.report import forward_flops as ours
from fedcodist.text import lstm


def of(workload):
    return next(iter(work.WORKLOADS[workload].networks.values()))


@pytest.mark.parametrize(
    ("workload", "network"),
    [
        ("cnn_small", cnn.small_cnn),
        ("cnn_large", cnn.large_cnn),
        ("private", cnn.small_cnn),
        ("digits", lambda: digits.MLP(hidden=(64,))),
        ("emnist", lambda: emnist.emnist_cnn(dropout=(0.0, 0.0))),
        ("resnet20", resnet.resnet20),
    ],
)
def test_a_forward_pass_is_that_of_the_librarys_network(workload, network):
    shape = jax.ShapeDtypeStruct((1, *of(workload).image), jnp.float32)
    variables = jax.eval_shape(network().init, jax.random.key(0), shape)
    counted = ours.forward_flops(network().apply, variables, shape)
    assert forward_flops(of(workload)) == counted


@pytest.mark.parametrize("party", ["party_0", "party_5"])
def test_a_forward_pass_of_a_party(party):
    about = work.WORKLOADS["fed_md"].networks[party]
    network = fed_md.FedMDNetwork(about.widths, 0.0, about.classes)
    shape = jax.ShapeDtypeStruct((1, *about.image), jnp.float32)
    variables = jax.eval_shape(network.init, jax.random.key(0), shape)
    # Ours multiplies the first layer's bias too: it is one more column of that layer's windows.
    bias = 2 * np.prod(about.image[:2]) * about.widths[0]
    counted = ours.forward_flops(network.apply, variables, shape)
    assert forward_flops(about) == counted - bias


@pytest.mark.parametrize(
    ("workload", "network"), [("lstm_small", lstm.small_lstm), ("lstm_large", lstm.large_lstm)]
)
def test_a_sentence_is_its_tokens(workload, network):
    counted = ours.flops_per_token(network(), work.POSITIONS)
    assert forward_flops(of(workload)) == pytest.approx(work.EXPECTED_LENGTH * counted)


def inputs(path, workload, sizes, cohort):
    arrays = {"offsets": np.concatenate([[0], np.cumsum(sizes)])}
    for index, pool in enumerate(work.WORKLOADS[workload].networks):
        arrays[f"{pool}/cohorts"] = np.array([[index] * cohort, [index + 1] * cohort])
    np.savez(path, **arrays)
    return path


def test_a_round_is_what_its_clients_learn_from(tmp_path):
    """20 clients of 100 images: the number of fedavg_cnn.py but for the first images' gradient."""
    path = inputs(tmp_path / "equal.npz", "cnn_small", [100, 100], 20)
    images = 20 * 100
    left_out = images * 2 * fedavg_cnn.LAYERS["small"][0]
    expected = images * fedavg_cnn.training_flops("small") + left_out
    assert round_flops.flops_of_round("cnn_small", path, 2) == expected
    # The mean of the rounds that are measured.
    path = inputs(tmp_path / "unequal.npz", "cnn_small", [10, 30], 2)
    each = LEARNING * forward_flops(of("cnn_small"))
    assert round_flops.flops_of_round("cnn_small", path, 1) == 20 * each
    assert round_flops.flops_of_round("cnn_small", path, 2) == 40 * each
    assert round_flops.flops_of_round("cnn_small", path, 3) == pytest.approx(100 / 3 * each)


def test_models_that_teach_each_other(tmp_path):
    small, large = (forward_flops(n) for n in work.WORKLOADS["merged"].networks.values())
    path = inputs(tmp_path / "merged.npz", "merged", [100] * 3, 20)
    both = (2000 * LEARNING + 32 * 128 * (1 + LEARNING)) * (small + large)
    assert round_flops.flops_of_round("merged", path, 1) == both
    one = forward_flops(of("fed_sdd"))
    path = inputs(tmp_path / "fed_sdd.npz", "fed_sdd", [100] * 5, 2)
    expected = (4 * 200 * LEARNING + 8 * 128 * (4 + LEARNING)) * one
    assert round_flops.flops_of_round("fed_sdd", path, 1) == expected
    both = sum(forward_flops(n) for n in work.WORKLOADS["fed_kd"].networks.values())
    path = inputs(tmp_path / "fed_kd.npz", "fed_kd", [100] * 3, 4)
    assert round_flops.flops_of_round("fed_kd", path, 1) == 400 * LEARNING * both


def test_parties_and_clients_without_a_server(tmp_path):
    parties = sum(forward_flops(n) for n in work.WORKLOADS["fed_md"].networks.values())
    path = inputs(tmp_path / "fed_md.npz", "fed_md", [100] * 11, 1)
    expected = (100 * LEARNING + 1024 * (1 + LEARNING)) * parties
    assert round_flops.flops_of_round("fed_md", path, 1) == expected
    # MHD's clients take steps of 64 private and 64 public images, whatever their sizes.
    headed = of("mhd")
    whole, main = forward_flops(headed), forward_flops(headed._replace(heads=0))
    assert whole - main == 2 * 128 * 3 * 100
    path = inputs(tmp_path / "mhd.npz", "mhd", [7] * 9, 1)
    expected = 8 * 100 * 64 * (LEARNING * (main + whole) + whole)
    assert round_flops.flops_of_round("mhd", path, 1) == expected


@pytest.mark.parametrize("workload", list(work.WORKLOADS))
def test_every_workload_is_counted(workload, tmp_path):
    count = len(work.WORKLOADS[workload].networks) + 1
    path = inputs(tmp_path / "inputs.npz", workload, [50] * count, 2)
    assert round_flops.flops_of_round(workload, path, 2) > 0
