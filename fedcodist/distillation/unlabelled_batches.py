"""Batches of unlabelled examples: which ones a step reads, mixup, and each device's part of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import batches, keys
from fedcodist.core.devices import this_device
from fedcodist.core.inputs import Examples
from fedcodist.core.shuffling import permuted_positions, stream_positions
from fedcodist.data import augmentation
from fedcodist.distillation.settings import Distillation

UNLABELLED = "unlabelled"  # the data set
LABEL = "label"  # its column of labels, for `label_teacher`
# Columns that mixup adds for the labels: those of the partners, and the share of the batch's own.
PARTNER_LABEL, OWN_SHARE = "partner_label", "own_share"


class Mixing(NamedTuple):
    """What mixup draws for a batch, or for this device's part of it.

    Attributes:
      partners: int32 [part], positions in the whole batch of the examples that are mixed in.
      coefficient: the share of the batch's own examples.
    """

    partners: jax.Array
    coefficient: jax.Array


def unlabelled_indices(
    key: jax.Array, index: jax.Array, distillation: Distillation, num_unlabelled: int
) -> jax.Array:
    """Indices of the unlabelled examples of distillation number `index`, int32 [steps, batch_size].

    The unlabelled data are one endless reshuffled stream over the whole run: a distillation continues
    where the previous one stopped.
    """
    size = distillation.steps * distillation.batch_size
    start = jnp.asarray(index, jnp.uint32) * size
    indices = stream_positions(keys.derive(key, "unlabelled"), start, size, num_unlabelled)
    return indices.reshape(distillation.steps, distillation.batch_size)


def batches_of_steps(
    unlabelled: Examples, key: jax.Array, settings: Distillation, axis_name: str | None
) -> Callable[[jax.Array], tuple[dict[str, jax.Array], jax.Array]]:
    """The function step's index -> `batch_of_step`; `key` is the distillation's.

    It draws what mixup needs for all steps at once. The draws are loops of unknown length, and within a
    step a GPU waits at each of their turns until the host has read whether there is another one.
    """
    step_key = lambda index: keys.derive(key, index)
    drawn = None
    if settings.mixup_beta > 0:
        steps = jnp.arange(settings.steps)
        drawn = jax.vmap(lambda index: mixing_of_step(step_key(index), settings, axis_name))(steps)

    def batch_at(index: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        mixing = jax.tree.map(lambda leaf: leaf[index], drawn)
        return batch_of_step(unlabelled, index, step_key(index), settings, axis_name, mixing)

    return batch_at


def mixing_of_step(key: jax.Array, settings: Distillation, axis_name: str | None) -> Mixing:
    """Draws a step's partners and coefficient; `key` is the step's."""
    # Partners come from the whole batch, not from this device's part of it.
    positions, _ = _positions(settings.batch_size, axis_name)
    return Mixing(
        permuted_positions(keys.derive(key, "partner"), positions, settings.batch_size),
        augmentation.mixup_coefficient(keys.derive(key, "mixup"), settings.mixup_beta),
    )


def batch_of_step(
    unlabelled: Examples,
    index: jax.Array,
    key: jax.Array,
    settings: Distillation,
    axis_name: str | None,
    mixing: Mixing | None = None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """This device's part of a step's batch, preprocessed and mixed, and its mask [part].

    Without `mixing`, mixup draws it from the step's key.
    """
    positions, mask = _positions(settings.batch_size, axis_name)

    def part(positions: jax.Array) -> dict[str, jax.Array]:
        indices, input_key = unlabelled.indices[index][positions], keys.derive(key, "input")
        return batches.read(unlabelled.columns, indices, settings.preprocess, input_key, positions)

    batch = part(positions)
    if settings.mixup_beta > 0:
        if settings.inputs not in batch:
            raise ValueError(
                f"the data of a distillation must have the column {settings.inputs!r}, which mixup "
                f"mixes (distillation.inputs), they have {sorted(batch)} after preprocessing."
            )
        if not jnp.issubdtype(batch[settings.inputs].dtype, jnp.floating):
            raise ValueError(
                f"distillation.mixup_beta must be 0 for {settings.inputs!r}, which are "
                f"{batch[settings.inputs].dtype} and cannot be mixed, got {settings.mixup_beta}."
            )
        if mixing is None:
            mixing = mixing_of_step(key, settings, axis_name)
        partners, coefficient = mixing
        coefficient = coefficient.astype(batch[settings.inputs].dtype)
        partner = part(partners)
        mixed = augmentation.mixup(batch[settings.inputs], partner[settings.inputs], coefficient)
        if LABEL in batch:
            own_share = jnp.full(len(mask), coefficient)
            batch = {**batch, PARTNER_LABEL: partner[LABEL], OWN_SHARE: own_share}
        batch = {**batch, settings.inputs: mixed}
    return batch, mask


def _positions(batch_size: int, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
    """Positions of this device's part in a batch, the last one for padding, and its mask, [part]."""
    first, share = part_of_batch(batch_size, axis_name)
    positions = first + jnp.arange(share)
    return jnp.minimum(positions, batch_size - 1), (positions < batch_size).astype(jnp.float32)


def part_of_batch(batch_size: int, axis_name: str | None) -> tuple[jax.Array, int]:
    """This device's first position in a batch, which may lie beyond it, and how many it takes."""
    devices, device = this_device(axis_name)
    share = -(-batch_size // devices)
    return device * share, share
