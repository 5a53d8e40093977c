"""From a config to an Experiment: the names that configs may use, and what they stand for."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from fedcodist import augmentation
from fedcodist.algorithms.codistillation import TeachingHyper
from fedcodist.algorithms.fed_avg import FedAvgHyper, constant, fed_avg, linear_decay
from fedcodist.algorithms.merged_codistillation import merged_codistillation
from fedcodist.algorithms.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools import Pool, independent_pools
from fedcodist.checks import check_integer, check_number
from fedcodist.client_training import LocalTraining, OptimizerFactory, Preprocess
from fedcodist.data.digits import load_digits_federated
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import capacity_pools
from fedcodist.data.prepared import load_prepared
from fedcodist.distillation import Distillation
from fedcodist.experiment import Experiment
from fedcodist.federated_algorithm import FederatedAlgorithm
from fedcodist.for_each_client import Execution
from fedcodist.model import Model, from_flax_linen
from fedcodist.models import cnn, digits
from fedcodist.sources import StreamedData, resident_data

CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "digits_small": (digits.small_digits, (8, 8, 1)),
    "digits_large": (digits.large_digits, (8, 8, 1)),
    "cnn_small": (cnn.small_cnn, (24, 24, 3)),
    "cnn_large": (cnn.large_cnn, (24, 24, 3)),
    "cnn_small_32": (functools.partial(cnn.small_cnn, input_size=32), (32, 32, 3)),
    "cnn_large_32": (functools.partial(cnn.large_cnn, input_size=32), (32, 32, 3)),
}


def build_experiment(config: ConfigDict) -> Experiment:
    """Assembles the experiment that a config describes.

    Raises:
      ValueError, TypeError: one line that names the setting and what is allowed.
    """
    check_integer("rounds", config.rounds, low=1)
    splits, unlabelled, preprocess, evaluation_preprocess = _data(config.data)
    clients = splits["train"]
    algorithm = _algorithm(config, clients, len(unlabelled), preprocess)
    source = StreamedData if config.execution.stream else resident_data
    return Experiment(
        algorithm=algorithm,
        data=source(
            clients,
            {"unlabelled": {"image": unlabelled}} if config.algorithm.name != "fed_avg" else {},
        ),
        splits=_splits("evaluation.splits", config.evaluation.splits, splits),
        final_splits=_splits("evaluation.final_splits", config.evaluation.final_splits, splits),
        rounds=config.rounds,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.evaluation.checkpoint_every,
        seed=config.seed,
        seeds=config.seeds,
        seeds_loop=config.execution.seeds_loop,
        evaluation_batch_size=config.evaluation.batch_size,
        evaluation_preprocess=evaluation_preprocess,
    )


def _algorithm(
    config: ConfigDict, clients: FederatedData, num_unlabelled: int, preprocess: Preprocess
) -> FederatedAlgorithm:
    settings = config.algorithm
    _choice("execution.loop", config.execution.loop, dict.fromkeys(("scan", "vmap")))
    check_integer("execution.chunk_size", config.execution.chunk_size, low=1)
    execution = Execution(config.execution.loop, config.execution.chunk_size)
    pools = _pools(config, clients, preprocess)
    if settings.name == "fed_avg":
        return independent_pools(pools, clients.columns, execution)
    flip = augmentation.image_preprocess(augmentation.random_axis_flip)
    common = dict(
        pools=pools,
        columns=clients.columns,
        num_unlabelled=num_unlabelled,
        num_rounds=config.rounds,
        teaching={name: TeachingHyper(**pool.teaching) for name, pool in config.pools.items()},
        distillation=Distillation(
            steps=settings.steps,
            batch_size=settings.batch_size,
            optimizer=_optimizer(
                "algorithm.distillation_optimizer",
                settings.distillation_optimizer,
                settings.distillation_epsilon,
            ),
            direction=settings.direction,
            mixup_beta=settings.mixup_beta,
            preprocess=_chain(preprocess, flip) if settings.flip else preprocess,
        ),
        execution=execution,
    )
    if settings.name == "periodic_codistillation":
        return periodic_codistillation(period=settings.period, **common)
    if settings.name == "merged_codistillation":
        check_number("algorithm.alpha", settings.alpha, 0, 1)
        own = {name: pool.alpha for name, pool in config.pools.items()}
        return merged_codistillation(
            alpha={n: settings.alpha if value is None else value for n, value in own.items()},
            alpha_schedule=_alpha_schedule(settings.alpha_schedule, config.rounds),
            skip_at_alpha_one=settings.skip_at_alpha_one,
            **common,
        )
    raise ValueError(
        "algorithm.name must be 'fed_avg', 'periodic_codistillation' or 'merged_codistillation', "
        f"got {settings.name!r}."
    )


def _pools(config: ConfigDict, clients: FederatedData, preprocess: Preprocess) -> dict[str, Pool]:
    training = config.training
    schedules = {"constant": constant, "linear_decay": linear_decay(config.rounds)}
    local = LocalTraining(
        _optimizer("training.client_optimizer", training.client_optimizer),
        training.batch_size,
        training.epochs,
        preprocess,
    )
    indices = _pool_clients(config, clients)
    pools = {}
    for name, pool in config.pools.items():
        for rate in ("client_learning_rate", "server_learning_rate"):
            check_number(f"pools.{name}.{rate}", pool[rate], low=0)
        method = fed_avg(
            _model(f"pools.{name}.model", pool.model, clients, preprocess),
            local,
            _optimizer(
                "training.server_optimizer", training.server_optimizer, training.server_epsilon
            ),
            _choice("training.server_schedule", training.server_schedule, schedules),
            FedAvgHyper(pool.client_learning_rate, pool.server_learning_rate),
        )
        pools[name] = Pool(method, indices[name], pool.cohort_size)
    return pools


def _pool_clients(config: ConfigDict, clients: FederatedData) -> dict[str, np.ndarray]:
    fractions = {name: pool.fraction for name, pool in config.pools.items()}
    return capacity_pools(
        clients.num_clients, fraction=fractions, seed=config.data.seed, nested=config.nested_pools
    )


def _data(
    settings: ConfigDict,
) -> tuple[dict[str, FederatedData], np.ndarray, Preprocess, Preprocess]:
    """Labelled splits, the server's unlabelled images, and how images are read in training and
    evaluation."""
    if settings.name == "digits":
        splits = load_digits_federated(
            num_clients=settings.num_clients,
            concentration=settings.concentration,
            seed=settings.seed,
        )
        scale = augmentation.image_preprocess(augmentation.normalise((0.3,), (0.37,), scale=16.0))
        return splits, splits.pop("distillation").columns["image"], scale, scale
    if settings.name == "prepared":
        splits = load_prepared(settings.folder)
        if missing := {"train", "distillation", "held_out", "test"} - set(splits):
            raise ValueError(f"data.folder {settings.folder} has no split {min(missing)!r}.")
        unlabelled = _unlabelled(settings, splits.pop("distillation"))
        image_size = splits["train"].columns["image"].shape[1:3]
        return splits, unlabelled, *_cifar_preprocess(settings, image_size)
    raise ValueError(f"data.name must be 'digits' or 'prepared', got {settings.name!r}.")


def _unlabelled(settings: ConfigDict, in_domain: FederatedData) -> np.ndarray:
    """The images of the clients set apart, or of another prepared folder's 'train' split."""
    data = in_domain
    if settings.unlabelled_folder is not None:
        splits = load_prepared(settings.unlabelled_folder)
        if "train" not in splits:
            raise ValueError(
                f"data.unlabelled_folder {settings.unlabelled_folder} has no split 'train'."
            )
        data = splits["train"]
    count = data.num_examples if settings.num_unlabelled is None else settings.num_unlabelled
    check_integer("data.num_unlabelled", count, low=1)
    if count > data.num_examples:
        raise ValueError(
            f"data.num_unlabelled must be at most the {data.num_examples} unlabelled images, "
            f"got {count}."
        )
    # Prefixes of one order: a smaller set lies inside every larger one.
    order = np.random.default_rng(settings.seed).permutation(data.num_examples)
    return data.columns["image"][np.sort(order[:count])]


def _cifar_preprocess(
    settings: ConfigDict, image_size: tuple[int, int]
) -> tuple[Preprocess, Preprocess]:
    """(training, evaluation): random crops of the padded image and flips, or the central crop."""
    size, padding = settings.crop, settings.padding
    check_integer("data.crop", size, low=1)
    check_integer("data.padding", padding, low=0)
    if size > min(image_size):
        raise ValueError(f"data.crop must be at most the images' {min(image_size)}, got {size}.")
    draw = _choice(
        "data.augmentation",
        settings.augmentation,
        {"per_image": lambda transform: transform, "per_batch": augmentation.per_batch},
    )
    colours = augmentation.normalise(CIFAR_MEAN, CIFAR_DEVIATION)
    train = augmentation.image_preprocess(
        augmentation.pad(padding),
        draw(augmentation.random_crop(size, size)),
        draw(augmentation.random_horizontal_flip),
        colours,
    )
    return train, augmentation.image_preprocess(augmentation.centre_crop(size, size), colours)


def _splits(
    setting: str, names: Sequence[str], splits: Mapping[str, FederatedData]
) -> dict[str, FederatedData]:
    return {name: _choice(setting, name, splits) for name in names}


def _model(setting: str, name: str, data: FederatedData, preprocess: Preprocess) -> Model:
    create, shape = _choice(setting, name, MODELS)
    model = from_flax_linen(create(), jnp.zeros((1, *shape)))
    one = {key: jax.ShapeDtypeStruct((1, *c.shape[1:]), c.dtype) for key, c in data.columns.items()}
    images = jax.eval_shape(preprocess, one, jax.random.key(0), jnp.zeros(1, jnp.int32))["image"]
    if images.shape[1:] != shape:
        raise ValueError(
            f"{setting} {name!r} takes images of {list(shape)}, the data has {list(images.shape[1:])}."
        )
    if (classes := int(data.columns["label"].max()) + 1) > model.num_classes:
        raise ValueError(
            f"{setting} {name!r} has {model.num_classes} classes, the data has {classes}."
        )
    return model


def _optimizer(setting: str, name: str, epsilon: float | None = None) -> OptimizerFactory:
    """An optax optimizer by its name; epsilon is passed to those that have one."""
    optimizer = getattr(optax, name, None)
    accepted = inspect.signature(optimizer).parameters if callable(optimizer) else ()
    if "learning_rate" not in accepted:
        raise ValueError(f"{setting} must be the name of an optax optimizer, got {name!r}.")
    if epsilon is not None:
        check_number(setting.replace("optimizer", "epsilon"), epsilon, low=0)
        if "eps" in accepted:
            return functools.partial(optimizer, eps=epsilon)
    return optimizer


def _alpha_schedule(name: str, rounds: int) -> Callable[[Any, Any], Any]:
    schedules = {
        "constant": lambda alpha, round: alpha,
        "linear_to_one": lambda alpha, round: alpha + (1 - alpha) * round / rounds,
        "linear_to_zero": lambda alpha, round: alpha * (1 - round / rounds),
    }
    return _choice("algorithm.alpha_schedule", name, schedules)


def _choice(setting: str, name: str, choices: Mapping[str, Any]) -> Any:
    if name not in choices:
        raise ValueError(f"{setting} must be one of {sorted(choices)}, got {name!r}.")
    return choices[name]


def _chain(*steps: Preprocess) -> Preprocess:
    def preprocess(batch, key, positions):
        for step in steps:
            batch = step(batch, key, positions)
        return batch

    return preprocess
