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
    count, cohort = len(sizes), first_rows(sizes)
    pool = Pool(method, np.arange(count), count)
    algorithm = independent_pools({"pool": pool}, cohort.columns, execution)
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))),
        {"pool": method.init_client_state()},
    )
    state = algorithm.init(jax.random.key(0))
    for number in range(rounds):
        inputs = Round(jnp.int32(number), jax.random.key(number), Inputs({"pool": cohort}, {}))
        state, states, _ = algorithm.round(state, states, inputs, algorithm.hyper)
    return method.variables(state["pool"]).params["w"], states["pool"]


def first_rows(sizes):
    """A cohort whose clients have the first rows of the same three; a client may have none."""
    columns = random_clients((3,), FEATURES, CLASSES).columns
    columns = {name: jnp.asarray(column) for name, column in columns.items()}
    count = len(sizes)
    return Cohort(columns, jnp.arange(count), jnp.zeros(count, int), jnp.asarray(sizes), 3)


def after_one_round(algorithm, pool, sizes):
    """An algorithm's state after a round in which only this pool has clients, of these sizes."""
    inputs = Inputs({pool: first_rows(sizes)}, {})
    round = Round(jnp.int32(0), jax.random.key(0), inputs)
    state = algorithm.init(jax.random.key(0))
    return algorithm.round(state, {pool: ()}, round, algorithm.hyper)[0]
