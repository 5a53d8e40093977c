"""Accuracies among the examples of each label, by the column that the accuracy reads."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedcodist as fc
from fedcodist.core import metrics
from fedcodist.core.method import single_model
from fedcodist.run.evaluation import evaluate, evaluation_split

pytestmark = pytest.mark.usefixtures("compile_quickly")

DRAW = np.random.default_rng(0)
LABEL = np.arange(20, dtype=np.int32) % 9
COLUMNS = {
    "image": DRAW.normal(size=(20, 4)).astype(np.float32),
    "label": LABEL,
    "coarse": LABEL // 3,
}
UNCHANGED = lambda batch, key, positions: batch
RENAMED = lambda batch, key, positions: {"image": batch["image"], "y": batch["label"] // 3}


def own(column):
    """An accuracy as a user writes it."""
    return lambda outputs, batch: (
        (outputs.argmax(-1) == batch[column]).astype(jnp.float32),
        jnp.ones(len(outputs)),
    )


def near(outputs, batch):
    return jnp.abs(outputs[:, 0] - batch["label"]) < 4.0, jnp.ones(len(outputs))


def plain(classes, accuracy):
    return fc.from_flax_linen(
        nn.Dense(classes), jnp.zeros((1, 4)), loss=zeros, metrics={"accuracy": accuracy}
    )


def headed(classes, accuracy):
    return fc.headed(
        nn.Dense(4), jnp.zeros((1, 4)), classes, loss=zeros, metrics={"accuracy": accuracy}
    )


def zeros(outputs, batch):
    return jnp.zeros(len(outputs))


@pytest.mark.parametrize(
    ("make", "classes", "accuracy", "preprocess", "labels"),
    [
        (plain, 9, metrics.accuracy(), UNCHANGED, LABEL),
        (plain, 3, metrics.accuracy("coarse"), UNCHANGED, LABEL // 3),
        (headed, 3, metrics.accuracy("coarse"), UNCHANGED, LABEL // 3),
        (plain, 3, metrics.top_k(2, "coarse"), UNCHANGED, LABEL // 3),
        (plain, 3, metrics.accuracy("y"), RENAMED, LABEL // 3),
        (plain, 1, metrics.of_one_logit(metrics.accuracy("two")), UNCHANGED, LABEL % 2),
        (plain, 9, own("label"), UNCHANGED, LABEL),
        (plain, 3, own("coarse"), UNCHANGED, None),
        (plain, 3, own("y"), RENAMED, None),
        (plain, 1, near, UNCHANGED, None),
    ],
    ids=[
        "label",
        "coarse",
        "headed",
        "top_2",
        "renamed",
        "one_logit",
        "own",
        "own_of_coarse",
        "own_renamed",
        "own_of_one_output",
    ],
)
def test_examples_are_grouped_by_the_labels_of_the_accuracy(
    make, classes, accuracy, preprocess, labels
):
    model = make(classes, accuracy)
    columns = {**COLUMNS, "two": LABEL % 2}
    variables = model.init(jax.random.key(0))
    split = evaluation_split(fc.FederatedData.from_arrays(columns, offsets=[0, 8, 20]))
    predictor = single_model(model, lambda state: state)
    measure = jax.jit(lambda *given: evaluate(predictor, *given, 7, preprocess, None))
    evaluated = measure(variables, split)
    assert ("accuracy_per_label" in evaluated) == (labels is not None)
    if labels is None:
        return
    batch = preprocess({name: jnp.asarray(column) for name, column in columns.items()}, None, None)
    outputs, _ = model.apply(variables, batch)
    right = np.asarray(accuracy(outputs if make is plain else outputs.logits, batch)[0])
    expected = [right[labels == label].mean() for label in range(max(classes, 2))]
    np.testing.assert_allclose(evaluated["accuracy_per_label"], expected, rtol=1e-6)
