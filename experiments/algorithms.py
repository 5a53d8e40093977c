"""From a config's `training`, `pools` and `algorithm` to an algorithm, by the names that configs use.

`training.method` names how clients train (FedAvg where it is not set), `algorithm.name` what a server
does with their models, or a method without one: of parties, or of clients on a graph.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.compression import with_links
from experiments.data import Data
from experiments.decentralised import DECENTRALISED_METHODS
from experiments.execution import as_executed, check_plainly_executed, execution_of
from experiments.messages import choice, named
from experiments.methods import WITHOUT_UNLABELLED
from experiments.parties import PARTY_METHODS
from experiments.text import TEXT_MODELS, text_model
from fedcodist import augmentation
from fedcodist.algorithms.codistillation import TeachingHyper
from fedcodist.algorithms.fed_avg import FedAvgHyper, constant, fed_avg, linear_decay
from fedcodist.algorithms.fed_be import fed_be
from fedcodist.algorithms.fed_df import Validated, fed_df
from fedcodist.algorithms.fed_dropout import fed_dropout
from fedcodist.algorithms.fed_ensemble import fed_ensemble
from fedcodist.algorithms.fed_gkd import FedGKDHyper, fed_gkd
from fedcodist.algorithms.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.fed_sdd import fed_sdd
from fedcodist.algorithms.fetch_sgd import FetchSGDHyper, fetch_sgd
from fedcodist.algorithms.hetero_fl import Level, hetero_fl
from fedcodist.algorithms.merged_codistillation import merged_codistillation
from fedcodist.algorithms.mutual_losses import Mutual
from fedcodist.algorithms.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools import Pool, independent_pools
from fedcodist.algorithms.scaffold import scaffold
from fedcodist.checks import check_number
from fedcodist.client_training import LocalTraining, OptimizerFactory, Preprocess
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import capacity_pools
from fedcodist.distillation import Distillation
from fedcodist.federated_algorithm import FederatedAlgorithm, FederatedMethod
from fedcodist.model import Model, from_flax_linen, variable_shapes
from fedcodist.models import cnn, digits, resnet
from fedcodist.models.layered import with_layers
from fedcodist.validation import ValidationData
from fedcodist.weight_averaging import Averaging

MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "digits_small": (digits.small_digits, (8, 8, 1)),
    "digits_large": (digits.large_digits, (8, 8, 1)),
    "cnn_small": (cnn.small_cnn, (24, 24, 3)),
    "cnn_small_10": (functools.partial(cnn.small_cnn, classes=10), (24, 24, 3)),
    "cnn_large": (cnn.large_cnn, (24, 24, 3)),
    "cnn_large_10": (functools.partial(cnn.large_cnn, classes=10), (24, 24, 3)),
    "cnn_small_32": (functools.partial(cnn.small_cnn, input_size=32), (32, 32, 3)),
    "cnn_large_32": (functools.partial(cnn.large_cnn, input_size=32), (32, 32, 3)),
} | {
    f"{name}_{classes}": (functools.partial(network, classes=classes), (32, 32, 3))
    for name, network in {
        "resnet8": resnet.resnet8,
        "resnet20": resnet.resnet20,
        "resnet56": resnet.resnet56,
        "wide_resnet16_2": resnet.wide_resnet16_2,
    }.items()
    for classes in (10, 100)
}


def build_algorithm(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Assembles the algorithm that a config describes; the data themselves are not read.

    Raises:
      ValueError, TypeError: one line that names the setting and what is allowed.
    """
    execution_of(config)  # a mistake there is told first
    if config.algorithm.name in {**PARTY_METHODS, **DECENTRALISED_METHODS}:
        check_plainly_executed(config)
    return choice("algorithm.name", config.algorithm.name, ALGORITHMS)(config, data)


def reads_unlabelled(config: ConfigDict) -> bool:
    """Whether the algorithm uses the server's unlabelled images."""
    without = (*WITHOUT_UNLABELLED, *PARTY_METHODS, *DECENTRALISED_METHODS)
    return config.algorithm.name not in without


def _independent(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    name = config.training.get("method", "fed_avg")
    return independent_pools(
        _pools(config, data), data.splits["train"].columns, execution_of(config), name
    )


def _hetero_fl(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Every pool has a `share` of the units of one network's hidden layers."""
    if data.text is not None or data.models is not None:
        raise ValueError("algorithm.name must be another than hetero_fl for text.")
    training = config.training
    if training.get("method", "fed_avg") != "fed_avg" or "compression" in training:
        raise ValueError(
            "training must have neither a method nor compression for hetero_fl, whose clients average."
        )
    indices = _clients_of_pools(config, data)
    _check_rates(config)
    for setting in ("model", "client_learning_rate", "server_learning_rate"):
        found = sorted({pool[setting] for pool in config.pools.values()})
        if len(found) > 1:
            raise ValueError(f"pools must have one {setting} for hetero_fl, got {found}.")
    first, one = next(iter(config.pools.items()))
    whole = as_executed(config, _model(config, data, f"pools.{first}.model", one.model))
    create, shape = MODELS[one.model]
    levels = {}
    for name, pool in config.pools.items():
        network = narrowed(create(), pool.share, f"pools.{name}.share")
        part = as_executed(config, from_flax_linen(network, jnp.zeros((1, *shape))))
        levels[name] = Level(part, indices[name], pool.cohort_size)
    return hetero_fl(
        whole,
        levels,
        _layers(whole),
        data.splits["train"].columns,
        _local_training(config, data),
        masked=config.algorithm.masked,
        scaled=config.algorithm.scaled,
        hyper=FedAvgHyper(one.client_learning_rate, one.server_learning_rate),
        execution=execution_of(config),
        **_server(config),
    )


def _periodic(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    return periodic_codistillation(period=config.algorithm.period, **_codistillation(config, data))


def _merged(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    settings = config.algorithm
    check_number("algorithm.alpha", settings.alpha, 0, 1)
    own = {name: pool.alpha for name, pool in config.pools.items()}
    return merged_codistillation(
        alpha={n: settings.alpha if value is None else value for n, value in own.items()},
        alpha_schedule=_alpha_schedule(settings.alpha_schedule, config.rounds),
        skip_at_alpha_one=settings.skip_at_alpha_one,
        **_codistillation(config, data),
    )


def _fed_df(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    _check_not_text(data)
    settings = config.algorithm
    validation = None
    if settings.get("validation") is not None:
        chosen = dict(settings.validation)
        split = choice("algorithm.validation.split", chosen.pop("split"), data.splits)
        held_out = ValidationData(split.num_examples, preprocess=data.evaluation_preprocess)
        validation = Validated(held_out, **chosen)
    with named("algorithm: "):
        return fed_df(
            _pools(config, data),
            data.splits["train"].columns,
            len(data.unlabelled),
            _distillation(config, data),
            learning_rate=settings.learning_rate,
            temperature=settings.temperature,
            scaled=settings.scaled,
            validation=validation,
            execution=execution_of(config),
        )


def _fed_be(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    _check_not_text(data)
    settings = config.algorithm
    if settings.flip:
        raise ValueError(
            "algorithm.flip must be False for fed_be, whose ensemble answers every image once a round."
        )
    averaging = None
    if settings.average_every is not None:
        averaging = Averaging(settings.average_from, settings.average_every)
    with named("algorithm: "):
        return fed_be(
            _pools(config, data),
            data.splits["train"].columns,
            len(data.unlabelled),
            _distillation(config, data),
            sampling=settings.sampling,
            samples=settings.samples,
            with_clients=settings.with_clients,
            averaging=averaging,
            learning_rate=settings.learning_rate,
            temperature=settings.temperature,
            execution=execution_of(config),
        )


def _fed_sdd(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    _check_not_text(data)
    settings = config.algorithm
    pool = _one_pool(config, data)
    if settings.cached and settings.flip:
        raise ValueError(
            "algorithm.cached must be False with algorithm.flip: the teacher would answer other images "
            "than the student sees."
        )
    return fed_sdd(
        pool,
        data.splits["train"].columns,
        len(data.unlabelled),
        num_models=settings.num_models,
        rounds_kept=settings.rounds_kept,
        distillation=_distillation(config, data),
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        scaled=settings.scaled,
        distilled=settings.distilled,
        warm_up=settings.warm_up,
        cached=settings.cached,
        group_sizes=settings.group_sizes,
        measured=tuple(settings.measured),
        execution=execution_of(config),
    )


def _fed_ensemble(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    _check_not_text(data)
    return fed_ensemble(
        _one_pool(config, data),
        data.splits["train"].columns,
        config.algorithm.num_models,
        execution_of(config),
    )


def _one_pool(config: ConfigDict, data: Data) -> Pool:
    pools = _pools(config, data)
    if len(pools) != 1:
        raise ValueError(
            f"pools must be one for {config.algorithm.name}, whose models share it, got {list(pools)}."
        )
    return next(iter(pools.values()))


ALGORITHMS: dict[str, Callable[[ConfigDict, Data], FederatedAlgorithm]] = {
    "fed_avg": _independent,
    "hetero_fl": _hetero_fl,
    "periodic_codistillation": _periodic,
    "merged_codistillation": _merged,
    "fed_df": _fed_df,
    "fed_be": _fed_be,
    "fed_sdd": _fed_sdd,
    "fed_ensemble": _fed_ensemble,
    **PARTY_METHODS,
    **DECENTRALISED_METHODS,
}


def _check_not_text(data: Data) -> None:
    if data.text is not None:
        raise ValueError(
            "algorithm.name must be fed_avg or a codistillation for text, whose models have no logits "
            "that an ensemble could average."
        )


def _codistillation(config: ConfigDict, data: Data) -> dict[str, Any]:
    return dict(
        pools=_pools(config, data),
        columns=data.splits["train"].columns,
        num_unlabelled=len(data.unlabelled),
        num_rounds=config.rounds,
        teaching={name: TeachingHyper(**pool.teaching) for name, pool in config.pools.items()},
        distillation=_distillation(config, data),
        execution=execution_of(config),
    )


def _distillation(config: ConfigDict, data: Data) -> Distillation:
    settings = config.algorithm
    if data.text is not None and (settings.flip or settings.mixup_beta):
        raise ValueError(
            "algorithm.flip must be False and algorithm.mixup_beta 0 for text, got "
            f"{settings.flip!r} and {settings.mixup_beta!r}."
        )
    flip = augmentation.image_preprocess(augmentation.random_axis_flip)
    return Distillation(
        steps=settings.steps,
        batch_size=settings.batch_size,
        optimizer=_distillation_optimizer(settings),
        direction=settings.direction,
        mixup_beta=settings.mixup_beta,
        preprocess=_chain(data.preprocess, flip) if settings.flip else data.preprocess,
        inputs=data.inputs,
    )


def _pools(config: ConfigDict, data: Data) -> dict[str, Pool]:
    indices = _clients_of_pools(config, data)
    _check_rates(config)
    pools = {}
    for name, pool in config.pools.items():
        model = _model(config, data, f"pools.{name}.model", pool.model)
        model = as_executed(config, model)
        method = _method(config, data, model, pool, len(indices[name]))
        method = with_links(config, method)
        pools[name] = Pool(method, indices[name], pool.cohort_size)
    return pools


def _check_rates(config: ConfigDict) -> None:
    for name, pool in config.pools.items():
        for rate in ("client_learning_rate", "server_learning_rate"):
            check_number(f"pools.{name}.{rate}", pool[rate], low=0)


def _clients_of_pools(config: ConfigDict, data: Data) -> dict[str, np.ndarray]:
    """Pool -> client indices: those of its `domain`, or its `fraction` of all."""
    if data.text is not None and data.text.pools is not None:
        of_domain = data.text.pools
        return {
            name: choice(f"pools.{name}.domain", pool.get("domain"), of_domain)
            for name, pool in config.pools.items()
        }
    return capacity_pools(
        data.splits["train"].num_clients,
        fraction={name: pool.fraction for name, pool in config.pools.items()},
        seed=config.data.seed,
        nested=config.nested_pools,
    )


def _method(
    config: ConfigDict, data: Data, model: Model, pool: ConfigDict, num_clients: int
) -> FederatedMethod:
    """How a pool's clients train and what its server makes of it."""
    clients = Clients(
        config,
        data,
        model,
        pool,
        num_clients,
        _local_training(config, data),
        _server(config),
        FedAvgHyper(pool.client_learning_rate, pool.server_learning_rate),
    )
    name = config.training.get("method", "fed_avg")
    return choice("training.method", name, CLIENT_METHODS)(clients)


def _local_training(config: ConfigDict, data: Data) -> LocalTraining:
    training = config.training
    return LocalTraining(
        _optimizer("training.client_optimizer", training.client_optimizer),
        training.batch_size,
        training.epochs,
        data.preprocess,
    )


def _server(config: ConfigDict) -> dict[str, Any]:
    """The server's optimizer and its schedule, as methods' arguments."""
    training = config.training
    schedules = {"constant": constant, "linear_decay": linear_decay(config.rounds)}
    return dict(
        server_optimizer=_optimizer(
            "training.server_optimizer", training.server_optimizer, training.server_epsilon
        ),
        schedule=choice("training.server_schedule", training.server_schedule, schedules),
    )


class Clients(NamedTuple):
    """What a client method is made of: the config, a pool of it, and what all methods need.

    Attributes:
      config, data, model, pool, num_clients: of the pool.
      local: how clients train.
      server: the server's optimizer and its schedule, as methods' arguments.
      rates: clients' and the server's.
    """

    config: ConfigDict
    data: Data
    model: Model
    pool: ConfigDict
    num_clients: int
    local: LocalTraining
    server: dict[str, Any]
    rates: FedAvgHyper


def _refuse_text(data: Data, method: str) -> None:
    """Raises one line for text to be continued; encoded sentences have networks of their own."""
    if data.text is not None:
        raise ValueError(f"training.method must be another than {method}, for text.")


def _fed_avg(clients: Clients) -> FederatedMethod:
    return fed_avg(clients.model, clients.local, hyper=clients.rates, **clients.server)


def _fed_prox(clients: Clients) -> FederatedMethod:
    weight = clients.config.training.proximal_weight
    check_number("training.proximal_weight", weight, low=0)
    hyper = FedProxHyper(*clients.rates, weight)
    return fed_prox(clients.model, clients.local, hyper=hyper, **clients.server)


def _fed_gkd(clients: Clients) -> FederatedMethod:
    _refuse_text(clients.data, "fed_gkd, whose clients learn from logits")
    settings = clients.config.training.fed_gkd
    hyper = FedGKDHyper(*clients.rates, settings.weight, settings.temperature)
    with named("training.fed_gkd: "):
        return fed_gkd(
            clients.model, clients.local, settings.models_kept, hyper=hyper, **clients.server
        )


def _scaffold(clients: Clients) -> FederatedMethod:
    with named("training.scaffold_"):
        return scaffold(
            clients.model,
            clients.num_clients,
            clients.local,
            clients.config.training.scaffold_option,
            hyper=clients.rates,
            **clients.server,
        )


def _fetch_sgd(clients: Clients) -> FederatedMethod:
    sketch = dict(clients.config.training.fetch_sgd)
    hyper = FetchSGDHyper(clients.pool.server_learning_rate, sketch.pop("momentum"))
    with named("training.fetch_sgd: "):
        return fetch_sgd(
            clients.model,
            clients.local,
            **sketch,
            schedule=clients.server["schedule"],
            hyper=hyper,
        )


def _fed_dropout(clients: Clients) -> FederatedMethod:
    _refuse_text(clients.data, "fed_dropout, whose parts are cut out of chains of layers")
    model, share = clients.model, clients.config.training.fed_dropout.share
    submodel, units = _submodel(clients.data, clients.pool.model, share, model)
    submodel = as_executed(clients.config, submodel)
    with named("training.fed_dropout: "):
        return fed_dropout(
            model, submodel, units, clients.local, hyper=clients.rates, **clients.server
        )


def _fed_kd(clients: Clients) -> FederatedMethod:
    """The pool's model is the student; `training.fed_kd` names the teacher and the layers to align."""
    config, data = clients.config, clients.data
    _refuse_text(data, "fed_kd, which aligns layers that these networks do not show")
    settings = dict(config.training.fed_kd)
    train = data.splits["train"]

    def network(setting, name, layers):
        if data.models is not None:  # they show all of their layers
            return as_executed(config, _model(config, data, setting, name))
        _image_model(setting, name, train, data.preprocess)  # a mistake is told by its setting
        create, shape = MODELS[name]
        with named(f"training.fed_kd.{layers}: "):
            model = with_layers(create(), jnp.zeros((1, *shape)), settings[layers])
        return as_executed(config, model)

    teacher = network("training.fed_kd.teacher", settings["teacher"], "teacher_layers")
    student = network("a pool's model for fed_kd", clients.pool.model, "student_layers")
    with named("training.fed_kd: "):
        return fed_kd(
            teacher,
            student,
            train.columns,
            clients.local,
            settings["exchange"],
            settings.get("fresh_optimizers", False),
            Mutual(**{name: settings[name] for name in Mutual._fields}),
            FedKDHyper(
                settings["teacher_learning_rate"],
                clients.pool.client_learning_rate,
                settings["output_weight"],
                settings["hidden_weight"],
            ),
        )


CLIENT_METHODS: dict[str, Callable[[Clients], FederatedMethod]] = {
    "fed_avg": _fed_avg,
    "fed_prox": _fed_prox,
    "fed_gkd": _fed_gkd,
    "scaffold": _scaffold,
    "fetch_sgd": _fetch_sgd,
    "fed_dropout": _fed_dropout,
    "fed_kd": _fed_kd,
}


def _submodel(data: Data, name: str, share: float, model: Model) -> tuple[Model, Any]:
    """A share of a network's units, and what `fed_dropout` must know of the whole."""
    setting = "a pool's model for fed_dropout"
    if data.submodels is not None:
        check_number("training.fed_dropout.share", share, above=0, high=1)
        return choice(setting, name, data.submodels)(share)
    create, shape = choice(setting, name, MODELS)
    return from_flax_linen(narrowed(create(), share), jnp.zeros((1, *shape))), _layers(model)


def _layers(model: Model) -> list[str]:
    """The names of a chain's layers, in their order."""
    return list(variable_shapes(model).params)


def narrowed(network: Any, share: float, setting: str = "training.fed_dropout.share") -> Any:
    """The network with a share of the units of each hidden layer, rounded, at least one.

    Args:
      network: dense layers, or convolutions and dense layers.
      share: above 0, up to 1.
      setting: the share's, for messages.

    Raises:
      ValueError, TypeError: one line; another share, or a network that is no chain of layers.
    """
    check_number(setting, share, above=0, high=1)
    widths = {
        name: tuple(max(1, round(share * width)) for width in getattr(network, name))
        for name in ("filters", "hidden")
        if hasattr(network, name)
    }
    if not widths:
        raise ValueError(
            f"{setting} needs a chain of layers such as digits_small or cnn_small, "
            f"got a {type(network).__name__}."
        )
    return network.clone(**widths)


def _model(config: ConfigDict, data: Data, setting: str, name: str) -> Model:
    if data.models is not None:
        return choice(setting, name, data.models)()
    if data.text is not None:
        choice(setting, name, TEXT_MODELS)
        return text_model(name, data.text, config.training.get("samples", 0))
    return _image_model(setting, name, data.splits["train"], data.preprocess)


def _image_model(setting: str, name: str, data: FederatedData, preprocess: Preprocess) -> Model:
    create, shape = choice(setting, name, MODELS)
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


def _distillation_optimizer(settings: ConfigDict) -> OptimizerFactory:
    """With `distillation_decay` "cosine" the rate falls to zero over the steps of a distillation;
    `distillation_clip` bounds the gradient's norm."""
    create = _optimizer(
        "algorithm.distillation_optimizer",
        settings.distillation_optimizer,
        settings.distillation_epsilon,
    )
    if (momentum := settings.get("distillation_momentum")) is not None:
        check_number("algorithm.distillation_momentum", momentum, low=0, high=1)
        if "momentum" not in inspect.signature(create).parameters:
            raise ValueError(
                "algorithm.distillation_momentum must be None for algorithm.distillation_optimizer "
                f"{settings.distillation_optimizer!r}, which has no momentum, got {momentum}."
            )
        create = functools.partial(create, momentum=momentum)
    decays: dict[str, Callable[[Any], Any]] = {
        "none": lambda rate: rate,
        "cosine": lambda rate: optax.cosine_decay_schedule(rate, max(settings.steps, 1)),
    }
    name = settings.get("distillation_decay") or "none"
    decay = choice("algorithm.distillation_decay", name, decays)
    clip = settings.get("distillation_clip")
    if clip is None:
        return lambda rate: create(decay(rate))
    check_number("algorithm.distillation_clip", clip, above=0)
    return lambda rate: optax.chain(optax.clip_by_global_norm(clip), create(decay(rate)))


def _alpha_schedule(name: str, rounds: int) -> Callable[[Any, Any], Any]:
    schedules = {
        "constant": lambda alpha, round: alpha,
        "linear_to_one": lambda alpha, round: alpha + (1 - alpha) * round / rounds,
        "linear_to_zero": lambda alpha, round: alpha * (1 - round / rounds),
    }
    return choice("algorithm.alpha_schedule", name, schedules)


def _chain(*steps: Preprocess) -> Preprocess:
    def preprocess(batch, key, positions):
        for step in steps:
            batch = step(batch, key, positions)
        return batch

    return preprocess
