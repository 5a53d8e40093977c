"""Several models as one joint model, trained together on the same batches, each by its own optimizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax

from fedcodist.core import keys
from fedcodist.core.model import Batch, Model, Variables

PyTree = Any


def joint_model(
    models: Mapping[str, Model],
    loss: Callable[[Any, Batch], jax.Array],
    keeps_key: str | None = None,
) -> Model:
    """The joint model, whose outputs are name -> outputs.

    Its variables are `joint_variables`. Parameters under other names belong to no model and are not
    read.

    Args:
      models: name -> model. The joint model's number of classes is that of the first.
      loss: (outputs, batch) -> per-example loss.
      keeps_key: the model that gets the dropout key itself, and so drops the same units as it would
        alone. Other models get keys derived from it by their names.
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


def own_optimizers(
    factory: Callable[[Any], optax.GradientTransformation], names: Iterable[str]
) -> Callable[[Any], optax.GradientTransformation]:
    """A function of the learning rate: `joint_optimizer` with the factory's optimizer for each name."""
    return lambda rate: joint_optimizer({name: factory(rate) for name in names})


def joint_optimizer(
    optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """One optimizer of a joint model's parameters: name -> optimizer of the parameters of this name.

    Each gets the same tree as without the other models. So it can choose parameters by their names, and
    clip by a norm of its own.
    """

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}

    def update(
        gradient: PyTree, states: dict[str, PyTree], params: PyTree
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        updates, after = {}, {}
        for name, optimizer in optimizers.items():
            updates[name], after[name] = optimizer.update(
                gradient[name], states[name], params[name]
            )
        return updates, after

    return optax.GradientTransformation(init, update)


def joint_variables(parts: Mapping[str, Variables]) -> Variables:
    """The joint model's variables: name -> parameters, and name -> mutable state."""
    return Variables(
        {name: variables.params for name, variables in parts.items()},
        {name: variables.mutable for name, variables in parts.items()},
    )


def part_of(joint: Variables, name: str) -> Variables:
    """The variables of one of the models."""
    return Variables(joint.params[name], joint.mutable[name])
