"""The smallest model that learns, and clients for it, for references by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData


def softmax_regression(features: int, classes: int, several_starts: bool = False) -> Model:
    """Logits x W without a bias; W [features, classes] starts the same for every key, or not."""

    def init(key):
        weights = np.random.default_rng(7).normal(size=(features, classes)).astype(np.float32)
        if several_starts:
            weights = jax.random.normal(key, weights.shape)
        return Variables({"w": jnp.asarray(weights)}, {})

    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"], variables.mutable

    return Model(init, apply, cross_entropy, {}, classes)


@functools.cache
def random_clients(sizes: tuple[int, ...], features: int, classes: int) -> FederatedData:
    """Clients of these sizes with normal 'image's [n, features] and uniform 'label's."""
    generator = np.random.default_rng(0)
    columns = {
        "image": generator.normal(size=(sum(sizes), features)).astype(np.float32),
        "label": generator.integers(0, classes, sum(sizes)).astype(np.int32),
    }
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
