"""Each part of a joint model is trained as it would be alone: its optimizer sees its own names."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.apfl import apfl
from fedcodist.algorithms.clients.fed_kd import fed_kd
from fedcodist.algorithms.parties.fed_mrl import fed_mrl
from fedcodist.algorithms.parties.fml import fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.joint_model import joint_optimizer
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.headed import headed
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")
COLUMNS = {"image": np.eye(4, dtype=np.float32), "label": np.arange(4, dtype=np.int32) % 3}
DATA = FederatedData.from_arrays(COLUMNS, offsets=[0, 2, 4])


def network(width, embedding=2):
    backbone = nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(embedding)])
    return headed(backbone, jnp.zeros((1, 4)), 3)


SEEN = set()  # names at the top of the trees that optimizers were given


def without_head(rate):
    """Trains all layers but the head, chosen by its name at the top of the network's own tree."""

    def labels(params):
        SEEN.update(params if isinstance(params, dict) else ())
        frozen = lambda path, _: "frozen" if path[0] == jax.tree_util.DictKey("head") else "trained"
        return jax.tree_util.tree_map_with_path(frozen, params)

    return optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(rate)}, labels
    )


TRAINING = LocalTraining(without_head, batch_size=2, epochs=2)
LARGE, SMALL = network(5), network(3)
GROUPS = {"large": PartyGroup(LARGE, [0]), "other": PartyGroup(network(4), [1])}


def of_pool(method):
    return independent_pools({"main": Pool(method, [0, 1], 2)}, COLUMNS)


@pytest.mark.parametrize(
    "build",
    [
        lambda: of_pool(apfl(SMALL, TRAINING)),
        lambda: of_pool(fed_kd(LARGE, SMALL, COLUMNS, TRAINING)),
        lambda: fml(GROUPS, SMALL, TRAINING),
        lambda: fed_mrl(GROUPS, SMALL, TRAINING),
    ],
    ids=["apfl", "fed_kd", "fml", "fed_mrl"],
)
def test_a_layer_can_be_frozen_by_its_name(build):
    algorithm = build()
    outcome = run_experiment(
        Experiment(algorithm, resident_data(DATA), {"train": DATA}, 2), show_progress=False
    )
    first = jax.vmap(algorithm.init)(jax.vmap(jax.random.key)(np.zeros(1, np.uint32)))
    heads, others = [], []
    leaves = map(jax.tree_util.tree_leaves_with_path, (first, outcome.state))
    for (path, before), (_, after) in zip(*leaves, strict=True):
        names = jax.tree_util.keystr(path)
        if "params" in names:
            (heads if "'head'" in names else others).append(np.array_equal(before, after))
    assert heads and all(heads)
    assert others and not any(others)
    # Teachers stay with their clients. Their optimizers too have seen no tree around their network.
    assert not {"teacher", "student", "global", "mixed", "own", "meme"} & SEEN


def test_parts_are_trained_as_they_would_be_alone():
    """Also with a clip by the norm of a tree, which is another one for both parts together."""
    draw = np.random.default_rng(0)
    params = {
        name: {"w": np.float32(draw.normal(size=size))} for name, size in (("a", 3), ("b", 50))
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    other = optax.sgd(0.2, momentum=0.9)
    both = joint_optimizer({"a": optimizer, "b": other})

    def trained(optimizer, params):
        state = optimizer.init(params)
        for step in range(3):
            gradient = jax.tree.map(lambda w, step=step: w * (step + 1), params)
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params

    found = trained(both, params)
    expected = {"a": trained(optimizer, params["a"]), "b": trained(other, params["b"])}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
