"""A user's networks, as `my_module:network` in a config.

The reference is to a function, or a network's class, which is called by the names of its parameters:

- `num_classes`, or one parameter of any name without a default: the data's number of classes, of
  prepared text the size of its vocabulary;
- `rngs`: it then makes a Flax NNX module, `def network(num_classes, rngs): ...`.

It returns a Flax linen module, a Flax NNX module, a function that Haiku can transform, or a Model if the
loss, inputs or metrics are not those of an image classifier. For prepared text it must return a Model,
such as `language_model` makes. All but a Model read the column `image` after `data.preprocess`, are
initialised with an example of it, and return logits.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.config.classes import classes_of_labels
from fedcodist.config.config_errors import named
from fedcodist.config.data import Data
from fedcodist.config.references import called, function_at, signature_of
from fedcodist.core import keys
from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.core.model import Model

_ALLOWED = "a fedcodist.Model, a Flax linen or NNX module, or a Haiku function"
_OF_TEXT = (
    "for prepared text it must return a fedcodist.Model, such as "
    "fedcodist.text.next_token.language_model makes"
)


def referenced_model(setting: str, reference: str, data: Data) -> Model:
    """The model of a network that a setting names by a reference.

    Raises:
      ValueError: names the setting: the function takes or returns something else, or its network has too
        few classes for the data.
    """
    from flax import nnx  # most configs do without it, and its import takes a quarter of a second

    function = function_at(setting, reference)
    arguments = _arguments(setting, reference, function, data)
    prefix = f"{setting} {reference!r}: "
    if "rngs" in _parameters(function):
        if data.text is not None:
            raise ValueError(
                f"{prefix}{_OF_TEXT}, got a function of rngs, which makes an NNX module."
            )
        create = lambda rngs: called(setting, reference, function, **arguments, rngs=rngs)
        made = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
        if not isinstance(made, nnx.Module):
            raise ValueError(
                f"{prefix}a function of rngs must return a Flax NNX module, got {made!r}."
            )
        with named(prefix):
            model = from_flax_nnx(create, example_of(data), inputs=data.inputs)
        return _with_enough_classes(setting, reference, model, data)
    network = called(setting, reference, function, **arguments)
    if isinstance(network, Model):
        return network
    if data.text is not None:
        raise ValueError(f"{prefix}{_OF_TEXT}, got {type(network).__name__}.")
    if isinstance(network, nnx.Module):
        raise ValueError(
            f"{prefix}a function that returns a Flax NNX module must have a parameter rngs."
        )
    adapter: Callable[..., Model]
    if isinstance(network, nn.Module):
        adapter = from_flax_linen
    elif callable(network):
        adapter = from_haiku
    else:
        raise ValueError(f"{prefix}it must return {_ALLOWED}, got {type(network).__name__}.")
    with named(prefix):
        model = adapter(network, example_of(data), inputs=data.inputs)
    return _with_enough_classes(setting, reference, model, data)


def referenced_module(setting: str, reference: str, data: Data) -> nn.Module:
    """The Flax linen module that a reference's function returns, for methods that need its layers.

    Raises:
      ValueError: names the setting; as `referenced_model`, or it is not a linen module.
    """
    function = function_at(setting, reference)
    if "rngs" in _parameters(function):
        raise ValueError(
            f"{setting} {reference!r} must return a Flax linen module, whose layers the method needs, "
            "got a function of rngs, which makes an NNX module."
        )
    network = called(setting, reference, function, **_arguments(setting, reference, function, data))
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"{setting} {reference!r} must return a Flax linen module, whose layers the method needs, "
            f"got {type(network).__name__}."
        )
    return network


def example_of(data: Data) -> jax.Array:
    """One example as networks read it, after preprocessing: zeros [1, ...].

    Raises:
      ValueError: the preprocessing leaves no such column.
    """
    batch = preprocessed_shapes(data)
    if data.inputs not in batch:
        raise ValueError(
            f"networks read the column {data.inputs!r}, the data have {sorted(batch)} after "
            "preprocessing; a network with other inputs must be a fedcodist.Model."
        )
    return jnp.zeros(batch[data.inputs].shape, batch[data.inputs].dtype)


def preprocessed_shapes(data: Data) -> Mapping[str, jax.ShapeDtypeStruct]:
    """The columns of one of the clients' examples after preprocessing, shapes [1, ...]."""
    one = {
        name: jax.ShapeDtypeStruct((1, *c.shape[1:]), jax.dtypes.canonicalize_dtype(c.dtype))
        for name, c in data.splits["train"].columns.items()
        if c.dtype.kind not in "SU"  # text stays on the host
    }
    key = keys.key_shape()
    return jax.eval_shape(data.preprocess, one, key, jax.ShapeDtypeStruct((1,), jnp.int32))


def classes_of(data: Data) -> int:
    """How many outputs a classifier of the data needs: one for each label, of public examples too.

    Labels count that no client has any more, since which ones these are depends on `data.seed`.

    Raises:
      ValueError: the examples have no labels.
    """
    classes = data.num_classes if data.public is None else data.public.num_classes
    if classes is not None:
        return classes
    if not any("label" in split.columns for split in data.splits.values()):
        raise ValueError("data.name must be of labelled examples, which have a column 'label'.")
    return classes_of_labels(data.labels)


def _arguments(setting: str, reference: str, function: Any, data: Data) -> dict[str, int]:
    """{the parameter that is the number of classes: that number}, where there is one.

    The classes of prepared text are its tokens.
    """
    parameters = _parameters(function)
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in ("rngs", "num_classes")
    ]
    if "num_classes" in parameters:
        needed.insert(0, "num_classes")
    if len(needed) > 1:
        raise ValueError(
            f"{setting} {reference!r} must be a function of nothing, or of num_classes and rngs, "
            f"got one of {', '.join(needed)}."
        )
    if data.text is not None:
        return dict.fromkeys(needed, data.text.vocabulary.size)
    return {name: classes_of(data) for name in needed}


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature_of(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def _with_enough_classes(setting: str, reference: str, model: Model, data: Data) -> Model:
    if (classes := classes_of(data)) > model.num_classes:
        raise ValueError(
            f"{setting} {reference!r} has {model.num_classes} classes, the data has {classes}."
        )
    return model
