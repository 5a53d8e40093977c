"""Several models as one, which are trained together on the same batches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core import keys
from fedcodist.core.model import Model, Variables


def joined(
    models: Mapping[str, Model],
    loss: Callable[[Any, Any], jax.Array],
    num_classes: int,
    key_of: Callable[[jax.Array, str], jax.Array] = keys.derive,
) -> Model:
    """A model whose parameters, mutable state and outputs are those of several models, by name.

    Args:
      models: name -> Model.
      loss: (name -> outputs, batch) -> loss per example.
      num_classes: of the whole.
      key_of: (key, name) -> the key of a model's own random numbers, such as for dropout.
    """

    def init(key):
        variables = {name: model.init(keys.derive(key, name)) for name, model in models.items()}
        return Variables(
            {name: values.params for name, values in variables.items()},
            {name: values.mutable for name, values in variables.items()},
        )

    def apply(variables, batch, *, key=None, **arguments):
        outputs, mutable = {}, {}
        for name, model in models.items():
            outputs[name], mutable[name] = model.apply(
                Variables(variables.params[name], variables.mutable[name]),
                batch,
                key=None if key is None else key_of(key, name),
                **arguments,
            )
        return outputs, mutable

    return Model(init, apply, loss, {}, num_classes)
