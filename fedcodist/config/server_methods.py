"""From a config's `pools` and `algorithm` to an algorithm, by the names that configs use.

`algorithm.name` is what a server does with its clients' models, or a method without one: of parties, or
of clients on a graph. How clients train is `fedcodist.config.client_methods`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper
from fedcodist.algorithms.pools.client_ensembles import with_client_ensembles
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.fed_be import FedBEHyper, fed_be
from fedcodist.algorithms.pools.fed_df import FedDFHyper, fed_df
from fedcodist.algorithms.pools.fed_df_validation import FedDFValidation
from fedcodist.algorithms.pools.fed_ensemble import fed_ensemble
from fedcodist.algorithms.pools.fed_sdd import FedSDDHyper, FedSDDTeaching, fed_sdd
from fedcodist.algorithms.pools.hetero_fl import HeteroFLAdjustments, HeteroFLLevel, hetero_fl
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.config.client_methods import client_method, local_training, server_settings
from fedcodist.config.compression import with_links
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import as_executed, check_plainly_executed, execution_of
from fedcodist.config.graph_methods import DECENTRALISED_METHODS
from fedcodist.config.networks import MODELS, layers_of, model_of, narrowed
from fedcodist.config.optimizers import distillation_optimizer
from fedcodist.config.party_methods import PARTY_METHODS
from fedcodist.config.registry import WITHOUT_UNLABELLED
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_number
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import from_flax_linen
from fedcodist.data import augmentation
from fedcodist.data.partition import capacity_pools
from fedcodist.distillation.loop import Distillation
from fedcodist.distillation.validation import ValidationData
from fedcodist.distillation.weight_averaging import WeightAveraging


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
    whole = as_executed(config, model_of(config, data, f"pools.{first}.model", one.model))
    create, shape = MODELS[one.model]
    levels = {}
    for name, pool in config.pools.items():
        network = narrowed(create(), pool.share, f"pools.{name}.share")
        part = as_executed(config, from_flax_linen(network, jnp.zeros((1, *shape))))
        levels[name] = HeteroFLLevel(part, indices[name], pool.cohort_size)
    return hetero_fl(
        whole,
        levels,
        layers_of(whole),
        data.splits["train"].columns,
        local_training(config, data),
        HeteroFLAdjustments(config.algorithm.masked, config.algorithm.scaled),
        hyper=FedAvgHyper(one.client_learning_rate, one.server_learning_rate),
        execution=execution_of(config),
        **server_settings(config),
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
        validation = FedDFValidation(held_out, **chosen)
    with named("algorithm: "):
        return fed_df(
            _pools(config, data),
            data.splits["train"].columns,
            len(data.unlabelled),
            _distillation(config, data),
            scaled=settings.scaled,
            validation=validation,
            hyper=FedDFHyper(settings.learning_rate, settings.temperature),
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
        averaging = WeightAveraging(settings.average_from, settings.average_every)
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
            hyper=FedBEHyper(settings.learning_rate, settings.temperature),
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

    def build(pool):
        return fed_sdd(
            pool,
            data.splits["train"].columns,
            len(data.unlabelled),
            num_models=settings.num_models,
            rounds_kept=settings.rounds_kept,
            group_sizes=settings.group_sizes,
            distillation=_distillation(config, data),
            teaching=FedSDDTeaching(**{name: settings[name] for name in FedSDDTeaching._fields}),
            hyper=FedSDDHyper(settings.learning_rate, settings.temperature),
            execution=execution_of(config),
        )

    measured = tuple(settings.measured)
    return with_client_ensembles(build, pool, measured) if measured else build(pool)


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
        optimizer=distillation_optimizer(settings),
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
        model = model_of(config, data, f"pools.{name}.model", pool.model)
        model = as_executed(config, model)
        method = client_method(config, data, model, pool, len(indices[name]))
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
