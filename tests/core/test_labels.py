"""Labels in other plain forms are read as whole numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.labels import class_labels
from fedcodist.core.metrics import accuracy, f_score, precision, recall
from fedcodist.core.model import cross_entropy

OUTPUTS = jax.random.normal(jax.random.key(0), (12, 3))
LABELS = np.arange(12) % 3
FORMS = {
    "[rows, 1]": lambda labels, classes: labels[:, None],
    "uint8": lambda labels, classes: labels.astype(np.uint8),
    "one-hot floats": lambda labels, classes: np.eye(classes, dtype=np.float32)[labels],
    "one-hot bool": lambda labels, classes: np.eye(classes, dtype=bool)[labels],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("measure", [cross_entropy, accuracy(), precision(), recall(), f_score(2)])
def test_loss_and_metrics_are_those_of_whole_numbers(measure, form):
    expected = measure(OUTPUTS, {"label": jnp.asarray(LABELS)})
    found = measure(OUTPUTS, {"label": jnp.asarray(FORMS[form](LABELS, 3))})
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_bool_is_0_and_1():
    expected = cross_entropy(OUTPUTS, {"label": jnp.asarray(LABELS > 1).astype(jnp.int32)})
    found = cross_entropy(OUTPUTS, {"label": jnp.asarray(LABELS > 1)})
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "labels", [jnp.zeros((4, 2), jnp.int32), jnp.zeros(4), jnp.zeros((4, 1)), jnp.zeros((4, 1, 1))]
)
def test_other_labels_are_refused(labels):
    with pytest.raises(
        ValueError, match=r"^column 'label' must have labels that are whole numbers"
    ):
        class_labels(labels, 3)


def test_precision_and_recall_are_numpy_s():
    predicted = np.argmax(OUTPUTS, -1)
    for statistic, counted in ((precision(1), predicted == 1), (recall(1), LABELS == 1)):
        values, weights = statistic(OUTPUTS, {"label": jnp.asarray(LABELS)})
        expected = np.mean((predicted == LABELS)[counted])
        np.testing.assert_allclose(jnp.sum(values) / jnp.sum(weights), expected, rtol=1e-6)


def test_a_class_without_an_output_has_no_precision():
    with pytest.raises(ValueError, match=r"^positive must be one of the classes 0 to 2, got 3\.$"):
        precision(3)(OUTPUTS, {"label": jnp.asarray(LABELS)})
