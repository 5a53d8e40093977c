"""Sums per label of a party's own examples, which a party with few examples gets in few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.algorithms.parties.own_examples import LEAST_STEPS, label_sums
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Model, Variables

CAPACITY, CLASSES = 80, 3
IMAGES = np.random.default_rng(0).normal(size=(100, CLASSES)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, CLASSES, 100)


def test_another_partys_example_that_overflows_changes_nothing():
    images = IMAGES.copy()
    images[14:] = np.inf
    model = Model(None, lambda variables, batch, **_: (batch["image"], {}), None, {}, CLASSES)
    columns = {"image": jnp.asarray(images), "label": jnp.asarray(LABELS)}
    data = ClientData(columns, jnp.int32(11), jnp.int32(3), jnp.int32(3), CAPACITY, ragged=False)
    unchanged = lambda batch, key, positions: batch
    sums, _ = label_sums(model, Variables({}, {}), data, CLASSES, unchanged, 500, logits_of)
    np.testing.assert_allclose(sums.sum(0), IMAGES[11:14].sum(0), atol=1e-5)


@pytest.mark.parametrize(("size", "batch_size"), [(3, 500), (80, 500), (29, 7), (0, 500)])
def test_sums_of_few_examples_in_small_steps(size, batch_size):
    steps = []

    def watched(batch, key, positions):
        jax.debug.callback(lambda places: steps.append(len(places)), positions)
        return {"image": batch["image"], "label": batch["fine"] // 2}

    model = Model(None, lambda variables, batch, **_: (batch["image"], {}), None, {}, CLASSES)
    start, count = jnp.int32(11), jnp.int32(size)
    columns = {"image": jnp.asarray(IMAGES), "fine": jnp.asarray(2 * LABELS + 1)}
    data = ClientData(columns, start, count, count, CAPACITY, ragged=False)
    sums, counts = jax.jit(
        lambda: label_sums(model, Variables({}, {}), data, CLASSES, watched, batch_size, logits_of)
    )()
    jax.effects_barrier()
    own = slice(11, 11 + size)
    for label in range(CLASSES):
        is_of_label = LABELS[own] == label
        np.testing.assert_allclose(sums[label], IMAGES[own][is_of_label].sum(0), atol=1e-5)
        assert counts[label] == is_of_label.sum()
    step = min(batch_size, CAPACITY // LEAST_STEPS)
    assert steps == [step] * -(-size // step)
