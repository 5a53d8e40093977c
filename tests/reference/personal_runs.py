"""Runs of one pool whose clients have personal models, and a network of a body and a head in NumPy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from softmax_regression import random_clients

from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.client_states import device_client_states
from fedcodist.core.for_each_client import Execution
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

SIZES, FEATURES, WIDTH, CLASSES = (5, 2, 7, 3), 4, 3, 3
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


def two_layers() -> Model:
    """Logits tanh(x body) head, of normal kernels."""

    def init(key):
        first, second = jax.random.split(key)
        body, head = (
            0.5 * jax.random.normal(key, shape)
            for key, shape in ((first, (FEATURES, WIDTH)), (second, (WIDTH, CLASSES)))
        )
        return Variables({"body": {"kernel": body}, "head": {"kernel": head}}, {})

    def apply(variables, batch, **_):
        hidden = jnp.tanh(batch["image"] @ variables.params["body"]["kernel"])
        return hidden @ variables.params["head"]["kernel"], variables.mutable

    return Model(init, apply, cross_entropy, {}, CLASSES)


MODEL = two_layers()


class Run(NamedTuple):
    """What a run of one seed leaves.

    Attributes:
      model: the server's parameters.
      personal: the parameters of every client's personal model, by client; empty if there is none.
      statistics: their mutable state.
      cohorts: the clients of each round.
      first: the server's parameters before the first round.
    """

    model: dict
    personal: list[dict]
    statistics: list[dict]
    cohorts: list[list[int]]
    first: dict


def run(method, rounds=3, cohort=3, execution=Execution(), data=None, name="personal") -> Run:
    """Trains one pool of all clients; everything is in float64 afterwards."""
    data = federated() if data is None else data
    clients = np.arange(data.num_clients)
    algorithm = independent_pools({"pool": Pool(method, clients, cohort)}, data.columns, execution)
    programs, seeds = build_programs(algorithm, rounds), jnp.zeros(1, jnp.uint32)
    states = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 1))
    hyper = jax.tree.map(jnp.float32, algorithm.hyper)
    start = programs.init(seeds)
    in_double = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), tree)
    of_server = algorithm.predictors["pool"].variables
    first = in_double(of_server(start).params)
    state, states, _ = programs.train(start, states, seeds, 0, rounds, hyper, resident_data(data))
    personal = []
    if models := algorithm.personal_models["pool"]:
        read = jax.jit(jax.vmap(jax.vmap(models[f"pool_{name}"].variables, (None, 0))))
        found = read(state, states["pool"])
        personal = [in_double(jax.tree.map(lambda leaf, c=c: leaf[:, c], found)) for c in clients]
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    params, statistics = ([variables[n] for variables in personal] for n in (0, 1))
    return Run(in_double(of_server(state).params), params, statistics, cohorts, first)


def examples(client, data=None):
    """(images in float64, one-hot labels) of a client."""
    data = federated() if data is None else data
    rows = slice(data.offsets[client], data.offsets[client + 1])
    images = np.asarray(data.columns["image"][rows], np.float64)
    return images, np.eye(CLASSES)[data.columns["label"][rows]]


def gradient(params, client, data=None):
    """The gradient of a client's mean loss at the parameters of `two_layers`, by hand."""
    images, labels = examples(client, data)
    hidden = np.tanh(images @ params["body"]["kernel"])
    logits = hidden @ params["head"]["kernel"]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    slope = (shares / shares.sum(1, keepdims=True) - labels) / len(labels)
    below = slope @ params["head"]["kernel"].T * (1 - hidden**2)
    return {"body": {"kernel": images.T @ below}, "head": {"kernel": hidden.T @ slope}}


def step(params, direction, rate, layers=("body", "head")):
    """The parameters after a step along the direction, of the named layers."""
    moved = lambda name: rate * direction[name]["kernel"] if name in layers else 0.0
    return {name: {"kernel": params[name]["kernel"] - moved(name)} for name in params}


def combined(weights, models):
    """The sum of the models' parameters, times a weight each."""
    total = lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))
    return jax.tree.map(total, *models)


def weighted_mean(models, clients):
    """The mean of the models' parameters, weighted by clients' examples."""
    sizes = np.array([SIZES[client] for client in clients], float)
    return combined(sizes / sizes.sum(), models)


def assert_same(ours, theirs, rtol=1e-4, atol=1e-5):
    """Trees of the same structure and nearly the same values."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), ours, theirs)


def distance(ours, theirs):
    """The largest difference of two trees' values."""
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), ours, theirs)))
