"""Optimizers by the names that optax and configs give them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
from ml_collections import ConfigDict

from fedcodist.config.config_errors import choice
from fedcodist.config.references import function_at, is_reference
from fedcodist.core.checks import check_number
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory


def optimizer_of(setting: str, name: str, epsilon: float | None = None) -> OptimizerFactory:
    """An optax optimizer by its name, or the function of the learning rate that a reference names.

    Args:
      setting: for messages.
      name: of the optimizer, or "package.module:function".
      epsilon: passed to optimizers that have an argument `eps`.

    Raises:
      ValueError, TypeError: names the setting.
    """
    optimizer: Any = (
        function_at(setting, name) if is_reference(name) else getattr(optax, name, None)
    )
    accepted = inspect.signature(optimizer).parameters if callable(optimizer) else ()
    if "learning_rate" not in accepted:
        raise ValueError(
            f"{setting} must be the name of an optax optimizer, or package.module:function with an "
            f"argument learning_rate, got {name!r}."
        )
    check_factory(setting, optimizer)
    if epsilon is not None:
        check_number(setting.replace("optimizer", "epsilon"), epsilon, low=0)
        if "eps" in accepted:
            return functools.partial(optimizer, eps=epsilon)
    return optimizer


def with_momentum(
    create: Callable[..., optax.GradientTransformation],
    momentum: float | None,
    settings: tuple[str, str],
    name: str,
) -> OptimizerFactory:
    """The optimizer called `name` with a momentum, if one is set.

    Args:
      create: its factory.
      momentum: in [0, 1], or None.
      settings: the settings that have the optimizer's name and the momentum.
      name: of the optimizer.

    Raises:
      ValueError, TypeError: names the setting of the momentum.
    """
    if momentum is None:
        return create
    of_optimizer, of_momentum = settings
    check_number(of_momentum, momentum, low=0, high=1)
    if "momentum" not in inspect.signature(create).parameters:
        raise ValueError(
            f"{of_momentum} must be None for {of_optimizer} {name!r}, which has no momentum, got "
            f"{momentum}."
        )
    return functools.partial(create, momentum=momentum)


def distillation_optimizer(settings: ConfigDict) -> OptimizerFactory:
    """The optimizer of distillation as a function of its learning rate.

    With `distillation_decay` "cosine" the rate falls to zero over the steps of a distillation.
    `distillation_clip` bounds the norm of the gradient.
    """
    setting, name = "algorithm.distillation_optimizer", settings.distillation_optimizer
    create: Callable[..., optax.GradientTransformation] = with_momentum(
        optimizer_of(setting, name, settings.distillation_epsilon),
        settings.get("distillation_momentum"),
        (setting, "algorithm.distillation_momentum"),
        name,
    )
    decays: dict[str, Callable[[Any], Any]] = {
        "none": lambda rate: rate,
        "cosine": lambda rate: optax.cosine_decay_schedule(rate, max(settings.steps, 1)),
    }
    decay_name = settings.get("distillation_decay") or "none"
    decay = choice("algorithm.distillation_decay", decay_name, decays)
    clip = settings.get("distillation_clip")
    if clip is None:
        return lambda rate: create(decay(rate))
    check_number("algorithm.distillation_clip", clip, above=0)
    return lambda rate: optax.chain(optax.clip_by_global_norm(clip), create(decay(rate)))
