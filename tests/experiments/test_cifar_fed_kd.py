"""FedKD on CIFAR-10 from its config: every kind of run is built, and what the baselines send."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import cifar_fed_kd
from fedcodist.commands import sweep
from fedcodist.config import networks
from fedcodist.config.experiment import build_experiment
from fedcodist.core.communication import tree_bytes
from fedcodist.core.trees import parameter_count
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.run.experiment import check_experiment

ROOT = Path(__file__).parents[2]
RUNS = (
    "fed_avg,teacher",
    "fed_kd",
    "fed_kd,0.9-1",
    "fml",
    "fetch_sgd",
    "fed_dropout",
    "centralised",
    "fed_kd,smaller",
    "fed_kd,no_mutual_16",
    "fetch_sgd_16",
    "resnet,fed_kd",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made-up images in place of CIFAR-10."""
    draws, splits = np.random.default_rng(0), {}
    for name, rows in (("train", 400), ("test", 20)):
        columns = {
            "image": draws.integers(0, 256, (rows, 32, 32, 3)).astype(np.uint8),
            "label": (np.arange(rows) % 10).astype(np.int32),
        }
        splits[name] = FederatedData.from_arrays(columns, offsets=[0, rows], client_ids=["all"])
    path = tmp_path_factory.mktemp("cifar10")
    save_prepared(
        path, splits, source="made up", licence="none", arguments={"data_set": "CIFAR-10"}
    )
    return str(path)


def build(run, folder):
    config = cifar_fed_kd.get_config(run)
    config.data.folder = config.data.unlabelled_folder = folder
    experiment = build_experiment(config)
    check_experiment(experiment)
    return experiment


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_runs_are_built(run, folder):
    experiment = build(run, folder)
    clients = 16 if run.endswith("_16") else 1 if run == "centralised" else 4
    algorithm = experiment.algorithm
    assert algorithm.num_clients == clients == len(experiment.data.sizes)
    assert np.ptp(np.asarray(experiment.data.sizes)) <= 1  # equal random parts
    of_pair = run.removeprefix("resnet,").startswith(("fed_kd", "fml", "centralised"))
    assert list(algorithm.personal_models["main"]) == (["main_teachers"] if of_pair else [])
    if of_pair:
        row = algorithm.client_states["main"].first
        own = getattr(row, "inner", row)
        assert hasattr(row, "memory") == (run != "fml")
        assert tree_bytes(own.teacher.params) == 4 * (272_474 if "resnet" in run else 386_954)
        assert len(own.maps) == (3 if "resnet" in run else 5)


def test_runs_have_folders_and_settings_of_their_own():
    runs = cifar_fed_kd.get_runs()
    assert len({sweep.run_folder_name(run) for run in runs}) == len(set(runs)) == len(runs)
    with pytest.raises(ValueError, match=r"a run of this config is one of .*, got 'fed_kd,32'"):
        cifar_fed_kd.get_config("fed_kd,32")
    settings = {
        cifar_fed_kd.get_config(run).copy_and_resolve_references().to_json() for run in runs
    }
    assert len(settings) == len(runs)
    thresholds = {
        run: (links.start, links.end)
        for run in runs
        if (links := cifar_fed_kd.get_config(run).training.get("compression")) is not None
    }
    swept = {thresholds[run] for run in thresholds}
    assert {(start, 1.0) for start in (0.9, 0.95, 1.0)} <= swept
    assert {(0.95, end) for end in (0.95, 0.98, 1.0)} <= swept


def test_students_are_a_third_of_their_teachers_at_most():
    counts = {cifar_fed_kd.CNN: (386_954, 97_738), cifar_fed_kd.RESNET: (272_474, 78_042)}
    for pair, expected in counts.items():
        found = tuple(size_of(name) for name in (pair.teacher, pair.student))
        assert found == expected and 3 * found[1] <= found[0]
    network, shape = cifar_fed_kd.smaller_student(10), (24, 24, 3)
    assert parameters(network, shape) == 24_938


def test_baselines_send_what_they_do_in_the_fedkd_paper():
    """FetchSGD 24.9 %, Federated Dropout 60.0 % of FedAvg's bytes (FedKD, tables 2 and 3)."""
    whole = size_of("cnn_large_10")
    config = cifar_fed_kd.get_config("fetch_sgd")
    sketch = config.training.fetch_sgd
    both_ways = config.rounds * (sketch.sketch_rows * sketch.sketch_columns + 2 * sketch.k)
    fed_avg = 2 * whole * cifar_fed_kd.get_config("fed_avg,teacher").rounds
    assert both_ways / fed_avg == pytest.approx(0.249, abs=0.002)
    # A client's first download is the whole model, as it was measured.
    measured = recorded_bytes("fetch_sgd") / recorded_bytes("fed_avg-teacher")
    assert measured == pytest.approx((both_ways + whole) / fed_avg, abs=0.002)
    share = cifar_fed_kd.get_config("fed_dropout").training.fed_dropout.share
    network, shape = networks.MODELS["cnn_large_10"]
    narrow = parameters(networks.narrowed(network(), share), shape)
    assert narrow / whole == pytest.approx(0.6, abs=0.01)


def recorded_bytes(name):
    record = json.loads((ROOT / "results" / "cifar_fed_kd" / f"{name}.json").read_text())
    (model,) = record["bytes"].values()
    return record["rounds"] * (model["up"] + model["down"])


def size_of(name):
    network, shape = networks.MODELS[name]
    return parameters(network(), shape)


def parameters(module, shape):
    return parameter_count(
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *shape)))["params"]
    )
