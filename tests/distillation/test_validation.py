"""Accuracy on validation data, counted by hand and by several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from linear_model import linear_model

from fedcodist.core.inputs import Examples
from fedcodist.core.model import Variables
from fedcodist.distillation.validation import (
    ValidationData,
    validation_accuracy,
    validation_indices,
)

# The model's logits are the images: of 11 examples, the 4 at these places are labelled wrongly.
WRONG = [1, 4, 5, 9]
LABELS = np.arange(11) % 3
IMAGES = np.eye(3, dtype=np.float32)[LABELS]
LABELS[WRONG] = (LABELS[WRONG] + 1) % 3


def measured(axis_name=None, weights=jnp.eye(3)):
    data = ValidationData(11, batch_size=4)
    columns = {"image": jnp.asarray(IMAGES), "label": jnp.asarray(LABELS, jnp.int32)}
    return validation_accuracy(
        linear_model(3, 3),
        Variables({"w": weights}, {}),
        Examples(columns, validation_indices(data)),
        data,
        axis_name,
    )


def test_the_accuracy_is_the_share_of_right_labels():
    """Batches of 4, 4 and 3: the example that fills up the last one counts once."""
    assert float(jax.jit(measured)()) == pytest.approx(7 / 11)


def test_a_model_of_nans_labels_nothing_rightly():
    """And not those examples that are of the first class, or a diverged model could be the best."""
    assert float(measured(weights=jnp.full((3, 3), jnp.nan))) == 0


def test_devices_share_the_batches_and_agree():
    """The first device has two of the three batches, the second has one."""
    shared = jax.shard_map(
        lambda: measured("devices")[None],
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",)),
        in_specs=(),
        out_specs=PartitionSpec("devices"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(shared)(), [7 / 11, 7 / 11], rtol=1e-6)
