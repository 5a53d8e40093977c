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
from fedcodist.run.metrics_lines import evaluation_records

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


GRADED = np.arange(20, dtype=np.int32) % 4


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x), nn.Dense(5)(x)


def right(is_right):
    return lambda outputs, batch: (is_right(outputs, batch["label"]), jnp.ones(len(batch["label"])))


def without(unlabelled, statistic):
    return lambda outputs, batch: (
        statistic(outputs, batch)[0],
        batch["label"] != unlabelled,
    )


ordinal = right(lambda outputs, label: (outputs > 0).sum(-1) == label)
fine = right(lambda outputs, label: outputs[1].argmax(-1) == label)


@pytest.mark.parametrize(
    ("network", "accuracy", "label", "is_written"),
    [
        (nn.Dense(3), ordinal, GRADED, False),
        (nn.Dense(3), ordinal, GRADED - 1, False),
        (nn.Dense(3), ordinal, GRADED % 3, True),
        (nn.Dense(3), without(3, ordinal), GRADED, True),
        (Heads(), fine, LABEL % 5, False),
        (Heads(), fine, LABEL % 2, True),
        (nn.Dense(256), own("label"), LABEL.astype(np.uint8), True),
    ],
    ids=[
        "a grade more than outputs",
        "a negative label",
        "as many grades",
        "the last one has no weight",
        "the larger head",
        "two labels",
        "labels of 8 bits",
    ],
)
def test_no_labels_are_missing_in_the_lines(network, accuracy, label, is_written):
    """An own accuracy may read labels for which the network, or its first head, has no output."""
    model = fc.from_flax_linen(
        network,
        jnp.zeros((1, 4)),
        loss=lambda o, b: 0.0 * b["image"][:, 0],
        metrics={"accuracy": accuracy},
    )
    columns = {"image": COLUMNS["image"], "label": label}
    split = evaluation_split(fc.FederatedData.from_arrays(columns, offsets=[0, 8, 20]))
    variables = model.init(jax.random.key(0))
    predictor = single_model(model, lambda state: state)
    evaluated = jax.jit(lambda *given: evaluate(predictor, *given, 7, UNCHANGED, None))(
        variables, split
    )
    of_seed = {name: np.asarray(values)[None] for name, values in evaluated.items()}
    (line,) = evaluation_records(1, {"test": {"model": of_seed}}, np.arange(1))
    assert "accuracy" in line and ("per_label_accuracy" in line) == is_written
    if is_written:
        values = np.asarray(accuracy(model.apply(variables, columns)[0], columns)[0])
        expected = [
            values[label == one].mean() if one in label else np.nan
            for one in range(model.num_classes)
        ]
        found = np.array(line["per_label_accuracy"], float)  # null as NaN
        np.testing.assert_allclose(found, expected, rtol=1e-6)
