"""HeteroFL's nested networks: which part of the whole a level has, and how it is scaled."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from fedcodist.core.model import Model, variable_shapes
from fedcodist.models.submodels import chain_units, check_chain, counts_of, places_of

PyTree = Any


def part_of_level(
    model: Model, level: Model, layers: Sequence[str], scaled: bool
) -> tuple[PyTree, Model]:
    """A level's part of the whole network.

    Args:
      model, level: the whole network and the level's, which has fewer units in its hidden layers.
      layers: the layers' names in their order.
      scaled: whether the level's layers are scaled by their shares of units.

    Returns:
      (places, network): where the level's parameters are in the whole, and the level's network.

    Raises:
      ValueError: one line; networks that are no chains, or do not fit.
    """
    shapes, smaller = variable_shapes(model).params, variable_shapes(level).params
    check_chain(shapes, smaller, layers)
    units = chain_units(shapes, layers)
    counts = counts_of(shapes, smaller, units)
    # NumPy's: making an algorithm starts no device.
    first = {group: np.arange(count.kept) for group, count in counts.items()}
    shares = {group: count.kept / count.whole for group, count in counts.items()}
    return places_of(first, shapes, units), scaled_by_share(level, shares) if scaled else level


def scaled_by_share(model: Model, shares: Mapping[str, float]) -> Model:
    """The model, but what a layer returns is divided by its share of units.

    A layer that keeps r of its units adds up to r of what the next one is used to. Whether the ReLU or
    the pooling that follows is within the layer's module is the same: neither minds the scale.

    Args:
      model: of a Flax linen network.
      shares: name of a submodule of the network itself -> its share.

    Raises:
      ValueError: a name that is not called as a submodule.
    """
    called = set()

    def divide(call, arguments, keywords, context):
        outputs = call(*arguments, **keywords)
        path = context.module.path
        if context.method_name != "__call__" or len(path) != 1 or path[0] not in shares:
            return outputs
        called.add(path[0])
        return outputs / shares[path[0]]

    def apply(variables, batch, **more):
        with nn.intercept_methods(divide):
            outputs = model.apply(variables, batch, **more)
        if missing := sorted(shares.keys() - called):
            raise ValueError(
                "adjustments.scaled must be False for a network that does not call "
                f"{missing[0]!r} as a Flax linen module of its own."
            )
        return outputs

    return model._replace(apply=apply)
