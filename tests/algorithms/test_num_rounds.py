"""Algorithms with schedules know for how many rounds they were made, so that no run is longer."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.algorithms.graph import graphs

COLUMNS = {"image": np.zeros((8, 6), np.float32), "label": np.zeros(8, np.int32)}
STEPS = fc.StepTraining(steps=1, batch_size=2)
ROUNDS = 7


def network(heads=1):
    return fc.multi_headed(nn.Dense(5), jnp.zeros((1, 6)), 3, heads)


def plain():
    return fc.from_flax_linen(nn.Dense(3), jnp.zeros((1, 6)))


def averaging():
    return fc.fed_avg(plain(), fc.LocalTraining(optax.sgd, batch_size=2))


def groups(model=None):
    return {"net": fc.PartyGroup(model or network(), np.arange(4))}


def pools(first=None):
    both = {"one": first or averaging(), "two": averaging()}
    return {name: fc.Pool(method, np.arange(4), 2) for name, method in both.items()}


def by_parties(**options):
    student = fc.headed(nn.Dense(2), jnp.zeros((1, 6)), 3)
    return fc.fed_kd_parties(groups(student), student, COLUMNS, num_rounds=ROUNDS, **options)


WITH_SCHEDULE = {
    "periodic_codistillation": lambda: fc.periodic_codistillation(
        pools(), COLUMNS, 8, ROUNDS, period=2
    ),
    "merged_codistillation": lambda: fc.merged_codistillation(pools(), COLUMNS, 8, ROUNDS),
    "compressed": lambda: fc.independent_pools(
        pools(fc.compressed(averaging(), ROUNDS, fc.svd())), COLUMNS
    ),
    "the shorter of two": lambda: fc.merged_codistillation(
        pools(fc.compressed(averaging(), ROUNDS, fc.svd())), COLUMNS, 8, 2 * ROUNDS
    ),
    "fed_kd_parties": lambda: by_parties(downlink=fc.svd()),
    "local_only_steps": lambda: fc.local_only_steps(groups(), ROUNDS, STEPS),
    "centralised": lambda: fc.centralised(groups(), 8, ROUNDS, STEPS),
    "decentralised_fed_avg": lambda: fc.decentralised_fed_avg(groups(), ROUNDS, training=STEPS),
    "decentralised_periodic_codistillation": lambda: fc.decentralised_periodic_codistillation(
        groups(plain()), fc.PublicAnswers(8, 4), ROUNDS, graphs.complete(4), STEPS
    ),
    "multi_headed_distillation": lambda: fc.multi_headed_distillation(
        groups(), COLUMNS, graphs.complete(4), ROUNDS, STEPS
    ),
}
WITHOUT = {
    "fed_avg": lambda: fc.independent_pools(pools(), COLUMNS),
    "fetch_sgd": lambda: fc.independent_pools(
        pools(fc.fetch_sgd(plain(), fc.LocalTraining(), 5, 40, k=3)), COLUMNS
    ),
    "fed_kd_parties without compressors": by_parties,
}


@pytest.mark.parametrize("name", WITH_SCHEDULE)
def test_the_number_of_rounds_of_its_schedule(name):
    assert WITH_SCHEDULE[name]().num_rounds == ROUNDS


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_schedule_there_is_no_limit(name):
    assert WITHOUT[name]().num_rounds is None
