"""FedKD's losses: teacher and student learn from each other's outputs, hidden states and attention."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core.example_losses import checked_loss
from fedcodist.core.layer_outputs import LayerOutputs, as_layers
from fedcodist.core.model import Batch, Model, in_float32


class MutualLosses(NamedTuple):
    """How teacher and student learn from each other; by default the paper's formulas, read literally.

    Attributes:
      adaptive: how to compute the divisor D = L_t^task + L_s^task of L^d and L^h: 'batch' from the mean
        losses over the batch (as the authors' code), 'sample' from each example's losses; 'none': D = 1.
      kl_reduction: 'batchmean' sums L^d over classes, 'elementmean' averages it (the code).
      hidden_map: 'learned' is one linear map W^h per aligned layer, the same for all inputs that the
        layer reads, from the student's hidden states to the teacher's; 'identity' is no map (the code).
      detach_targets: whether a model gets only the gradient of its own loss, L_t or L_s. If false, it
        gets that of L_t + L_s, so also the gradient as the other's target, and L^h twice (the code).
      detach_normaliser: whether D gets no gradient. Read literally, the formula gives D one; the paper
        does not say so. The gradient of the task's loss in L_t = L_t^task + (L^d + L^h) / D is then
        multiplied by

            1 - (L^d + L^h) / D^2,

        where L^d and L^h include their weights. The same holds for L_s. (Without `detach_targets`, the
        factor has both models' L^d and L^h.) The factor is negative while the two models disagree by
        more than D^2: training then increases the task's loss.
      without_padding: whether distances of hidden states and attention maps are means over real tokens
        only. If false, padding counts too, as in the authors' code. The networks must return which
        tokens are real (`LayerOutputs.is_real`).
    """

    adaptive: str = "batch"
    kl_reduction: str = "batchmean"
    hidden_map: str = "learned"
    detach_targets: bool = True
    detach_normaliser: bool = False
    without_padding: bool = False


class Outputs(NamedTuple):
    """The outputs of teacher and student, and W^h; mask [batch] is 1 for real examples."""

    teacher: LayerOutputs
    student: LayerOutputs
    maps: list[jax.Array]
    mask: jax.Array


class Losses(NamedTuple):
    """L_t and L_s per example, [batch] each."""

    teacher: jax.Array
    student: jax.Array


def mutual_losses(
    teacher: Model, student: Model, mutual: MutualLosses, output_weight: Any, hidden_weight: Any
) -> Callable[[Outputs, Batch], Losses]:
    """Returns (outputs, batch) -> Losses, whose sum has the gradients that `mutual` asks for.

    Args:
      teacher, student: the models, whose task losses are used.
      mutual: how they learn from each other.
      output_weight, hidden_weight: of L^d and L^h; may be traced.
    """

    def losses(
        of_teacher: Any, of_student: Any, maps: list[jax.Array], mask: jax.Array, batch: Batch
    ) -> Losses:
        task = Losses(
            checked_loss(teacher.loss, of_teacher, batch),
            checked_loss(student.loss, of_student, batch),
        )
        # Models are compared in float32, also where their networks return 16 bits.
        of_teacher, of_student = (
            jax.tree.map(in_float32, as_layers(outputs)) for outputs in (of_teacher, of_student)
        )
        weight = 1 / normaliser(task, mask, mutual)
        log_teacher, log_student = (
            jax.nn.log_softmax(layers.logits) for layers in (of_teacher, of_student)
        )
        divergence = optax.losses.kl_divergence_with_log_targets  # of predictions from targets
        of_output = output_weight * weight
        if mutual.kl_reduction == "elementmean":
            of_output /= log_teacher.shape[-1]
        distance = hidden_distance(of_teacher, of_student, maps, mutual.without_padding)
        hidden = hidden_weight * weight * distance
        return Losses(
            task.teacher + of_output * divergence(log_teacher, log_student) + hidden,
            task.student + of_output * divergence(log_student, log_teacher) + hidden,
        )

    def both(outputs: Outputs, batch: Batch) -> Losses:
        of_teacher, of_student, maps, mask = outputs
        if not mutual.detach_targets:
            return losses(of_teacher, of_student, maps, mask, batch)
        fixed_teacher, fixed_student, fixed_maps, _ = jax.lax.stop_gradient(outputs)
        return Losses(
            losses(of_teacher, fixed_student, maps, mask, batch).teacher,
            losses(fixed_teacher, of_student, fixed_maps, mask, batch).student,
        )

    return both


def normaliser(task: Losses, mask: jax.Array, mutual: MutualLosses) -> jax.Array:
    """D, a scalar or [batch]: the two task losses' sum, at least 1e-8."""
    total = task.teacher + task.student
    if mutual.adaptive == "none":
        return jnp.ones((), total.dtype)
    if mutual.adaptive == "batch":
        total = jnp.sum(total * mask) / jnp.maximum(jnp.sum(mask), 1)
    total = jnp.maximum(total, 1e-8)
    return jax.lax.stop_gradient(total) if mutual.detach_normaliser else total


def hidden_distance(
    of_teacher: LayerOutputs,
    of_student: LayerOutputs,
    maps: list[jax.Array],
    without_padding: bool = False,
) -> jax.Array:
    """L^h before division by D, per example: a mean over each layer's elements, summed over layers.

    With `without_padding` the means are over elements of real tokens only, see `of_teacher.is_real`.
    """
    distance = jnp.zeros(of_teacher.logits.shape[:1], of_teacher.logits.dtype)
    real = jax.tree.leaves(of_teacher.is_real) if without_padding else itertools.repeat(None)
    pairs = aligned("hidden states", of_teacher.hidden, of_student.hidden)
    for index, layers in enumerate(pairs):
        inputs = by_input("hidden states", *layers)
        for (target, state), is_real in zip(inputs, real, strict=False):
            mask = None if is_real is None else is_real[..., None]
            distance += _mean_square(target - (state @ maps[index] if maps else state), mask)
    if of_teacher.attention and of_student.attention:
        for layers in aligned("attention maps", of_teacher.attention, of_student.attention):
            inputs = by_input("attention maps", *layers)
            for (target, state), is_real in zip(inputs, real, strict=False):
                if target.shape[1] != state.shape[1]:
                    target, state = (maps.mean(axis=1, keepdims=True) for maps in (target, state))
                mask = None
                if is_real is not None:  # a real token's attention to a real token
                    mask = (is_real[..., :, None] & is_real[..., None, :])[:, None]
                distance += _mean_square(target - state, mask)
    return distance


def aligned(
    what: str, of_teacher: tuple[Any, ...], of_student: tuple[Any, ...]
) -> list[tuple[Any, Any]]:
    """Pairs (teacher's, student's) of aligned layers: of L and m layers, the l L/m-th and the l-th.

    Raises:
      ValueError: m does not divide L, or only one of the models has layers.
    """
    if not of_teacher and not of_student:
        return []
    if not of_student or not of_teacher or len(of_teacher) % len(of_student):
        raise ValueError(
            f"student's number of layers with {what} must divide the teacher's {len(of_teacher)}, got "
            f"{len(of_student)}."
        )
    step = len(of_teacher) // len(of_student)
    return list(zip(of_teacher[step - 1 :: step], of_student, strict=True))


def by_input(what: str, of_teacher: Any, of_student: Any) -> list[tuple[Any, Any]]:
    """Pairs (teacher's, student's) of outputs of two aligned layers, one for each input that they read.

    Raises:
      ValueError: one of the layers reads more inputs than the other.
    """
    of_teacher, of_student = jax.tree.leaves(of_teacher), jax.tree.leaves(of_student)
    if len(of_teacher) != len(of_student):
        raise ValueError(
            f"student must have {what} for as many inputs as the teacher, {len(of_teacher)}, got "
            f"{len(of_student)}."
        )
    return list(zip(of_teacher, of_student, strict=True))


def _mean_square(difference: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean square per example. A bool mask is broadcast to the difference; an empty one gives 0."""
    axes = tuple(range(1, difference.ndim))
    if mask is None:
        return jnp.mean(difference**2, axis=axes)
    counts = jnp.broadcast_to(mask, difference.shape).astype(difference.dtype)
    total = jnp.sum(difference**2 * counts, axis=axes)
    return total / jnp.maximum(jnp.sum(counts, axis=axes), 1)
