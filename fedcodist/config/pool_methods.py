"""Builds methods of pools, whose server has a model for each pool of clients, from a config.

`fedcodist.config.client_methods` builds how clients train. OFFERS makes the arguments of a method that
are not settings. The others are settings of `algorithm`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.pools.client_ensembles import with_client_ensembles
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.fed_df_validation import FedDFValidation
from fedcodist.algorithms.pools.fed_sdd import FedSDDTeaching
from fedcodist.algorithms.pools.grouped_models import group_sizes_of
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.config.bind import accepted, bind, offered
from fedcodist.config.client_methods import (
    Clients,
    client_method,
    local_training,
    server_optimizer,
    server_schedule,
)
from fedcodist.config.compression import with_links
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import as_executed, execution_of
from fedcodist.config.networks import (
    headed_model,
    layers_of,
    model_of,
    model_with_exits,
    module_of,
    narrowed,
)
from fedcodist.config.optimizers import distillation_optimizer
from fedcodist.config.privacy import privacy_of, with_privacy
from fedcodist.config.references import choice_or_reference
from fedcodist.config.registry import (
    BASELINE,
    CODISTILLATION,
    algorithm_entry,
    function_of,
    method_of,
)
from fedcodist.config.secure_sum import with_secure_sum
from fedcodist.core import keys
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod
from fedcodist.core.model import Model
from fedcodist.data import augmentation
from fedcodist.data.client_pools import capacity_pools
from fedcodist.distillation.divergences import DIVERGENCES, KL, Divergence
from fedcodist.distillation.validation import ValidationData
from fedcodist.distillation.weight_averaging import WeightAveraging

DEPTH_FL = "depth_fl"  # its parts are the first blocks of a network with exits
_FED_SDD = ("fed_sdd", "fed_sdd_pools")
_WITH_GROUPS = (*_FED_SDD, "fed_ensemble")  # each group of a cohort trains a model of its own


def build_of_pools(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """The method of pools that a config's `algorithm` names."""
    entry = algorithm_entry(config)
    function = independent_pools if config.algorithm.name == BASELINE else function_of(entry)
    of_the_library = set(_OFFERS_TO_SINGLE_METHODS)
    if all("teaching" in pool for pool in config.pools.values()):
        of_the_library.remove("teaching")  # which a codistillation of one's own gets too
    given = offered(function, OFFERS, config, data, of_the_library=of_the_library)
    _check_pools_are_read(config, data, has_levels="levels" in given)
    if config.algorithm.get("validation") is not None and "validation" not in accepted(function):
        raise ValueError(
            "algorithm.validation must be of a method that stops by it, such as fed_df, got "
            f"algorithm.name={entry.name}."
        )
    build = functools.partial(bind, function, config.algorithm, "algorithm.")
    if measured := tuple(config.algorithm.get("measured", ())):
        if "pool" not in given:
            raise ValueError(
                "algorithm.measured must be of a method with one pool, such as fed_sdd, got "
                f"algorithm.name={entry.name}."
            )
        pool = given.pop("pool")
        return with_client_ensembles(lambda pool: build(pool=pool, **given), pool, measured)
    return build(**given)


def _check_pools_are_read(config: ConfigDict, data: Data, has_levels: bool) -> None:
    """Raises ValueError that names a pool's setting which nothing reads with this method and data."""
    method, is_depth_fl = config.algorithm.name, config.algorithm.name == DEPTH_FL
    has_domains = data.text is not None and data.text.pools is not None
    why_no_share = f"{method} trains whole networks"
    if is_depth_fl:
        why_no_share = f"pools of {method} have a depth"
    unread = {
        "share": "" if has_levels and not is_depth_fl else why_no_share,
        "depth": "" if is_depth_fl else f"{method} trains networks of all their blocks",
        "domain": "" if has_domains else f"the data {config.data.name} have no domains",
        "fraction": "a pool has all clients of its domain" if has_domains else "",
    }
    for name, pool in config.pools.items():
        for setting, reason in unread.items():
            if reason and pool.get(setting) is not None:
                raise ValueError(f"pools.{name}.{setting} must be left out: {reason}.")


def _pools(config: ConfigDict, data: Data) -> dict[str, Pool]:
    indices = _clients_of_pools(config, data)
    _check_rates(config)
    privacy = privacy_of(config, indices)
    poisson = None if privacy is None else privacy.poisson
    pools = {}
    for name, pool in config.pools.items():
        model = as_executed(config, _model(config, data, f"pools.{name}.model", pool.model))
        method = client_method(Clients(config, data, model, pool, len(indices[name])))
        method = with_privacy(privacy, with_links(config, method), pool.cohort_size)
        most = _largest_group(config, pool.cohort_size)
        if poisson is not None:
            most = poisson.slots(len(indices[name]), pool.cohort_size)
        method = with_secure_sum(config, method, most, data)
        pools[name] = Pool(method, indices[name], pool.cohort_size, poisson)
    return pools


def _largest_group(config: ConfigDict, cohort_size: int) -> int:
    """The largest number of a cohort's clients who train one model, and whose messages are summed."""
    settings = config.algorithm
    if settings.name not in _WITH_GROUPS:
        return cohort_size
    with named("algorithm."):
        return max(group_sizes_of(cohort_size, settings.num_models, settings.get("group_sizes")))


def _model(config: ConfigDict, data: Data, setting: str, name: str) -> Model:
    """A network; with `algorithm.embedding_width` it has an embedding of that width and a head."""
    width = config.algorithm.get("embedding_width")
    if width is None:
        return model_of(config, data, setting, name)
    return headed_model(setting, name, data, width)


def _server_model(config: ConfigDict, data: Data) -> Model:
    """Fed-ET's large model."""
    setting = "algorithm.server_model"
    return as_executed(config, _model(config, data, setting, config.algorithm.server_model))


def _check_rates(config: ConfigDict) -> None:
    for name, pool in config.pools.items():
        for rate in ("client_learning_rate", "server_learning_rate"):
            check_number(f"pools.{name}.{rate}", pool[rate], low=0)


def _clients_of_pools(config: ConfigDict, data: Data) -> dict[str, np.ndarray]:
    """Pool -> indices of its clients: those of its `domain`, or its `fraction` of all."""
    if data.text is not None and data.text.pools is not None:
        of_domain = data.text.pools
        return {
            name: choice(f"pools.{name}.domain", pool.get("domain"), of_domain)
            for name, pool in config.pools.items()
        }
    return capacity_pools(
        data.splits["train"].num_clients,
        fraction={name: pool.fraction for name, pool in config.pools.items()},
        seed=config.data.get("seed", 0),
        nested=config.nested_pools,
    )


def _one_pool(config: ConfigDict, data: Data) -> Pool:
    pools = _pools(config, data)
    if len(pools) != 1:
        raise ValueError(
            f"pools must be one for {config.algorithm.name}, whose models share it, got {list(pools)}."
        )
    return next(iter(pools.values()))


def _levels(config: ConfigDict, data: Data) -> dict[str, HeteroFLLevel]:
    """HeteroFL's levels: every pool has a `share` of the units of one network's hidden layers."""
    training, method = config.training, config.algorithm.name
    if data.models is not None:
        raise ValueError(f"algorithm.name must be another than {method} for text.")
    wrapped = [training.get(name) is not None for name in ("compression", "secure_sum")]
    if training.get("method", BASELINE) != BASELINE or any(wrapped):
        raise ValueError(
            f"training must have neither a method, compression nor secure_sum for {method}, whose "
            "clients average."
        )
    if training.get("privacy") is not None and method != "hetero_fl":
        raise ValueError(f"training.privacy must be of another method than {method}.")
    indices = _clients_of_pools(config, data)
    _check_rates(config)
    for setting in ("model", "client_learning_rate", "server_learning_rate"):
        values = sorted({pool[setting] for pool in config.pools.values()})
        if len(values) > 1:
            raise ValueError(f"pools must have one {setting} for {method}, got {values}.")
    _whole_model(config, data)  # for errors that name the setting
    levels = {}
    for name, pool in config.pools.items():
        part = as_executed(config, _part(config, data, name, pool))
        levels[name] = HeteroFLLevel(part, indices[name], pool.cohort_size)
    return levels


def _wrapped(config: ConfigDict, data: Data) -> Callable[[FederatedMethod], FederatedMethod]:
    """Makes the methods of HeteroFL's levels private, where the config asks for it."""
    settings = config.training.get("privacy") or {}
    for setting in ("quantile", "bands"):
        if settings.get(setting) is not None:
            raise ValueError(f"training.privacy.{setting} must be None for hetero_fl.")
    privacy = privacy_of(config, _clients_of_pools(config, data))
    if privacy is not None and privacy.poisson is not None:
        raise ValueError("training.privacy.sampling must be 'fixed' for hetero_fl.")
    return lambda method: with_privacy(privacy, method)


def _part(config: ConfigDict, data: Data, name: str, pool: ConfigDict) -> Model:
    """A pool's part of the network: its first blocks, or the first units of its hidden layers."""
    setting = f"pools.{name}.model"
    if config.algorithm.name == DEPTH_FL:
        return model_with_exits(setting, pool.model, data, pool.depth)
    module, example = module_of(setting, pool.model, data)
    return from_flax_linen(narrowed(module, pool.share, f"pools.{name}.share"), example)


def _whole_model(config: ConfigDict, data: Data) -> Model:
    """The whole network, of which the pools have parts."""
    name, pool = _first(config)
    if config.algorithm.name == DEPTH_FL:
        return as_executed(config, model_with_exits(f"pools.{name}.model", pool.model, data))
    return as_executed(config, model_of(config, data, f"pools.{name}.model", pool.model))


def _first(config: ConfigDict) -> tuple[str, ConfigDict]:
    return next(iter(config.pools.items()))


def _alpha(config: ConfigDict) -> dict[str, float]:
    """Pool -> alpha: the pool's setting, or else the algorithm's."""
    check_number("algorithm.alpha", config.algorithm.alpha, 0, 1)
    of_pools = {name: pool.alpha for name, pool in config.pools.items()}
    return {n: config.algorithm.alpha if value is None else value for n, value in of_pools.items()}


def _alpha_schedule(name: str, rounds: int) -> Callable[[Any, Any], Any]:
    schedules = {
        "constant": lambda alpha, round: alpha,
        "linear_to_one": lambda alpha, round: alpha + (1 - alpha) * round / rounds,
        "linear_to_zero": lambda alpha, round: alpha * (1 - round / rounds),
    }
    return choice("algorithm.alpha_schedule", name, schedules)


def _distillation_preprocess(config: ConfigDict, data: Data) -> Preprocess:
    """How the server reads images: as clients do; with `algorithm.flip` it also flips them at random."""
    settings = config.algorithm
    if data.text is not None and (settings.flip or settings.mixup_beta):
        raise ValueError(
            "algorithm.flip must be False and algorithm.mixup_beta 0 for text, got "
            f"{settings.flip!r} and {settings.mixup_beta!r}."
        )
    if not settings.flip:
        return data.preprocess
    flip = augmentation.image_preprocess(augmentation.random_axis_flip)
    # With the same key, its coin could be that of a flip among the clients' transforms.
    return lambda batch, key, positions: flip(
        data.preprocess(batch, key, positions), keys.derive(key, "axis_flip"), positions
    )


def _divergence(config: ConfigDict, data: Data) -> str | Divergence:
    """The name of one of DIVERGENCES, or a user's function."""
    named = config.algorithm.get("divergence", KL)
    return choice_or_reference(
        "algorithm.divergence", named, {name: name for name in (KL, *DIVERGENCES)}
    )


def _validation(config: ConfigDict, data: Data) -> FedDFValidation | None:
    if config.algorithm.get("validation") is None:
        return None
    settings = dict(config.algorithm.validation)
    split = choice("algorithm.validation.split", settings.pop("split"), data.splits)
    held_out = ValidationData(split.num_examples, preprocess=data.evaluation_preprocess)
    return bind(FedDFValidation, settings, "algorithm.validation.", data=held_out)


def _averaging(config: ConfigDict, data: Data) -> WeightAveraging | None:
    settings = config.algorithm
    if settings.flip:
        raise ValueError(
            "algorithm.flip must be False for fed_be, whose ensemble answers every image once a round."
        )
    if settings.average_every is None:
        return None
    return WeightAveraging(settings.average_from, settings.average_every)


def _teaching(config: ConfigDict, data: Data) -> dict[str, TeachingHyper] | FedSDDTeaching:
    """How the pools' models teach each other, or how FedSDD's ensemble teaches."""
    if config.algorithm.name in _FED_SDD:
        return bind(FedSDDTeaching, config.algorithm, "algorithm.", cached=_cached(config, data))
    if all("teaching" in pool for pool in config.pools.values()):
        return {name: TeachingHyper(**pool.teaching) for name, pool in config.pools.items()}
    if config.algorithm.name in CODISTILLATION:
        lacking = next(name for name, pool in config.pools.items() if "teaching" not in pool)
        raise ValueError(f"the config lacks 'pools.{lacking}.teaching'.")
    return bind(FedSDDTeaching, config.algorithm, "algorithm.", cached=_cached(config, data))


def _cached(config: ConfigDict, data: Data) -> bool:
    if config.algorithm.cached and config.algorithm.flip:
        raise ValueError(
            "algorithm.cached must be False with algorithm.flip: the teacher would answer other images "
            "than the student sees."
        )
    return config.algorithm.cached


# Arguments that any method of pools may have, also one of a user's. Some are fields of `distillation`
# and of `hyper`.
_OFFERS_TO_ALL: dict[str, Callable[[ConfigDict, Data], Any]] = {
    "pools": _pools,
    "pool": _one_pool,
    "columns": lambda config, data: data.splits["train"].columns,
    "num_unlabelled": lambda config, data: len(data.unlabelled),
    "num_rounds": lambda config, data: config.rounds,
    "execution": lambda config, data: execution_of(config),
    "name": lambda config, data: method_of(config.to_dict()),
    "optimizer": lambda config, data: distillation_optimizer(config.algorithm),
    "preprocess": _distillation_preprocess,
    "inputs": lambda config, data: data.inputs,
    "divergence": _divergence,
    # Those of HeteroFL and related methods.
    "levels": _levels,
    "wrapped": _wrapped,
    "model": _whole_model,
    "layers": lambda config, data: layers_of(_whole_model(config, data)),
    "training": local_training,
    "server_optimizer": lambda config, data: server_optimizer(config),
    "schedule": lambda config, data: server_schedule(config),
    "client_learning_rate": lambda config, data: _first(config)[1].client_learning_rate,
    "server_learning_rate": lambda config, data: _first(config)[1].server_learning_rate,
}
# Arguments of single methods of the library. In a user's method such a name is an ordinary setting, but
# for the `teaching` of codistillations: see `build_of_pools`.
_OFFERS_TO_SINGLE_METHODS: dict[str, Callable[[ConfigDict, Data], Any]] = {
    # The codistillations', and FedSDD's.
    "teaching": _teaching,
    "alpha": lambda config, data: _alpha(config),
    "alpha_schedule": lambda config, data: _alpha_schedule(
        config.algorithm.alpha_schedule, config.rounds
    ),
    "server": _server_model,  # Fed-ET's
    "validation": _validation,  # FedDF's
    "averaging": _averaging,  # FedBE's
}
OFFERS = _OFFERS_TO_ALL | _OFFERS_TO_SINGLE_METHODS
