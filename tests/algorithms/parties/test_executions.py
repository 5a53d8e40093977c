"""Every method of parties gives the same on streamed data and in another order of execution."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients

from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
from fedcodist.algorithms.graph.multi_headed_distillation import multi_headed_distillation
from fedcodist.algorithms.graph.public_answers import PublicAnswers
from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import OpenExamples, ds_fl
from fedcodist.algorithms.parties.fccl import fccl
from fedcodist.algorithms.parties.fd import fd
from fedcodist.algorithms.parties.fed_gen import fed_gen
from fedcodist.algorithms.parties.fed_gh import fed_gh
from fedcodist.algorithms.parties.fed_kd_parties import fed_kd_parties
from fedcodist.algorithms.parties.fed_l2g import fed_l2g
from fedcodist.algorithms.parties.fed_md import fed_md
from fedcodist.algorithms.parties.fed_mrl import fed_mrl
from fedcodist.algorithms.parties.fed_proto import fed_proto
from fedcodist.algorithms.parties.fed_tgp import fed_tgp
from fedcodist.algorithms.parties.fml import fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.kt_pfl import kt_pfl
from fedcodist.algorithms.parties.lg_fed_avg import lg_fed_avg
from fedcodist.algorithms.parties.local_only import local_only
from fedcodist.algorithms.parties.public_correlation import PublicBatches
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.models import MLP
from fedcodist.models.headed import headed
from fedcodist.models.multi_headed import multi_headed
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, FEATURES, CLASSES, NUM_PUBLIC = (4, 9, 5, 7), 3, 2, 8
DATA = random_clients(SIZES, FEATURES, CLASSES)
PUBLIC = {
    "image": np.random.default_rng(0).normal(size=(NUM_PUBLIC, FEATURES)).astype(np.float32),
}
EXAMPLE, TRAINING = jnp.zeros((1, FEATURES)), LocalTraining(optax.sgd, batch_size=4, epochs=2)
LINEAR, DEEP = (headed(body, EXAMPLE, CLASSES, 3) for body in (nn.Dense(2), MLP((4,), None)))
GROUPS = {
    "deep": PartyGroup(DEEP, np.array([0, 1, 3])),
    "linear": PartyGroup(LINEAR, np.array([2])),
}
HEADS = {
    "net": PartyGroup(multi_headed(MLP((3,), None), EXAMPLE, CLASSES, 1), np.arange(len(SIZES)))
}
EVERYBODY, STEPS = ~np.eye(len(SIZES), dtype=bool), StepTraining(batch_size=2, steps=2)
LABELS, OPEN = np.arange(NUM_PUBLIC) % CLASSES, OpenExamples(NUM_PUBLIC, 6)

METHODS = {
    "local_only": lambda e: local_only(GROUPS, TRAINING, execution=e),
    "fed_md": lambda e: fed_md(GROUPS, Alignment(LABELS, 6), CLASSES, execution=e),
    "fd": lambda e: fd(GROUPS, CLASSES, execution=e),
    "ds_fl": lambda e: ds_fl(GROUPS, DEEP, OPEN, TRAINING, execution=e),
    "fml": lambda e: fml(GROUPS, LINEAR, TRAINING, execution=e),
    "kt_pfl": lambda e: kt_pfl(GROUPS, OPEN, TRAINING, execution=e),
    "fed_proto": lambda e: fed_proto(GROUPS, CLASSES, TRAINING, execution=e),
    "fed_gh": lambda e: fed_gh(GROUPS, CLASSES, TRAINING, execution=e),
    "fed_tgp": lambda e: fed_tgp(GROUPS, CLASSES, TRAINING, execution=e),
    "fed_gen": lambda e: fed_gen(GROUPS, TRAINING, execution=e),
    "lg_fed_avg": lambda e: lg_fed_avg(GROUPS, TRAINING, execution=e),
    "fed_mrl": lambda e: fed_mrl(GROUPS, LINEAR, TRAINING, execution=e),
    "fed_l2g": lambda e: fed_l2g(GROUPS, CLASSES, TRAINING, quiz_size=2, execution=e),
    # Adam would make steps from the rounding of the biases' gradients.
    "fccl": lambda e: fccl(
        GROUPS, CLASSES, PublicBatches(NUM_PUBLIC, 4, optimizer=optax.sgd), TRAINING, execution=e
    ),
    "fed_kd_parties": lambda e: fed_kd_parties(GROUPS, LINEAR, DATA.columns, TRAINING, execution=e),
    "multi_headed_distillation": lambda e: multi_headed_distillation(
        HEADS, PUBLIC, EVERYBODY, 2, STEPS, HeadDistillation(batch_size=4), execution=e
    ),
    "decentralised_periodic_codistillation": lambda e: decentralised_periodic_codistillation(
        GROUPS, PublicAnswers(NUM_PUBLIC), 2, EVERYBODY, STEPS, execution=e
    ),
}


def last_state(algorithm, source):
    extra = dict.fromkeys(algorithm.data_set_sizes, PUBLIC)
    experiment = Experiment(algorithm, source(DATA, extra), {"train": DATA}, rounds=2)
    return run_experiment(experiment, show_progress=False).state


@pytest.mark.parametrize("name", METHODS)
def test_streamed_clients_side_by_side_are_resident_clients_in_turn(name):
    found, expected = (
        last_state(METHODS[name](execution), source)
        for execution, source in (
            (Execution("vmap", 2), StreamedData),
            (Execution("scan"), resident_data),
        )
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: close(np.asarray(a, float), np.asarray(b, float)), found, expected)
