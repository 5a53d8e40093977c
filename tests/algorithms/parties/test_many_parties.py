"""FedMD over several devices: a hundred parties of ten architectures, and the paper's networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.fed_md import fed_md, keras_adam
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.digits import MLP
from fedcodist.models.fed_md import TABLE_1, FedMDNetwork, narrower
from fedcodist.run.placement import AXIS, replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

IMAGE, CLASSES, ALIGNED = (5,), 4, 6


def after(
    groups, image, sizes, rounds=2, devices=None, execution=Execution(), optimizer=keras_adam
):
    """(state, metrics) on the host after some rounds, and how many programs were compiled."""
    draw = np.random.default_rng(0)
    columns = {
        "image": draw.normal(size=(sum(sizes), *image)).astype(np.float32),
        "label": draw.integers(0, CLASSES, sum(sizes)).astype(np.int32),
    }
    public = {"image": draw.normal(size=(9, *image)).astype(np.float32)}
    digest = LocalTraining(optimizer, batch_size=4)
    revisit = LocalTraining(optimizer, batch_size=3, epochs=2)
    algorithm = fed_md(
        groups,
        Alignment(np.arange(9) % CLASSES, ALIGNED),
        CLASSES,
        digest,
        revisit,
        execution=execution,
    )
    mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    put = functools.partial(replicate, mesh=mesh)
    programs = build_programs(algorithm, rounds, mesh)
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
    data = resident_data(private, {PUBLIC: public})
    seeds = put(np.zeros(1, np.uint32))
    hyper = jax.tree.map(np.float32, algorithm.hyper)
    state = put(jax.tree.map(np.asarray, programs.init(seeds)))
    arguments = put((seeds, np.int32(0), np.int32(rounds), hyper, data))
    state, _, metrics = programs.train(state, {}, *arguments)
    return jax.tree.map(np.asarray, (state, metrics)), programs.train._cache_size()


def assert_same(left, right, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), left, right)


def ten_architectures(parties):
    """Groups of which party c has architecture c mod 10, so that devices get all of them."""
    models = [from_flax_linen(MLP((w,), CLASSES), jnp.zeros((1, *IMAGE))) for w in range(2, 12)]
    return {
        f"hidden_{place + 2}": PartyGroup(model, np.arange(place, parties, 10))
        for place, model in enumerate(models)
    }


def few_examples(parties):
    return [1 + (7 * party) % 11 for party in range(parties)]


@pytest.mark.slow
def test_a_hundred_parties_of_ten_architectures():
    """Shared by eight devices and by three, one by one and in chunks: the same numbers; one program."""
    groups = ten_architectures(100)
    # SGD: Adam's step is as long for a gradient of rounding errors.
    one = functools.partial(after, groups, IMAGE, few_examples(100), optimizer=optax.sgd)
    (state, metrics), compiled = one()
    assert compiled == 1
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(state["hidden_2"].variables)} == {(1, 10)}
    assert len([name for name in metrics if name.endswith("/digest_loss")]) == 100
    assert all(metrics[name].all() for name in metrics if name.endswith("/finite"))
    for options in (dict(devices=8), dict(devices=3, execution=Execution("vmap", 4))):
        assert_same(one(**options)[0], (state, metrics), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_thousand_parties_of_ten_architectures():
    """They are trained by one program."""
    one = functools.partial(after, rounds=1, optimizer=optax.sgd)
    (state, metrics), compiled = one(ten_architectures(1000), IMAGE, few_examples(1000))
    assert compiled == 1
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(state["hidden_11"].variables)} == {(1, 100)}
    losses = [values for name, values in metrics.items() if name.endswith("/digest_loss")]
    assert len(losses) == 1000 and np.isfinite(losses).all()
    assert all(metrics[name].all() for name in metrics if name.endswith("/finite"))


@pytest.mark.slow
def test_the_papers_networks_over_devices():
    """With batch normalisation and dropout, whose draws do not depend on where a party is.

    Three of the ten, which differ in layers.
    """
    image = (12, 12, 1)
    groups = {
        f"network_{index}": PartyGroup(
            from_flax_linen(
                FedMDNetwork(shape.widths, shape.dropout, CLASSES), jnp.zeros((1, *image))
            ),
            np.array([index]),
        )
        for index, shape in enumerate(narrower((TABLE_1[0], TABLE_1[5], TABLE_1[8]), 32))
    }
    sizes = [3, 6, 4]
    one = functools.partial(after, groups, image, sizes, rounds=1, optimizer=optax.sgd)
    expected, _ = one()
    assert_same(one(devices=2)[0], expected, rtol=1e-3, atol=1e-5)
