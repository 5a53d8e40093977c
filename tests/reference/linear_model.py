"""A linear model of plain arrays, for tests whose reference is a loop in NumPy."""

import jax

from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy


def linear_model(features: int, classes: int) -> Model:
    """Logits [batch, classes] of the column `image` [batch, features]; the only parameter is `w`."""

    def init(key):
        return Variables({"w": jax.random.normal(key, (features, classes))}, {})

    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, classes)
