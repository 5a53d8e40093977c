"""Several models as one, which are trained together on the same batches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core import keys
from fedcodist.core.model import Batch, Model, Variables

PyTree = Any


def joint_model(
    models: Mapping[str, Model],
    loss: Callable[[Any, Batch], jax.Array],
    keeps_key: str | None = None,
) -> Model:
    """The models as one, whose outputs are name -> outputs.

    Its variables are `joint_variables`; parameters of other names are none of a model's, and stay where
    they are.

    Args:
      models: name -> model. The first one's number of classes is the whole's.
      loss: (outputs, batch) -> per example.
      keeps_key: the model that drops the units that it would drop alone; others' keys are derived from
        theirs by name.
    """

    def init(key: jax.Array) -> Variables:
        return joint_variables(
            {name: model.init(keys.derive(key, name)) for name, model in models.items()}
        )

    def apply(
        variables: Variables, batch: Batch, *, key: jax.Array | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        outputs, mutable = {}, {}
        for name, model in models.items():
            drawn = key if key is None or name == keeps_key else keys.derive(key, name)
            outputs[name], mutable[name] = model.apply(
                part_of(variables, name), batch, key=drawn, **arguments
            )
        return outputs, mutable

    return Model(init, apply, loss, {}, next(iter(models.values())).num_classes)


def joint_variables(parts: Mapping[str, Variables]) -> Variables:
    """Several models' variables as one's: name -> parameters, and name -> mutable state."""
    return Variables(
        {name: variables.params for name, variables in parts.items()},
        {name: variables.mutable for name, variables in parts.items()},
    )


def part_of(joint: Variables, name: str) -> Variables:
    """The variables of one of the models."""
    return Variables(joint.params[name], joint.mutable[name])
