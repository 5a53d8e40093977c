"""Optimizers by the names that optax and configs give them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
from ml_collections import ConfigDict

from fedcodist.config.config_errors import choice
from fedcodist.core.checks import check_number
from fedcodist.core.local_training import OptimizerFactory


def optimizer_of(setting: str, name: str, epsilon: float | None = None) -> OptimizerFactory:
    """An optax optimizer by its name; `epsilon` is passed to optimizers that have one."""
    optimizer: Any = getattr(optax, name, None)
    accepted = inspect.signature(optimizer).parameters if callable(optimizer) else ()
    if "learning_rate" not in accepted:
        raise ValueError(f"{setting} must be the name of an optax optimizer, got {name!r}.")
    if epsilon is not None:
        check_number(setting.replace("optimizer", "epsilon"), epsilon, low=0)
        if "eps" in accepted:
            return functools.partial(optimizer, eps=epsilon)
    return optimizer


def distillation_optimizer(settings: ConfigDict) -> OptimizerFactory:
    """The optimizer of distillation as a function of its learning rate.

    With `distillation_decay` "cosine" the rate falls to zero over the steps of a distillation.
    `distillation_clip` bounds the norm of the gradient.
    """
    create: Callable[..., optax.GradientTransformation] = optimizer_of(
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
