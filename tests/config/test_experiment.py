"""From a config to an experiment: every name that it may use, and the digits config."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict

from fedcodist.config import algorithm as config_algorithm
from fedcodist.config import client_methods, networks, optimizers, pool_methods
from fedcodist.config import data as reading
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.bind import bind, offered
from fedcodist.config.data_images import image_preprocess
from fedcodist.config.experiment import build_experiment
from fedcodist.config.normalisation import CIFAR_DEVIATION, CIFAR_MEAN
from fedcodist.config.referenced_code import described_references
from fedcodist.configs import (
    digits_codist,
    digits_compression,
    digits_fed_kd,
    digits_methods,
    digits_mhd,
    digits_parties,
    digits_personal,
    digits_submodels,
)
from fedcodist.core.trees import parameter_count
from fedcodist.data import augmentation
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import load_prepared, save_prepared
from fedcodist.distillation.settings import Distillation
from fedcodist.run.experiment import check_experiment
from fedcodist.run.sources import StreamedData

CONFIG = Path(__file__).parents[2] / "fedcodist" / "configs" / "digits_codist.py"
ALGORITHMS = ["fed_avg", "hetero_fl", "periodic_codistillation", "merged_codistillation"]


def get_config(algorithm: str = "merged_codistillation"):
    spec = importlib.util.spec_from_file_location("digits_codist", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(algorithm)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_digits_config_builds_every_algorithm(name):
    config = get_config(name)
    experiment = build_experiment(config)
    assert check_experiment(experiment) == config.evaluation.checkpoint_every
    assert list(experiment.splits) == ["held_out", "train"]
    assert list(experiment.final_splits) == ["test"]
    assert experiment.algorithm.name == name
    assert set(experiment.algorithm.predictors) == {"small", "large"}
    assert set(experiment.data.data_sets) == (
        set() if name in ("fed_avg", "hetero_fl") else {"unlabelled"}
    )


@pytest.mark.parametrize(
    "config",
    [
        digits_codist.get_config(),
        digits_methods.get_config("fed_df"),
        digits_methods.get_config("fed_be"),
        digits_methods.get_config("fed_sdd"),
        digits_parties.get_config("fed_md"),
        digits_parties.get_config("ds_fl"),
        digits_mhd.get_config("decentralised_periodic_codistillation"),
        digits_mhd.get_config("centralised"),
        digits_mhd.get_config(),
    ],
    ids=lambda config: config.algorithm.name,
)
def test_rows_that_a_method_reads_are_counted_before(config):
    """A wrong number of them is then an error of `check_experiment`."""
    experiment = build_experiment(config)
    selection = jax.eval_shape(lambda: experiment.algorithm.select(0, jax.random.key(0)))
    assert experiment.algorithm.data_set_sizes.keys() == selection.examples.keys() != set()
    check_experiment(experiment)


@pytest.mark.parametrize(("method", "default"), [("ditto", 1.0), ("p_fed_me", 15.0)])
def test_the_weight_of_fed_prox_is_no_other_methods(method, default):
    config = digits_methods.get_config("fed_avg")
    assert config.training.proximal_weight == 0.01
    config.training.method = method
    hypers = build_experiment(config).algorithm.hyper
    assert {hyper.proximal_weight for hyper in hypers.values()} == {default}
    with config.unlocked():
        config.training[method] = dict(proximal_weight=3.0)
    hypers = build_experiment(config).algorithm.hyper
    assert {hyper.proximal_weight for hyper in hypers.values()} == {3.0}


def test_a_setting_beside_the_group_of_its_method_is_refused():
    config = digits_methods.get_config("fed_avg")
    config.training.method = "fed_prox"
    with config.unlocked():
        config.training.fed_prox = dict()
    message = (
        r"^training\.proximal_weight is not read beside the group training\.fed_prox: set it there"
    )
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


def test_a_sampled_softmax_is_for_language_models_only():
    config = get_config("fed_avg")
    with config.unlocked():
        config.training.samples = 5
    message = r"^training\.samples must be 0 with data\.name='digits', got 5: only language models"
    with pytest.raises(ValueError, match=message):
        build_experiment(config)
    config.training.samples = 0
    build_experiment(config)


def test_an_optimizer_that_a_rate_does_not_make_is_named_by_its_setting():
    config = get_config()
    config.training.client_optimizer = "dpsgd"
    message = r"^training\.client_optimizer must be a function of the learning rate"
    with pytest.raises(TypeError, match=message):
        build_experiment(config)


def test_a_pool_without_teaching_is_named():
    config = get_config("periodic_codistillation")
    with config.unlocked():
        del config.pools.large["teaching"]
    with pytest.raises(ValueError, match=r"the config lacks 'pools\.large\.teaching'"):
        build_experiment(config)


def test_a_client_split_of_every_evaluation_is_not_one_of_the_end():
    config = digits_personal.get_config("ditto")
    with config.unlocked():
        config.data.update(client_test_share=0.25, unseen_clients=2)
        config.evaluation.client_splits = ("client_test",)
    experiment = build_experiment(config)
    assert set(experiment.client_splits) == {"client_test"}
    assert "client_test" not in experiment.final_client_splits
    check_experiment(experiment)


def test_not_all_clients_can_be_unseen():
    config = digits_personal.get_config("ditto")
    with config.unlocked():
        config.data.update(client_test_share=0.25, unseen_clients=config.data.num_clients)
    with pytest.raises(ValueError, match=r"^data\.unseen_clients: count must leave a client"):
        build_experiment(config)


@pytest.mark.parametrize("method", ["fed_df", "fed_be", "fed_sdd", "fed_ensemble"])
def test_ensembles_average_logits_and_text_has_none(method):
    data = SimpleNamespace(text="sentences")
    with pytest.raises(ValueError, match=r"algorithm\.name must be .* for text") as error:
        build_algorithm(digits_methods.get_config(method), data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["fed_gkd", "fed_dropout", "fed_kd"])
def test_methods_that_need_logits_or_layers_are_not_for_text(method):
    config = digits_methods.get_config("fed_avg")
    config.training.method = method
    clients = SimpleNamespace(
        config=config, model=None, pool=None, data=SimpleNamespace(text="sentences")
    )
    with pytest.raises(ValueError, match=rf"training\.method must be .* {method}, .* for text\."):
        client_methods.client_method(clients)


def test_how_configs_say_that_students_are_taught():
    config = digits_codist.get_config()
    data = reading.load_data(config.data)
    config.algorithm.update(flip=True, mixup_beta=0.5, direction="reverse", steps=3, batch_size=5)
    offers = offered(Distillation, pool_methods.OFFERS, config, data)
    found = bind(Distillation, config.algorithm, "algorithm.", **offers)
    assert (found.mixup_beta, found.direction, found.steps, found.batch_size) == (
        0.5,
        "reverse",
        3,
        5,
    )
    image = np.zeros((64, 8, 8, 1), np.uint8)
    image[:, 1, 2] = 16
    batch, positions = {"image": jnp.asarray(image)}, jnp.arange(64)
    plain = data.preprocess(batch, jax.random.key(0), positions)["image"][0]
    flipped = found.preprocess(batch, jax.random.key(0), positions)["image"]
    seen = {np.asarray(each).tobytes() for each in flipped}
    assert seen == {np.asarray(each).tobytes() for each in (plain, plain[::-1], plain[:, ::-1])}


DIVERGENCE = """
import jax
import jax.numpy as jnp

def brier(logits, target):
    return jnp.sum((jax.nn.softmax(logits) - target) ** 2, axis=-1)
"""


@pytest.mark.parametrize(
    "config",
    [
        digits_codist.get_config("periodic_codistillation"),
        digits_codist.get_config("merged_codistillation"),
        *map(digits_methods.get_config, ("fed_df", "fed_be", "fed_sdd")),
    ],
    ids=lambda config: config.algorithm.name,
)
def test_the_divergence_that_a_config_names(config, tmp_path, monkeypatch):
    config = config.copy_and_resolve_references()
    for name in ("jensen_shannon", "mean_squared_logits"):
        config.algorithm.divergence = name
        build_experiment(config)
    for name, problem in (("l1", "must be one of .* or package.module:function, got 'l1'"),):
        config.algorithm.divergence = name
        with pytest.raises(ValueError, match=rf"^algorithm\.divergence {problem}"):
            build_experiment(config)
    (tmp_path / "own_divergences.py").write_text(DIVERGENCE)
    monkeypatch.syspath_prepend(tmp_path)
    config.algorithm.divergence = "own_divergences:brier"
    build_experiment(config)
    assert "algorithm.divergence" in described_references(config)
    found = pool_methods.OFFERS["divergence"](config, None)
    assert found.__name__ == "brier"
    config.algorithm.update(divergence="jensen_shannon", direction="reverse")
    with pytest.raises(ValueError, match="direction must be 'forward' where"):
        build_experiment(config)


def test_without_an_argument_the_config_is_merged_codistillation():
    assert get_config() == get_config("merged_codistillation")


def test_all_algorithms_have_the_same_clients_data_and_initial_models():
    names = [name for name in ALGORITHMS if name != "hetero_fl"]  # it has one model
    built = [build_experiment(get_config(name)) for name in names]
    key = jax.random.key(0)
    for other in built[1:]:
        for ours, theirs in zip(
            jax.tree.leaves(other.data.columns), jax.tree.leaves(built[0].data.columns), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
        states = [each.algorithm.init(key) for each in (built[0], other)]
        for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        first, second = (cohorts(each.algorithm, rounds=3) for each in (built[0], other))
        for pool in first:
            np.testing.assert_array_equal(first[pool], second[pool])


def test_a_third_of_the_clients_train_the_large_model_and_all_the_small_one():
    algorithm = build_experiment(get_config()).algorithm
    chosen = cohorts(algorithm, rounds=60)
    assert {pool: len(np.unique(clients)) for pool, clients in chosen.items()} == {
        "small": 60,
        "large": 20,
    }
    assert set(chosen["large"].flat) < set(chosen["small"].flat)


def cohorts(algorithm, rounds: int) -> dict[str, np.ndarray]:
    """Pool -> clients of each round [rounds, cohort]."""
    select = jax.vmap(lambda round: algorithm.select(round, jax.random.key(0)).clients)
    return {pool: np.asarray(clients) for pool, clients in select(jnp.arange(rounds)).items()}


def test_no_image_is_in_two_splits():
    config = get_config()
    experiment = build_experiment(config)
    unlabelled = experiment.data.data_sets["unlabelled"]["image"]
    splits = {**experiment.splits, **experiment.final_splits}
    images = [split.columns["image"] for split in splits.values()] + [unlabelled]
    assert sum(map(len, images)) == 1797


def test_disjoint_pools():
    config = get_config()
    config.nested_pools = False
    config.pools.small.fraction = 0.5
    algorithm = build_experiment(config).algorithm
    chosen = cohorts(algorithm, rounds=30)
    assert not set(chosen["small"].flat) & set(chosen["large"].flat)


def test_streamed_data():
    config = get_config()
    config.execution.stream = True
    assert isinstance(build_experiment(config).data, StreamedData)


def test_an_alpha_for_each_pool():
    config = get_config()
    config.pools.small.alpha, config.algorithm.alpha = 0.25, 0.7
    assert build_experiment(config).algorithm.hyper.alpha == {"small": 0.25, "large": 0.7}


@pytest.mark.parametrize(
    ("name", "first", "middle"),
    [("constant", 0.4, 0.4), ("linear_to_one", 0.4, 0.7), ("linear_to_zero", 0.4, 0.2)],
)
def test_alpha_schedules(name, first, middle):
    schedule = pool_methods._alpha_schedule(name, rounds=10)
    assert float(schedule(0.4, jnp.int32(0))) == pytest.approx(first)
    assert float(schedule(0.4, jnp.int32(5))) == pytest.approx(middle)


def test_epsilon_goes_to_the_optimizers_that_have_one():
    gradient, params = {"w": jnp.array(1e-6)}, {"w": jnp.array(0.0)}

    def step(optimizer):
        return float(optimizer.update(gradient, optimizer.init(params), params)[0]["w"])

    adam = optimizers.optimizer_of("training.server_optimizer", "adam", 1.0)
    assert step(adam(1.0)) == pytest.approx(-1e-6, rel=1e-4)
    assert step(optimizers.optimizer_of("x", "adam")(1.0)) == pytest.approx(-0.99, abs=0.01)
    sgd = optimizers.optimizer_of("training.server_optimizer", "sgd", 1.0)
    assert step(sgd(1.0)) == pytest.approx(-1e-6)


def test_a_period_longer_than_the_run_is_a_warning():
    config = get_config("periodic_codistillation")
    config.rounds, config.algorithm.period = 5, 40
    with pytest.warns(UserWarning, match="period=40 is longer than the run of 5 rounds") as caught:
        build_experiment(config)
    assert len(caught) == 1


# Prepared data.


@pytest.fixture
def prepared(tmp_path):
    """Saves splits of made-up 32x32 images; returns a config that reads them."""

    def prepare(
        splits=("train", "distillation", "held_out", "test"),
        classes=100,
        arguments=None,
        shape=(32, 32, 3),
    ):
        draw = np.random.default_rng(0)
        data = {}
        for name in splits:
            rows = 12 if name == "train" else 4
            columns = {
                "image": draw.integers(0, 256, (rows, *shape)).astype(np.uint8),
                # Not quite sorted: the last example has the first label.
                "label": np.roll(np.arange(rows, dtype=np.int32) * (classes - 1) // (rows - 1), -1),
            }
            clients = 6 if name == "train" else 1
            data[name] = FederatedData.from_arrays(
                columns, offsets=np.linspace(0, rows, clients + 1).astype(np.int64)
            )
        folder = tmp_path / (
            "data" if not (tmp_path / "data").exists() else f"data_of_{len(splits)}"
        )
        about = {"data_set": "CIFAR-100"} if arguments is None else arguments
        save_prepared(folder, data, source="made up", licence="none", arguments=about)
        config = get_config()
        with config.unlocked():
            config.data = dict(
                name="prepared",
                folder=str(folder),
                unlabelled_folder=None,
                num_unlabelled=config_dict.placeholder(int),
                crop=24,
                padding=0,
                augmentation="per_image",
                seed=0,
            )
        for pool in ("small", "large"):
            config.pools[pool].model = f"cnn_{pool}"
            config.pools[pool].cohort_size = 2
        return config

    return prepare


def test_prepared_images_are_cropped_and_normalised(prepared):
    experiment = build_experiment(prepared())
    images = experiment.final_splits["test"].columns["image"]
    assert images.dtype == np.uint8
    batch = {"image": jnp.asarray(images[:2])}
    read = experiment.evaluation_preprocess(batch, jax.random.key(0), jnp.arange(2))["image"]
    expected = (images[:2, 4:28, 4:28] / 255 - CIFAR_MEAN) / CIFAR_DEVIATION
    np.testing.assert_allclose(read, expected, atol=1e-5)


def test_a_preprocessing_of_ones_own_replaces_the_librarys(prepared, monkeypatch):
    own = SimpleNamespace(halved=lambda batch, key, positions: {"image": batch["image"] / 2})
    monkeypatch.setitem(sys.modules, "own_preprocessing", own)
    config = prepared(arguments={})  # without a known mean, which is not needed
    config.data.update(crop=None, augmentation="none")
    with config.unlocked():
        config.data.preprocess = "own_preprocessing:halved"
    assert reading.load_data(config.data).preprocess is own.halved
    config.data.update(crop=24, augmentation="per_image")
    message = r"^data\.crop, data\.augmentation not read: data\.preprocess replaces"
    with pytest.warns(UserWarning, match=message):
        reading.load_data(config.data)


def test_the_32x32_networks_read_padded_crops(prepared):
    config = prepared()
    config.data.update(crop=32, padding=4)
    for pool in ("small", "large"):
        config.pools[pool].model = f"cnn_{pool}_32"
    experiment = build_experiment(config)
    images = experiment.final_splits["test"].columns["image"]
    batch = {"image": jnp.asarray(np.repeat(images[:1], 200, axis=0))}
    train, evaluation = image_preprocess(config.data, (32, 32, 3))
    whole = evaluation(batch, jax.random.key(0), jnp.arange(200))["image"]
    np.testing.assert_allclose(
        whole[0], (images[0] / 255 - CIFAR_MEAN) / CIFAR_DEVIATION, atol=1e-5
    )
    crops = train(batch, jax.random.key(0), jnp.arange(200))["image"]
    assert crops.shape == (200, 32, 32, 3)
    black = -np.array(CIFAR_MEAN) / CIFAR_DEVIATION
    borders = np.isclose(crops[:, 0], black, atol=1e-5).all(axis=(1, 2)).mean()
    assert 0.3 < borders < 0.6  # 4 of the 9 vertical offsets show the border above


@pytest.mark.parametrize(("augmentation", "alike"), [("per_image", False), ("per_batch", True)])
def test_a_batch_is_augmented_image_by_image_or_at_once(prepared, augmentation, alike):
    config = prepared()
    config.data.augmentation = augmentation
    image = np.random.default_rng(1).integers(0, 256, (1, 32, 32, 3)).astype(np.uint8)
    batch = {"image": jnp.asarray(np.repeat(image, 16, axis=0))}
    train, _ = image_preprocess(config.data, (32, 32, 3))
    results = [
        np.asarray(train(batch, jax.random.key(seed), jnp.arange(16))["image"]) for seed in (0, 1)
    ]
    assert all((result == result[0]).all() == alike for result in results)
    assert not (results[0] == results[1]).all()


def read_images(config):
    data = reading.load_data(config.data)
    images = data.splits["test"].columns["image"]
    read = lambda batch: data.evaluation_preprocess(batch, jax.random.key(0), jnp.arange(2))[
        "image"
    ]
    return images[:2, 4:28, 4:28] / 255, np.asarray(read({"image": jnp.asarray(images[:2])}))


@pytest.mark.parametrize(
    ("shape", "mean", "deviation"),
    [((32, 32, 1), [0.13], [0.31]), ((32, 32, 3), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])],
)
def test_mean_and_deviation_are_settings_or_in_the_manifest(
    prepared, tmp_path, shape, mean, deviation
):
    config = prepared(shape=shape, arguments={"mean": mean, "deviation": deviation})
    images, read = read_images(config)
    assert read.shape == (2, 24, 24, shape[-1])
    np.testing.assert_allclose(read, (images - mean) / deviation, atol=1e-5)
    with config.unlocked():  # a config has the last word
        config.data.mean, config.data.deviation = tuple(np.array(mean) / 2), tuple(deviation)
    images, read = read_images(config)
    np.testing.assert_allclose(read, (images - np.array(mean) / 2) / deviation, atol=1e-5)


def test_one_number_is_enough_for_grey_images(prepared):
    config = prepared(shape=(32, 32, 1), arguments={"data_set": "MNIST"})
    images, read = read_images(config)
    np.testing.assert_allclose(read, (images - 0.1307) / 0.3081, atol=1e-5)
    with config.unlocked():
        config.data.mean, config.data.deviation = 0.25, 0.5
    np.testing.assert_allclose(read_images(config)[1], (images - 0.25) / 0.5, atol=1e-5)


CIFAR = {"data_set": "CIFAR-10"}


@pytest.mark.parametrize(
    ("shape", "arguments", "settings", "message"),
    [
        ((32, 32, 1), {}, {}, "data.mean and data.deviation must be set, .* 1 channels"),
        ((32, 32, 3), {"data_set": "ImageNet 32x32"}, {}, r"must be set, .*ImageNet 32x32"),
        ((32, 32, 1), CIFAR, {}, r"CIFAR-10's mean must have a number for each of the 1 channels"),
        ((32, 32, 3), CIFAR, {"mean": (0.1,)}, "data.mean and deviation must both be there"),
        (
            (32, 32, 3),
            CIFAR,
            {"mean": 0.1, "deviation": 1.0},
            "data.mean must have a number for each",
        ),
        (
            (32, 32, 1),
            CIFAR,
            {"mean": 0.1, "deviation": 0.0},
            "data.deviation must be above 0, got 0",
        ),
        ((32, 32, 1), CIFAR, {"mean": "a", "deviation": 1.0}, "data.mean must be a number"),
        (
            (32, 32, 1),
            {"mean": [0, 0, 0], "deviation": [1, 1, 1]},
            {},
            "the manifest's mean must have",
        ),
        (
            (32, 32),
            CIFAR,
            {},
            r"must have images, .* in split 'distillation', got uint8 \[32, 32\]",
        ),
    ],
)
def test_normalisation_that_does_not_fit_is_one_line(prepared, shape, arguments, settings, message):
    config = prepared(shape=shape, arguments=arguments)
    with config.unlocked():
        config.data.update(settings)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        reading.load_data(config.data)
    assert "\n" not in str(error.value)


def test_unlabelled_images_have_the_same_channels(prepared, tmp_path):
    config = prepared()
    for shape, message in (
        ((32, 32, 1), "must have images of 3 channels, as data.folder has, got"),
        ((20, 32, 3), "data.crop must be at most the 20 of the images of data.unlabelled_folder"),
    ):
        images = np.zeros((5, *shape), np.uint8)
        other = {"train": FederatedData.from_arrays({"image": images}, offsets=[0, 5])}
        folder = tmp_path / str(shape)
        save_prepared(folder, other, source="made up", licence="none", arguments={})
        config.data.unlabelled_folder = str(folder)
        with pytest.raises(ValueError, match=message):
            reading.load_data(config.data)


def test_another_folder_supplies_unlabelled_images(prepared, tmp_path):
    config = prepared()
    images = np.random.default_rng(2).integers(0, 256, (30, 32, 32, 3)).astype(np.uint8)
    other = {"train": FederatedData.from_arrays({"image": images}, offsets=[0, 30])}
    save_prepared(tmp_path / "other", other, source="made up", licence="none", arguments={})
    config.data.unlabelled_folder = str(tmp_path / "other")
    sets = {}
    for count in (None, 7, 20):
        config.data.num_unlabelled = count
        rows = build_experiment(config).data.data_sets["unlabelled"]["image"]
        assert len(rows) == (count or 30)
        sets[count] = {row.tobytes() for row in np.asarray(rows)}
    assert sets[7] < sets[20] < sets[None] == {row.tobytes() for row in images}


def test_a_number_of_unlabelled_images_needs_some(prepared):
    config = prepared()
    config.data.partition = dict(name="iid", num_clients=2, all_splits=True)
    assert len(reading.load_data(config.data).unlabelled) == 0
    config.data.num_unlabelled = 4
    with pytest.raises(
        ValueError, match=r"^data\.num_unlabelled must be None without [^\n]*, got 4"
    ):
        reading.load_data(config.data)


def test_the_test_split_is_kept_for_the_end(prepared):
    config = prepared()
    config.evaluation.update(splits=("held_out",), final_splits=("test",))
    experiment = build_experiment(config)
    assert (list(experiment.splits), list(experiment.final_splits)) == (["held_out"], ["test"])


def test_the_papers_networks_are_built_for_them(prepared):
    algorithm = build_experiment(prepared()).algorithm
    assert {name: about.down for name, about in algorithm.communication.items()} == {
        "small": 4 * 109_348,
        "large": 4 * 410_084,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.data.update(crop=33), "data.crop must be at most the images' 32"),
        (lambda config: config.data.update(crop=0), "data.crop must be at least 1, got 0"),
        (lambda config: config.data.update(padding=-1), "data.padding must be at least 0, got -1"),
        (
            lambda config: config.data.update(padding=4, augmentation="none"),
            "data.padding must be 0 with data.augmentation='none', .* got 4",
        ),
        (lambda config: config.data.update(augmentation="no"), "data.augmentation must be one of"),
        (
            lambda config: config.data.update(num_unlabelled=5),
            "data.num_unlabelled must be at most the 4 unlabelled images, got 5",
        ),
        (lambda config: config.data.update(num_unlabelled=0), "num_unlabelled must be at least 1"),
        (
            lambda config: config.evaluation.update(splits=("valid",)),
            "evaluation.splits must be one of .*, got 'valid'",
        ),
        (
            lambda config: config.evaluation.update(final_splits=("distillation",)),
            "evaluation.final_splits must be one of .*, got 'distillation'",
        ),
        (
            lambda config: config.data.update(crop=16),
            r"takes images of \[24, 24, 3\], the data has",
        ),
    ],
)
def test_images_that_do_not_fit(change, message, prepared):
    config = prepared()
    change(config)
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


def test_labels_that_do_not_fit(prepared):
    with pytest.raises(ValueError, match="has 100 classes, the data has 101"):
        build_experiment(prepared(classes=101))


def test_a_label_that_the_clients_lack_needs_an_output_too(prepared, tmp_path):
    config = prepared()
    splits = load_prepared(tmp_path / "data")
    columns = dict(splits["held_out"].columns)
    columns["label"] = columns["label"] + 1
    splits["held_out"] = FederatedData.from_arrays(columns, offsets=[0, len(columns["label"])])
    save_prepared(
        tmp_path / "more",
        splits,
        source="made up",
        licence="none",
        arguments={"data_set": "CIFAR-100"},
    )
    config.data.folder = str(tmp_path / "more")
    with pytest.raises(ValueError, match="has 100 classes, the data has 101"):
        build_experiment(config)


def test_a_prepared_folder_needs_only_the_splits_that_are_read(prepared):
    with pytest.raises(ValueError, match=r"evaluation\.splits must be one of .*, got 'held_out'"):
        build_experiment(prepared(splits=("train", "test", "distillation")))
    config = prepared(splits=("train",))
    with pytest.raises(
        ValueError, match=r"data\.unlabelled_folder must be set for algorithm\.name="
    ):
        build_experiment(config)
    with config.unlocked():
        for name in (
            "crop",
            "padding",
            "augmentation",
            "num_unlabelled",
            "unlabelled_folder",
            "seed",
        ):
            del config.data[name]
    config.algorithm.name = "fed_avg"
    config.evaluation.update(splits=(), final_splits=())
    assert list(reading.load_data(config.data).splits) == ["train"]
    data = reading.load_data(config.data)
    (batch,) = ({"image": data.splits["train"].columns["image"][:2]},)
    read = [
        preprocess(batch, jax.random.key(0), jnp.arange(2))["image"]
        for preprocess in (data.preprocess, data.evaluation_preprocess)
    ]
    assert read[0].shape == (2, 32, 32, 3)
    np.testing.assert_array_equal(*read)
    config.data.folder += "_none"
    with config.unlocked():
        config.data.padding = 4
    with pytest.raises(ValueError, match=r"data\.folder must be a prepared folder"):
        build_experiment(config)
    config.data.folder = config.data.folder.removesuffix("_none")
    with pytest.raises(ValueError, match=r"data\.crop must be set for data\.padding=4"):
        build_experiment(config)


def test_clients_may_be_dealt_anew(prepared):
    config = prepared()
    before = build_experiment(config).data
    with config.unlocked():
        config.data.partition = dict(name="equal_dirichlet", num_clients=4, concentration=10.0)
        for pool in config.pools.values():
            pool.update(fraction=1.0, cohort_size=2)
    after = build_experiment(config).data
    assert after.num_clients == 4
    assert max(after.sizes) - min(after.sizes) <= 1
    assert sum(after.sizes) == sum(before.sizes)
    config.data.partition.name = "even"
    with pytest.raises(ValueError, match=r"data\.partition\.name must be one of .*, got 'even'"):
        build_experiment(config)


def test_validation_images_are_set_apart_before_the_others_are_dealt(prepared):
    config = prepared(classes=10)
    whole = build_experiment(config).data
    with config.unlocked():
        config.data.partition = dict(
            name="dirichlet", num_clients=3, concentration=10.0, validation=0.25
        )
    data = reading.load_data(config.data)
    assert data.splits["validation"].num_examples == 3
    assert data.splits["train"].num_examples == 9
    both = [data.splits[split].columns["image"] for split in ("train", "validation")]
    found = sorted(image.tobytes() for images in both for image in images)
    assert found == sorted(image.tobytes() for image in whole.columns["image"])
    config.data.partition.validation = 1.0
    with pytest.raises(ValueError, match=r"data\.partition\.validation must leave clients some"):
        build_experiment(config)
    config.data.partition.validation = -0.1
    with pytest.raises(ValueError, match=r"data\.partition\.validation must be at least 0"):
        build_experiment(config)


def first_steps(gradients, **more):
    """Updates by the distillation's optimizer at rate 0.5."""
    config = digits_methods.get_config("fed_df")
    with config.unlocked(), config.ignore_type():
        config.algorithm.update(steps=2, **more)
    build_experiment(config)
    optimizer = optimizers.distillation_optimizer(config.algorithm)(jnp.float32(0.5))
    state, updates = optimizer.init(gradients[0]), []
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, gradient)
        updates.append(float(update))
    return updates


def test_flips_of_the_server_are_drawn_apart_from_those_of_clients_images():
    """One coin for both would turn images left or right only if it also turns them up or down."""
    image = np.arange(4.0).reshape(1, 2, 2, 1)
    of_clients = augmentation.image_preprocess(augmentation.random_horizontal_flip)
    config = SimpleNamespace(algorithm=SimpleNamespace(flip=True, mixup_beta=0))
    data = SimpleNamespace(text=None, preprocess=of_clients)
    flip = pool_methods._distillation_preprocess(config, data)
    images = {"image": jnp.repeat(jnp.asarray(image), 2000, 0)}
    found = np.asarray(flip(images, jax.random.key(0), jnp.arange(2000))["image"])
    whole = [image, image[:, :, ::-1], image[:, ::-1], image[:, ::-1, ::-1]]
    shares = [np.mean(np.all(found == each, axis=(1, 2, 3))) for each in whole]
    assert shares == pytest.approx([3 / 8, 3 / 8, 1 / 8, 1 / 8], abs=0.05)


def test_momentum_of_clients():
    config = digits_codist.get_config("fed_avg")
    with config.unlocked():
        config.training.momentum = 0.5
    build_experiment(config)
    data = SimpleNamespace(preprocess=None)
    optimizer = client_methods.local_training(config, data).optimizer(0.5)
    state, updates = optimizer.init(jnp.float32(0)), []
    for gradient in (8.0, -1.0, 1.0):
        update, state = optimizer.update(jnp.float32(gradient), state)
        updates.append(float(update))
    assert updates == [-4.0, -1.5, -1.25]
    config.training.client_optimizer = "adam"
    with pytest.raises(ValueError, match=r"training\.momentum must be None for .*'adam'"):
        build_experiment(config)


@pytest.mark.parametrize("name", ["steps", "learning_rate"])
def test_settings_of_graphs_are_no_settings_of_pools(name):
    config = digits_codist.get_config("fed_avg")
    with config.unlocked():
        config.training[name] = 3
    with pytest.raises(ValueError, match=rf"training\.{name} is not a setting .* with pools: use"):
        build_experiment(config)


def test_decay_and_clipping_of_the_distillation():
    gradients = [jnp.float32(8.0), jnp.float32(-1.0), jnp.float32(1.0)]
    assert first_steps(gradients) == [-4.0, 0.5, -0.5]
    # The cosine is 1 at first, a half after one of two steps, and 0 after the last.
    assert first_steps(gradients, distillation_decay="cosine") == pytest.approx([-4.0, 0.25, 0.0])
    assert first_steps(gradients, distillation_clip=2.0) == [-1.0, 0.5, -0.5]
    assert first_steps(gradients, distillation_momentum=0.5) == [-4.0, -1.5, -1.25]
    with pytest.raises(ValueError, match=r"distillation_momentum must be None for .*'adam'"):
        first_steps(gradients, distillation_momentum=0.5, distillation_optimizer="adam")
    with pytest.raises(ValueError, match=r"algorithm\.distillation_decay must be one of"):
        first_steps(gradients, distillation_decay="linear")
    with pytest.raises(ValueError, match=r"algorithm\.distillation_clip must be above 0"):
        first_steps(gradients, distillation_clip=0.0)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param("fedsdd_table5", "1,1,0.1", marks=pytest.mark.slow),
        ("fedsdd_table10", "feddf,0.1"),
        pytest.param("fedsdd_scaled", "basic", marks=pytest.mark.slow),
    ],
)
def test_fedsdd_s_configs_are_built(name, run, prepared):
    config = importlib.import_module(f"experiments.configs.{name}").get_config(run)
    config.data.folder = config.data.unlabelled_folder = prepared(classes=10).data.folder
    config.data.partition.update(num_clients=8, concentration=100.0)
    experiment = build_experiment(config)
    check_experiment(experiment)
    assert experiment.algorithm.name == ("fed_df" if run.startswith("feddf") else "fed_sdd")
    assert set(experiment.splits) == {"test"}
    assert ("validation" in experiment.data.data_sets) == run.startswith("feddf")


@pytest.mark.parametrize("run", digits_methods.get_runs())
def test_every_method_of_the_comparison_is_built(run):
    config = digits_methods.get_config(run)
    algorithm = build_experiment(config).algorithm
    assert algorithm.name == (run.split(",")[0])
    assert "main" in algorithm.predictors
    assert ("ensemble" in algorithm.predictors) == run.startswith(("fed_sdd", "fed_ensemble"))


@pytest.mark.parametrize("run", digits_compression.get_runs())
def test_every_compression_is_built(run):
    config = digits_compression.get_config(run)
    experiment = build_experiment(config)
    assert "main" in experiment.algorithm.predictors
    rows = experiment.algorithm.client_states["main"].first
    assert hasattr(rows, "memory") == ("," in run or run == "fetch_sgd")


def test_baselines_send_what_they_do_in_the_fedkd_paper():
    """FetchSGD 24.9 %, Federated Dropout 60.0 % of FedAvg's bytes (FedKD, tables 2 and 3)."""
    network, shape = networks.MODELS["digits_small"]
    size = lambda module: parameter_count(
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *shape)))
    )
    whole = size(network())
    sketch = digits_compression.get_config("fetch_sgd").training.fetch_sgd
    both_ways = sketch.sketch_rows * sketch.sketch_columns + 2 * sketch.k
    assert both_ways / (2 * whole) == pytest.approx(0.249, abs=0.001)
    share = digits_compression.get_config("fed_dropout").training.fed_dropout.share
    assert size(networks.narrowed(network(), share)) / whole == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("run", "setting", "value", "message"),
    [
        ("fed_avg,svd", "compression.start", 0.0, "start must be at most 1 and above 0, got 0.0"),
        ("fed_avg,svd", "compression.end", 0.5, "end must be at least start=0.95, got 0.5"),
        (
            "fed_avg,svd",
            "compression.uplink",
            "zip",
            r"training\.compression\.uplink must be one of",
        ),
        ("fed_avg,top_k", "compression.share", 2.0, "share must be at most 1 and above 0, got 2.0"),
        (
            "fetch_sgd",
            "fetch_sgd.sketch_rows",
            0,
            r"training\.fetch_sgd\.sketch_rows must be at least 1, got 0",
        ),
        (
            "fed_dropout",
            "fed_dropout.share",
            1.5,
            r"training\.fed_dropout\.share must be at most 1",
        ),
    ],
)
def test_mistakes_in_compression_are_one_line(run, setting, value, message):
    config = digits_compression.get_config(run)
    config.training.update_from_flattened_dict({setting: value})
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pools.small.update(share=0.0), r"pools\.small\.share must be .* above 0"),
        (lambda c: c.pools.small.update(model="digits_small"), "pools must have one model for"),
        (lambda c: c.pools.small.update(client_learning_rate=1.0), "one client_learning_rate for"),
        (lambda c: c.training.update(method="scaffold"), "training must have neither a method"),
    ],
)
def test_mistakes_in_levels_are_one_line(change, message):
    config = digits_codist.get_config("hetero_fl")
    change(config)
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_fed_sdd_does_not_read_how_pools_teach_each_other():
    """A config of codistillation, in which another method's name is written."""
    config = digits_codist.get_config("fed_sdd_pools")
    expected = build_experiment(config).algorithm.hyper
    for name, pool in config.pools.items():
        pool.teaching = digits_codist.get_config("merged_codistillation").pools[name].teaching
    assert build_experiment(config).algorithm.hyper == expected


def test_disjoint_pools_that_need_too_many_clients_are_one_line():
    config = digits_codist.get_config("fed_avg")
    config.nested_pools = False
    message = "^pools must leave room for disjoint pools, which need 80 of 60 clients"
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


@pytest.mark.parametrize(
    ("run", "setting", "value", "message"),
    [
        ("fed_avg", "share", 0.5, "small.share must be left out: fed_avg trains whole networks"),
        (
            "merged_codistillation",
            "depth",
            1,
            "small.depth must be left out: merged_codistillation",
        ),
        ("hetero_fl", "depth", 1, "small.depth must be left out: hetero_fl"),
        ("fed_sdd_pools", "share", 0.5, "small.share must be left out: fed_sdd_pools trains whole"),
        (
            "fed_avg",
            "domain",
            "a",
            "small.domain must be left out: the data digits have no domains",
        ),
    ],
)
def test_settings_of_pools_that_nothing_reads_are_refused(run, setting, value, message):
    config = digits_codist.get_config(run)
    config.pools.small[setting] = value
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch_size", r"^pools\.small\.batch_size is no setting; did you mean pools\.small\."),
        ("cohort_sise", r"cohort_sise is no setting; did you mean pools\.small\.cohort_size"),
    ],
)
def test_unknown_settings_of_pools_are_refused(name, message):
    config = digits_codist.get_config("fed_avg")
    config.pools.small[name] = 5
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


@pytest.mark.parametrize("run", ["fed_be", "fed_avg", "fed_sdd"])
def test_validation_of_a_method_that_does_not_stop_by_it_is_refused(run):
    config = digits_methods.get_config(run)
    with config.unlocked():
        config.algorithm.validation = dict(
            split="held_out", every=10, patience=20, or_start=False, drop_worst=False
        )
    with pytest.raises(ValueError, match=rf"^algorithm\.validation must be of .*name={run}"):
        build_experiment(config)


def test_ensembles_of_clients_of_several_pools_are_refused():
    config = digits_codist.get_config("fed_avg")
    with config.unlocked():
        config.algorithm.measured = ("clients",)
    with pytest.raises(ValueError, match=r"^algorithm\.measured must be of a method with one pool"):
        build_experiment(config)
    config = digits_methods.get_config("fed_ensemble")
    with config.unlocked():
        config.algorithm.measured = ("clients",)
    with pytest.raises(ValueError, match=r"^algorithm\.measured must be empty for fed_ensemble"):
        build_experiment(config)


@pytest.mark.parametrize("name", ["pools", "training", "data", "evaluation", "execution.stream"])
def test_a_config_without_a_group_is_one_line(name):
    config = digits_methods.get_config("fed_avg")
    group, _, setting = name.rpartition(".")
    del (config[group] if group else config)[setting]
    with pytest.raises(ValueError, match=rf"^the config lacks '{name}"):
        build_experiment(config)


@pytest.mark.parametrize("method", ["moon", "fed_kd"])
def test_a_width_of_embeddings_is_refused_where_networks_output_layers(method):
    module = digits_fed_kd if method == "fed_kd" else digits_methods
    config = module.get_config("fed_kd" if method == "fed_kd" else "fed_avg")
    with config.unlocked():
        config.training.method = method
        config.algorithm.embedding_width = 16
    message = rf"^algorithm\.embedding_width must be None with training\.{method}\."
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


def test_a_share_is_refused_where_a_network_has_a_depth():
    config = digits_submodels.get_config("depth_fl")
    build_experiment(config)
    config.pools.small.share = 0.5
    with pytest.raises(
        ValueError, match=r"pools\.small\.share must be left out: pools of depth_fl have a depth"
    ):
        build_experiment(config)


def test_levels_may_have_a_group_that_is_none():
    config = digits_codist.get_config("hetero_fl")
    with config.ignore_type():
        config.training.compression = None
    build_experiment(config)


def test_half_of_the_large_network_of_the_codistillation_paper_is_its_small_one():
    (create, shape), (small, _) = (networks.MODELS[f"cnn_{size}"] for size in ("large", "small"))
    shapes = lambda network: jax.tree.map(
        jnp.shape,
        jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *shape))),
    )
    assert shapes(networks.narrowed(create(), 0.5)) == shapes(small())


def test_residual_networks_are_no_chains():
    with pytest.raises(
        ValueError, match=r"fed_dropout\.share needs a chain of layers .* got a ResNet"
    ):
        networks.narrowed(networks.MODELS["resnet20_10"][0](), 0.5)


def test_validation_data_are_a_split(prepared):
    config = digits_methods.get_config("fed_df")
    with config.unlocked(), config.ignore_type():
        config.algorithm.validation = dict(split="held_out", every=10, patience=20, drop_worst=True)
    experiment = build_experiment(config)
    assert set(experiment.data.data_sets) == {"unlabelled", "validation"}
    assert set(experiment.data.data_sets["validation"]) == {"image", "label"}
    config.algorithm.validation.split = "nothing"
    with pytest.raises(ValueError, match=r"algorithm\.validation\.split must be one of"):
        build_experiment(config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("training.method", "fed_foo", r"training\.method must be one of"),
        ("training.scaffold_option", 3, "training.scaffold_option must be 1 or 2, got 3"),
        ("training.proximal_weight", -1.0, r"training\.proximal_weight must be"),
        ("algorithm.num_models", 9, "num_models must be at most the cohort's 8 clients"),
    ],
)
def test_mistakes_in_methods_are_one_line(setting, value, message):
    run = {"training.scaffold_option": "scaffold", "training.proximal_weight": "fed_prox"}
    config = digits_methods.get_config(run.get(setting, "fed_sdd"))
    config.update_from_flattened_dict({setting: value})
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_the_width_of_fed_mrls_small_embedding_is_blamed_on_its_setting():
    config = digits_parties.get_config("fed_mrl")
    config.algorithm.small_width = config.parties.embedding_width + 1
    with pytest.raises(
        ValueError,
        match=r"^algorithm\.small_width must be at most parties\.embedding_width=32, got 33",
    ):
        build_experiment(config)


@pytest.mark.parametrize(
    ("module", "method", "group"),
    [(digits_parties, "fed_proto", "parties"), (digits_methods, "fed_et", "algorithm")],
)
def test_a_width_of_embeddings_that_is_missing_is_named(module, method, group):
    config = module.get_config(method)
    with config.ignore_type():
        config[group].embedding_width = None
    message = rf"^{group}\.embedding_width must be set for algorithm\.name={method}, .* linear head"
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_a_method_of_clients_is_no_algorithm(monkeypatch):
    """A function of one's own may be either, and each has a setting."""
    config = digits_codist.get_config("fed_avg")
    builder = lambda config, data: config
    monkeypatch.setitem(config_algorithm._BUILDERS, "clients", builder)
    with pytest.raises(
        TypeError,
        match=r"^algorithm\.name 'fed_avg' must return an fc\.FederatedAlgorithm, got ConfigDict",
    ):
        build_algorithm(config, reading.load_data(config.data))
