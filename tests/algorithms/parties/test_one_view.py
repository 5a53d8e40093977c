"""Random preprocessing of public examples: parties learn from answers on the very same images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    DecentralisedPeriodicHyper,
    PublicAnswers,
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import DSFLHyper, ds_fl
from fedcodist.algorithms.parties.fed_md import FedMDHyper, fed_md
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.kt_pfl import KTpFLHyper, kt_pfl
from fedcodist.algorithms.parties.open_examples import OpenExamples
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.placement import replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLASSES, FEATURES, PUBLIC_ROWS, ROUNDS = 3, 4, 7, 2
GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.normal(size=(FEATURES, CLASSES)).astype(np.float32)
PUBLIC_IMAGES = GENERATOR.normal(size=(PUBLIC_ROWS, FEATURES)).astype(np.float32)
PRIVATE = {"image": PUBLIC_IMAGES[:4], "label": np.arange(4, dtype=np.int32) % CLASSES}


def scaled(batch, key, positions):
    """Multiplies each example by a number of its own."""
    factors = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n)))(positions)
    return {**batch, "image": batch["image"] * factors[:, None]}


def equal_networks() -> Model:
    def apply(variables, batch, **_):
        return batch["image"] @ variables.params["w"], variables.mutable

    init = lambda key: Variables({"w": jnp.asarray(WEIGHTS)}, {})
    return Model(init, apply, cross_entropy, {"accuracy": accuracy()}, CLASSES)


GROUPS = {"linear": PartyGroup(equal_networks(), np.arange(2))}
LOCAL = LocalTraining(optax.sgd, batch_size=2)
# Batches of another size than those in which predictions are made, and another order.
TEACHING = LocalTraining(optax.sgd, batch_size=3, epochs=2, preprocess=scaled)
OPEN = OpenExamples(PUBLIC_ROWS, 5, inference_batch_size=2)
TAUGHT = {
    "fed_md": lambda: fed_md(
        GROUPS,
        Alignment(np.zeros(PUBLIC_ROWS, np.int32), None, inference_batch_size=2),
        CLASSES,
        TEACHING,
        LOCAL._replace(epochs=0),
        hyper=FedMDHyper(0.5, 0.0),
    ),
    "ds_fl": lambda: ds_fl(
        GROUPS, equal_networks(), OPEN, LOCAL, TEACHING, "sa", DSFLHyper(0.0, 0.5)
    ),
    "kt_pfl": lambda: kt_pfl(GROUPS, OPEN, LOCAL, TEACHING, hyper=KTpFLHyper(0.0, 0.5)),
    "periodic": lambda: decentralised_periodic_codistillation(
        GROUPS,
        PublicAnswers(PUBLIC_ROWS, 5, 1, 2),
        ROUNDS,
        1 - np.eye(2),
        StepTraining(batch_size=2, steps=1),
        TEACHING,
        DecentralisedPeriodicHyper(0.0, 0.5),
    ),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_equal_networks_teach_each_other_nothing(name):
    algorithm = TAUGHT[name]()
    programs = build_programs(algorithm, ROUNDS, None)
    put = functools.partial(replicate, mesh=None)
    private = FederatedData.from_arrays(PRIVATE, offsets=np.array([0, 2, 4]))
    data = resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES}})
    seeds = put(np.zeros(1, np.uint32))
    hyper = jax.tree.map(np.float32, algorithm.hyper)
    state = programs.init(seeds)
    after, _, _ = programs.train(
        *put((state, {}, seeds, np.int32(0), np.int32(ROUNDS), hyper, data))
    )
    weights = algorithm.predictors["linear"].variables(after).params["w"]
    np.testing.assert_allclose(weights, np.broadcast_to(WEIGHTS, weights.shape), atol=1e-6)
