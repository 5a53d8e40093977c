"""Rounds of one pool without a mesh, so that clients of several sizes share a device."""

import jax
import jax.numpy as jnp
import numpy as np
from softmax_regression import random_clients

from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Cohort, Inputs, Round

FEATURES, CLASSES = 4, 3


def on_one_device(method, sizes, execution=Execution(), rounds=2):
    """The weights of a `softmax_regression` and the clients' states; sizes are at most 3."""
    data, count = random_clients((3,), FEATURES, CLASSES), len(sizes)
    columns = {name: jnp.asarray(column) for name, column in data.columns.items()}
    pool = Pool(method, np.arange(count), count)
    algorithm = independent_pools({"pool": pool}, columns, execution)
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))),
        {"pool": method.init_client_state()},
    )
    cohort = Cohort(columns, jnp.arange(count), jnp.zeros(count, int), jnp.asarray(sizes), 3)
    state = algorithm.init(jax.random.key(0))
    for number in range(rounds):
        inputs = Round(jnp.int32(number), jax.random.key(number), Inputs({"pool": cohort}, {}))
        state, states, _ = algorithm.round(state, states, inputs, algorithm.hyper)
    return method.variables(state["pool"]).params["w"], states["pool"]
