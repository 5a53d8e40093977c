"""Labels as integer classes, converted from the forms that data sets use."""

import jax
import jax.numpy as jnp

# The names under which `column_uses` finds the functions below in a traced function.
ONE_HOT = "class_of_one_hot"
CLICKS = "is_clicked"


def class_labels(
    labels: jax.Array, num_classes: int, rank: int = 1, name: str = "label"
) -> jax.Array:
    """Labels as whole numbers, one per example.

    Bool becomes 0 and 1. A last axis of length 1, as in Keras' CIFAR, is removed. One-hot vectors become
    their class. Whole numbers [batch] are returned unchanged.

    Args:
      labels: whole numbers or bool [batch] or [batch, 1], or one-hot [batch, num_classes] of any type;
        `check_experiment` checks on the data that these are one-hot.
      num_classes: the width of the network's outputs.
      rank: number of axes of integer labels: more than 1 if an example has several labels.
      name: the labels' column, for messages.

    Raises:
      ValueError: names the column, if labels have another shape or type.
    """
    if labels.ndim == rank + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif labels.ndim == rank + 1 and labels.shape[-1] == num_classes:
        labels = class_of_one_hot(labels)
    if labels.dtype == bool:
        labels = labels.astype(jnp.int32)
    if labels.ndim != rank or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"column {name!r} must have labels that are whole numbers [batch], or one-hot [batch, "
            f"{num_classes}] as there are outputs, got {labels.dtype} {list(labels.shape)}."
        )
    return labels


@jax.jit
def class_of_one_hot(vectors: jax.Array) -> jax.Array:
    """The class of one-hot vectors [..., classes]."""
    return jnp.argmax(vectors, axis=-1).astype(jnp.int32)


@jax.jit
def is_clicked(labels: jax.Array) -> jax.Array:
    """Which labels [..., candidates] are 1; others are 0, or -1 for padding."""
    return labels == 1
