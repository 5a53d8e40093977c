"""Networks by the names that configs give them, and parts of them.

A user's networks are references: see `fedcodist.config.referenced_networks`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.data_text import TEXT_MODELS, text_model
from fedcodist.config.referenced_networks import (
    classes_of,
    example_of,
    referenced_model,
    referenced_module,
)
from fedcodist.config.references import choice_or_reference, is_reference
from fedcodist.core.checks import check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Model, variable_shapes
from fedcodist.models import cnn, digits, exits, resnet
from fedcodist.models.headed import headed

_RESNETS: dict[str, Callable[..., Any]] = {
    "resnet8": resnet.resnet8,
    "resnet20": resnet.resnet20,
    "resnet56": resnet.resnet56,
    "wide_resnet16_2": resnet.wide_resnet16_2,
}
# name -> (network, shape of its images)
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "digits_small": (digits.small_digits, (8, 8, 1)),
    "digits_large": (digits.large_digits, (8, 8, 1)),
    "digits_normalised": (digits.BatchNormMLP, (8, 8, 1)),
    "cnn_small": (cnn.small_cnn, (24, 24, 3)),
    "cnn_small_10": (functools.partial(cnn.small_cnn, classes=10), (24, 24, 3)),
    "cnn_large": (cnn.large_cnn, (24, 24, 3)),
    "cnn_large_10": (functools.partial(cnn.large_cnn, classes=10), (24, 24, 3)),
    "cnn_small_32": (functools.partial(cnn.small_cnn, input_size=32), (32, 32, 3)),
    "cnn_large_32": (functools.partial(cnn.large_cnn, input_size=32), (32, 32, 3)),
} | {
    f"{name}_{classes}": (functools.partial(network, classes=classes), (32, 32, 3))
    for name, network in _RESNETS.items()
    for classes in (10, 100)
}
# Those with exits, of which a pool may have the first blocks.
WITH_EXITS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "digits_exits": (exits.digits_exits, (8, 8, 1)),
}


def model_of(config: ConfigDict, data: Data, setting: str, name: str) -> Model:
    """The model that a setting names: of images, of text, or one of the networks of the data."""
    if is_reference(name):
        return referenced_model(setting, name, data)
    if data.models is not None:
        return choice(setting, name, data.models)()
    if data.text is not None:
        choice(setting, name, TEXT_MODELS)
        return text_model(name, data.text, config.training.get("samples", 0))
    return image_model(setting, name, data)


def image_model(setting: str, name: str, data: Data) -> Model:
    """One of MODELS; raises ValueError if it takes other images or has too few classes."""
    create, shape = choice_or_reference(setting, name, MODELS)
    model = from_flax_linen(create(), jnp.zeros((1, *shape)))
    images = example_of(data)
    if images.shape[1:] != shape:
        raise ValueError(
            f"{setting} {name!r} takes images of {list(shape)}, the data has {list(images.shape[1:])}."
        )
    if (classes := classes_of(data)) > model.num_classes:
        raise ValueError(
            f"{setting} {name!r} has {model.num_classes} classes, the data has {classes}."
        )
    return model


def headed_model(setting: str, name: str, data: Data, width: int) -> Model:
    """One of MODELS as an embedding of a width and a linear head; a reference must make one itself.

    Raises:
      ValueError: names the setting: the network reads other data, or cannot omit its output layer.
    """
    if is_reference(name):
        return referenced_model(setting, name, data)
    if data.models is not None or data.text is not None:
        raise ValueError(f"{setting} must be a network of images to have a head of its own.")
    plain = image_model(setting, name, data)  # for errors that name the setting
    module, example = module_of(setting, name, data)
    return headed(module.clone(classes=None), example, plain.num_classes, width)


def model_with_exits(setting: str, name: str, data: Data, depth: int | None = None) -> Model:
    """A network with exits, or its first blocks; raises ValueError that names the setting."""
    if is_reference(name):
        module, example = referenced_module(setting, name, data), example_of(data)
        if not isinstance(module, exits.Exits):
            raise ValueError(
                f"{setting} must be a network with exits, fedcodist.models.exits.Exits, got {name!r}, a "
                f"{type(module).__name__}."
            )
    else:
        create, shape = choice(setting, name, WITH_EXITS)
        module, example = create(), jnp.zeros((1, *shape))
    with named(f"{setting} {name!r}: "):
        return exits.with_exits(module.clone(depth=depth), example)


def module_of(setting: str, name: str, data: Data) -> tuple[Any, Any]:
    """(a network of images as a Flax linen module, its example), for methods that change its layers."""
    if is_reference(name):
        return referenced_module(setting, name, data), example_of(data)
    create, shape = choice(setting, name, MODELS)
    return create(), jnp.zeros((1, *shape))


def narrowed(network: Any, share: float, setting: str = "training.fed_dropout.share") -> Any:
    """The network with a share of the units of each hidden layer, rounded, at least one.

    Args:
      network: dense layers, or convolutions and dense layers.
      share: above 0, up to 1.
      setting: the setting of the share, for messages.

    Raises:
      ValueError, TypeError: names the setting: the share is outside this range, or the network is not a
        chain of layers.
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


def submodel_of(data: Data, name: str, share: float, model: Model) -> tuple[Model, Any]:
    """(a network with a share of the units, the whole network's layers or units for `fed_dropout`)."""
    setting = "a pool's model for fed_dropout"
    if data.submodels is not None and not is_reference(name):
        check_number("training.fed_dropout.share", share, above=0, high=1)
        return choice(setting, name, data.submodels)(share)
    module, example = module_of(setting, name, data)
    return from_flax_linen(narrowed(module, share), example), layers_of(model)


def layers_of(model: Model) -> list[str]:
    """The names of a chain's layers, in their order."""
    return list(variable_shapes(model).params)
