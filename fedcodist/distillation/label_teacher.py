"""Labels as a teacher, for distillation on labelled examples."""

import jax
import jax.numpy as jnp

from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.readout import Readout
from fedcodist.data import augmentation
from fedcodist.distillation.loop import Teacher
from fedcodist.distillation.unlabelled_batches import LABEL, OWN_SHARE, PARTNER_LABEL, UNLABELLED


def label_teacher(model: Model, variables: Variables) -> Teacher:
    """A teacher that returns the examples' labels, such as those of a labelled distillation set.

    It returns one-hot labels [batch, classes], mixed as mixup mixes the inputs. If the model returns a
    Readout, it returns the labels of all positions, int [batch, positions], since one-hot vectors would
    be as large as the logits: see `label_targets`.

    Args:
      model, variables: any of the models, from which the number of classes follows.

    Raises:
      ValueError: names the column, if a batch has no labels or labels of another form.
    """

    def answer(batch: Batch) -> jax.Array:
        if LABEL not in batch:
            raise ValueError(
                f"data set {UNLABELLED!r} must have a column {LABEL!r} for targets with labels, it has "
                f"{sorted(batch)}."
            )
        outputs = jax.eval_shape(lambda: logits_of(model.apply(variables, batch)[0]))
        if isinstance(outputs, Readout):
            return batch[LABEL]
        classes = outputs.shape[-1]
        one_hot = lambda name: label_targets(class_labels(batch[name], classes, name=name), classes)
        if PARTNER_LABEL not in batch:
            return one_hot(LABEL)
        share = batch[OWN_SHARE][:, None]
        return augmentation.mixup(one_hot(LABEL), one_hot(PARTNER_LABEL), share)

    return answer


def label_targets(labels: jax.Array, classes: int) -> jax.Array:
    """Target probabilities [..., classes] from the outputs of `label_teacher`."""
    if jnp.issubdtype(labels.dtype, jnp.integer):
        return jax.nn.one_hot(labels, classes)
    return labels
