"""Networks of several outputs take losses and metrics of logits, and any column of inputs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.models.exits import Exits, with_exits
from fedcodist.models.multi_headed import main_head_only

EXAMPLE, CLASSES = jnp.zeros((1, 4)), 3
GENERATOR = np.random.default_rng(0)
BATCH = {
    "pixels": jnp.asarray(GENERATOR.normal(size=(5, 4)), jnp.float32),
    "label": jnp.asarray(GENERATOR.integers(0, CLASSES, 5)),
}


def squared(logits, batch):
    return jnp.sum((logits - jax.nn.one_hot(batch["label"], CLASSES)) ** 2, axis=-1)


def highest(logits, batch):
    return jnp.max(logits, axis=-1), jnp.ones(len(logits))


TOTAL = SummedMetric(
    lambda logits, batch: {"total": jnp.sum(logits, -1)}, lambda sums: sums["total"]
)
OPTIONS = dict(inputs="pixels", loss=squared, metrics={"highest": highest, "total": TOTAL})
# name -> (options -> Model, outputs -> the logits that its loss reads)
NETWORKS = {
    "headed": (
        lambda **options: fc.headed(nn.Dense(6), EXAMPLE, CLASSES, **options),
        lambda outputs: outputs.logits,
    ),
    "with_exits": (
        lambda **options: with_exits(
            Exits([nn.Dense(6), nn.Dense(5)], CLASSES), EXAMPLE, **options
        ),
        lambda outputs: outputs.logits,
    ),
    "multi_headed": (
        lambda **options: fc.multi_headed(nn.Dense(6), EXAMPLE, CLASSES, 2, **options),
        lambda outputs: outputs.logits[:, 0],
    ),
    "main_head_only": (
        lambda **options: main_head_only(
            fc.multi_headed(nn.Dense(6), EXAMPLE, CLASSES, 2, **options)
        ),
        lambda outputs: outputs,
    ),
}
EACH = pytest.mark.parametrize("name", NETWORKS)


@EACH
def test_a_loss_and_metrics_get_the_logits_and_inputs_may_have_another_name(name):
    make, logits_of = NETWORKS[name]
    model = make(**OPTIONS)
    outputs = model.outputs(model.init(jax.random.key(0)), BATCH)
    logits = logits_of(outputs)
    assert logits.shape == (5, CLASSES) and model.inputs == ("pixels",)
    np.testing.assert_array_equal(model.loss(outputs, BATCH), squared(logits, BATCH))
    np.testing.assert_array_equal(
        model.metrics["highest"](outputs, BATCH)[0], highest(logits, BATCH)[0]
    )
    np.testing.assert_array_equal(
        model.metrics["total"].sums(outputs, BATCH)["total"], jnp.sum(logits, -1)
    )
    further = {"accuracy_head_1", "accuracy_head_2"} if name == "multi_headed" else set()
    assert set(model.metrics) == {"highest", "total"} | further


@EACH
def test_the_default_is_cross_entropy_and_accuracy(name):
    make, logits_of = NETWORKS[name]
    model = make(inputs="pixels")
    outputs = model.outputs(model.init(jax.random.key(0)), BATCH)
    logits, labels = logits_of(outputs), BATCH["label"]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(model.loss(outputs, BATCH), expected, rtol=1e-6)
    right, _ = model.metrics["accuracy"](outputs, BATCH)
    np.testing.assert_array_equal(right, jnp.argmax(logits, -1) == labels)


@EACH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 3.0}, "loss must be a function"),
        ({"metrics": [highest]}, "metrics must be statistics by name"),
    ],
)
def test_what_is_no_loss_and_no_metrics_is_named(name, options, message):
    with pytest.raises(TypeError, match=message):
        NETWORKS[name][0](**options)
