"""Configs of clients with different networks, each judged on its own examples."""

import jax
import numpy as np
import pytest

from experiments.configs import cifar_heterogeneous
from fedcodist.config.data import load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.config.party_methods import party_groups, party_optimizer, party_shapes
from fedcodist.configs import digits_heterogeneous
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.models.htfl import GROUPS
from fedcodist.run.experiment import check_experiment, run_experiment

SPLITS = {"train": 4000, "test": 1000}  # as prepared without distillation and held-out clients
QUICK = ("fd", "fed_l2g")  # FedL2G alone differentiates a gradient


def digits(run="fd", **settings):
    config = digits_heterogeneous.get_config(run)
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({n.replace("__", "."): v for n, v in settings.items()})
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Made-up images in place of CIFAR-10 and CIFAR-100."""
    draws, paths = np.random.default_rng(0), {}
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        splits = {}
        for split, rows in SPLITS.items():
            columns = {
                "image": draws.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8),
                "label": draws.integers(0, classes, rows, dtype=np.int32),
            }
            splits[split] = FederatedData.from_arrays(columns, offsets=[0, rows])
        paths[name] = tmp_path_factory.mktemp(name)
        save_prepared(paths[name], splits, source="made up", licence="none", arguments={})
    return paths


def cifar(run, folders):
    config = cifar_heterogeneous.get_config(run)
    config.data.folder = config.data.unlabelled_folder = str(folders[run.split(",")[0]])
    return config


@pytest.mark.parametrize("run", digits_heterogeneous.get_runs())
def test_every_run_on_digits_is_built(run):
    config = digits(run)
    experiment = build_experiment(config)
    check_experiment(experiment)
    assert experiment.algorithm.num_clients == 20
    assert list(experiment.final_client_splits) == ["client_test"] and not experiment.client_splits
    assert config.algorithm.batch_size == 10 and float(experiment.algorithm.hyper[0]) == 0.01


def test_client_i_has_network_i_modulo_four():
    config = digits()
    groups = party_groups(config, load_data(config.data))
    expected = [list(range(first, 20, 4)) for first in range(4)]
    assert [group.clients.tolist() for group in groups.values()] == expected
    names = ["conv_8_16_dropout_0", "conv_4_8_dropout_0", "dense_64", "dense_32"]
    assert list(groups) == names


def test_a_quarter_of_each_clients_images_are_its_tests():
    data = load_data(digits().data)
    train, test = data.splits["train"], data.client_splits["client_test"].test
    sizes = train.client_sizes + test.client_sizes
    np.testing.assert_allclose(test.client_sizes, sizes / 4, atol=0.5)
    # Few labels each, as a Dirichlet distribution of concentration 0.1 gives them.
    labels = [len(np.unique(train.client(client)["label"])) for client in range(20)]
    assert np.mean(labels) < 5


@pytest.mark.usefixtures("compile_quickly")
def test_a_run_judges_every_client_after_the_last_round():
    # Two dense networks of the four, which compile sooner.
    networks = 2 * (((64,), 0.0), ((32,), 0.0))
    config = digits(rounds=2, seeds=1, data__partition__num_clients=4, parties__networks=networks)
    config.evaluation.update(every=2, checkpoint_every=2)
    outcome = run_experiment(build_experiment(config))
    ((model, measured),) = outcome.clients["client_test"].items()
    accuracy = np.asarray(measured.metrics["accuracy"])
    assert model == "parties" and accuracy.shape == (1, 4)
    assert np.all((accuracy >= 0) & (accuracy <= 1))


@pytest.mark.parametrize("data", list(cifar_heterogeneous.DATA))
@pytest.mark.parametrize("split", cifar_heterogeneous.SPLITS)
def test_data_of_scaled_runs(data, split, folders):
    config = cifar(f"{data},{split},fd,scaled", folders)
    loaded = load_data(config.data)
    train, test = loaded.splits["train"], loaded.client_splits["client_test"].test
    assert train.num_examples + test.num_examples == 4000 and list(loaded.splits) == ["train"]
    # As HtFLlib's pixels: (x / 255 - 0.5) / 0.5, and no flips.
    batch = {"image": train.columns["image"][:3]}
    read = loaded.preprocess(batch, jax.random.key(0), np.arange(3))["image"]
    np.testing.assert_allclose(read, batch["image"] / 127.5 - 1, atol=1e-6)
    if split == "pathological":
        labels = [len(np.unique(train.client(client)["label"])) for client in range(20)]
        assert max(labels) == cifar_heterogeneous.DATA[data][1]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in QUICK else [pytest.mark.slow])
        for method in digits_heterogeneous.get_runs()
    ],
)
def test_a_scaled_run_is_built(method, folders):
    experiment = build_experiment(cifar(f"cifar100,pathological,{method},scaled", folders))
    check_experiment(experiment)
    predictors = experiment.algorithm.predictors
    assert {predictors[name].model.num_classes for name in GROUPS["htfl_small"]} == {100}


def test_the_whole_protocol(folders):
    config = cifar("cifar100,dirichlet,fml", folders)
    loaded = load_data(config.data)
    every = [*loaded.splits.values(), loaded.client_splits["client_test"].test]
    assert sum(own.num_examples for own in every) == sum(SPLITS.values())
    shapes = party_shapes(config)
    assert len(shapes) == 20 and shapes[:8] == shapes[8:16] == GROUPS["htfe_img_8"]
    own = config.algorithm
    assert (own.batch_size, own.epochs, own.learning_rate) == (10, 1, 0.01)
    assert (config.parties.embedding_width, config.seeds) == (512, 3)


def test_one_network_may_be_all_parties():
    config = digits(parties__networks="htfl_resnet4")
    assert party_shapes(config) == ("htfl_resnet4",) * 20


def test_parties_optimizer_is_adam_where_none_is_named():
    named = party_optimizer(digits().algorithm)(0.5)
    gradient = np.ones(2, np.float32)
    np.testing.assert_allclose(named.update(gradient, named.init(gradient))[0], -0.5 * gradient)
    for name in ("adam", "adamax"):
        settings = digits(algorithm__optimizer=name, algorithm__epsilon=1.0).algorithm
        adam = party_optimizer(settings)(0.5)
        np.testing.assert_allclose(
            adam.update(gradient, adam.init(gradient))[0], -0.25 * gradient, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(parties__networks="resnet"), r"parties\.networks must be one of .*'htfe_img_8'"),
        (
            dict(parties__networks=("htfl_cnn", "resnet") * 10),
            r"parties\.networks\[1\] must be \(widths, dropout\), one of .*, got 'resnet'",
        ),
        (
            dict(parties__networks="htfl_small"),
            r"parties\.networks 'htfl_cnn': x must be \[B, 32, 32, C\]",
        ),
        (
            dict(parties__networks="htfl_small", parties__narrower=2),
            r"parties\.narrower must be 1 for parties\.networks 'htfl_cnn', got 2",
        ),
        (dict(algorithm__optimizer="steep"), r"algorithm\.optimizer must be the name of an optax"),
        (
            dict(data__partition__examples=10**6),
            r"data\.partition\.examples must be at most the \d+ that there are, got 1000000",
        ),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        check_experiment(build_experiment(digits(**settings)))
    assert "\n" not in str(error.value)


def test_the_number_of_parties_must_be_told():
    config = digits()
    config.data = dict(name="my_module:mine")
    with pytest.raises(ValueError, match=r"parties\.networks must be a list, one network per"):
        party_shapes(config)
