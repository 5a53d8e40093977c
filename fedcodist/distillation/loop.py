"""Distillation: the loop in which students learn from teachers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedcodist.core import keys
from fedcodist.core.checks import check_function
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.input_types import note_inputs
from fedcodist.core.inputs import Examples
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.padding_checks import check_dealt_batches
from fedcodist.core.readout import Readout, total_in_chunks
from fedcodist.core.shape_checks import described
from fedcodist.distillation.divergences import check_classes
from fedcodist.distillation.settings import Distillation, divergence_of
from fedcodist.distillation.unlabelled_batches import batches_of_steps, part_of_batch

PyTree = Any
# A frozen model, or an ensemble of them, in evaluation mode: batch -> outputs.
Teacher = Callable[[Batch], Any]
# (student's name, every teacher's outputs on a batch) -> target probabilities, or with an `outputs_of`
# of one's own whatever the divergence reads
Targets = Callable[[str, Mapping[str, Any]], Any]
# (what `outputs_of` keeps of a student's outputs, target) -> divergence per example
Comparison = Callable[[Any, Any], jax.Array]
# The carry of a distillation's steps: (students, states of their optimizers).
DistillationCarry = tuple[dict[str, Variables], dict[str, PyTree]]


class Distilled(NamedTuple):
    """The students after distillation, and their losses in the first and the last step.

    The losses are NaN without steps.
    """

    students: dict[str, Variables]
    first_loss: dict[str, jax.Array]
    last_loss: dict[str, jax.Array]


def distill(
    models: Mapping[str, Model],
    students: Mapping[str, Variables],
    teachers: Mapping[str, Teacher],
    targets: Targets,
    unlabelled: Examples,
    key: jax.Array,
    learning_rates: Mapping[str, Any],
    settings: Distillation,
    axis_name: str | None = None,
    divergence: Comparison | None = None,
    outputs_of: Callable[[Any], Any] = logits_of,
) -> Distilled:
    """Trains every student towards soft targets that are computed from the teachers' outputs.

    All students get the same augmented batches, so a teacher is evaluated once per batch for all its
    students. Students are in training mode; teachers get no gradient. If networks return a
    `fedcodist.core.readout.Readout`, the loss is the mean over all positions of the batch that count,
    and logits are computed chunk by chunk. With `axis_name`, each device handles its part of every
    batch, and one all-reduce per step sums the gradients of all students.

    Args:
      models: student's name -> its model.
      students: name -> variables from which the student starts.
      teachers: name -> frozen teacher, such as a student's model before distillation.
      targets: (student's name, teachers' outputs) -> probabilities [batch, classes].
      unlabelled: columns, and the indices of each step's batch, int32 [steps, batch_size].
      key: drives augmentation, mixup and dropout.
      learning_rates: student's name -> learning rate, may be traced.
      settings: steps, batch size, optimizer and augmentation.
      axis_name: mesh axis whose devices share the batch, or None.
      divergence: of a student's logits from its target, [batch]; by default `divergence_of(settings)`.
      outputs_of: what a student's outputs are compared by; by default its logits. Another function may
        keep hidden layers too, such as the embedding of networks of `headed`. Then `targets` may return
        any pytree, and `divergence`, which must be given, gets (outputs_of(student's outputs), target).

    Raises:
      ValueError: there are no students or teachers, or a student's outputs, a divergence or a setting of
        mixup do not fit.
    """
    start, step = distillation_loop(
        models,
        students,
        teachers,
        targets,
        unlabelled,
        key,
        learning_rates,
        settings,
        axis_name,
        divergence,
        outputs_of,
    )
    if settings.steps == 0:
        nothing = {name: jnp.full((), jnp.nan) for name in students}
        return Distilled(dict(students), nothing, nothing)
    (trained, _), losses = jax.lax.scan(step, start, jnp.arange(settings.steps))
    first, last = ({name: by_step[index] for name, by_step in losses.items()} for index in (0, -1))
    return Distilled(agree_on_mutable(trained, settings.batch_size, axis_name), first, last)


def distillation_loop(
    models: Mapping[str, Model],
    students: Mapping[str, Variables],
    teachers: Mapping[str, Teacher],
    targets: Targets,
    unlabelled: Examples,
    key: jax.Array,
    learning_rates: Mapping[str, Any],
    settings: Distillation,
    axis_name: str | None = None,
    divergence: Comparison | None = None,
    outputs_of: Callable[[Any], Any] = logits_of,
) -> tuple[
    DistillationCarry,
    Callable[[DistillationCarry, jax.Array], tuple[DistillationCarry, dict[str, jax.Array]]],
]:
    """The loop of `distill`, for callers that run its steps themselves.

    Returns:
      (start, step): the initial carry (students, states of their optimizers), and
      step(carry, index) -> (carry, student's name -> loss).
    """
    for argument, given in (("students", students), ("teachers", teachers)):
        if settings.steps and not given:
            raise ValueError(f"{argument} must name at least one, got none.")
    chex.assert_shape(unlabelled.indices, (settings.steps, settings.batch_size))
    _check_mixed_column(models, settings)
    check_function("outputs_of", outputs_of, ("outputs",), "what divergence compares")
    if divergence is None and outputs_of is not logits_of:
        raise ValueError(
            "divergence must be given with outputs_of, got None: those of the settings compare logits."
        )
    optimizers = {name: settings.optimizer(learning_rates[name]) for name in students}
    # Devices must not use the same dropout for their parts, so dropout depends on their number.
    devices, device = this_device(axis_name)
    loss_of = divergence or divergence_of(settings)
    batch_at = batches_of_steps(unlabelled, key, settings, axis_name)

    def step(
        carry: DistillationCarry, index: jax.Array
    ) -> tuple[DistillationCarry, dict[str, jax.Array]]:
        variables, optimizer_states = carry
        batch, mask = batch_at(index)
        outputs = {
            name: jax.lax.stop_gradient(teacher(batch)) for name, teacher in teachers.items()
        }
        summed_divergence = _divergence_from(students, outputs, targets, loss_of, outputs_of)
        num_positions = _num_positions(outputs, mask)

        def loss(
            params: PyTree,
        ) -> tuple[jax.Array | int, tuple[dict[str, jax.Array], dict[str, PyTree]]]:
            losses, mutable = {}, {}
            for name in students:
                student = Variables(params[name], variables[name].mutable)
                note_inputs(models[name], batch)
                check_dealt_batches(
                    models[name].apply, student, batch, settings.batch_size, devices, axis_name
                )
                student_outputs, mutable[name] = models[name].apply(
                    student,
                    batch,
                    train=True,
                    key=keys.derive(key, index, "dropout", name, device),
                    mask=mask,
                    axis_name=axis_name,
                )
                compared = outputs_of(student_outputs)
                losses[name] = summed_divergence(name, compared, mask) / settings.batch_size
            return sum(losses.values()), (losses, mutable)

        params = {name: variables[name].params for name in students}
        # A student's loss depends only on its own parameters, so the gradient of the sum contains every
        # student's gradient.
        gradients, (losses, mutable) = jax.grad(loss, has_aux=True)(params)
        if devices > 1:
            # A device may have padding only, on which a network may return NaN.
            has_examples = jnp.any(mask > 0)
            gradients, losses = jax.tree.map(
                lambda leaf: jnp.where(has_examples, leaf, 0), (gradients, losses)
            )
        gradients, losses, num_positions = sum_over_devices(
            (gradients, losses, num_positions), axis_name
        )
        if num_positions is not None:
            scale = settings.batch_size / jnp.maximum(num_positions, 1)
            gradients, losses = jax.tree.map(lambda leaf: leaf * scale, (gradients, losses))
        updated, states = {}, {}
        for name in students:
            updates, states[name] = optimizers[name].update(
                gradients[name], optimizer_states[name], params[name]
            )
            updated[name] = Variables(optax.apply_updates(params[name], updates), mutable[name])
        return (updated, states), losses

    start = (
        dict(students),
        {name: optimizers[name].init(values.params) for name, values in students.items()},
    )
    return start, step


def frozen(
    model: Model, variables: Variables, outputs_of: Callable[[Any], Any] = logits_of
) -> Teacher:
    """A model as a teacher: its logits in evaluation mode, or what `outputs_of` keeps of its outputs."""
    return lambda batch: outputs_of(model.apply(variables, batch)[0])


def _check_mixed_column(models: Mapping[str, Model], settings: Distillation) -> None:
    """Raises ValueError if mixup would change a column that a student's network does not read."""
    for name, model in models.items():
        if settings.mixup_beta > 0 and model.inputs and settings.inputs not in model.inputs:
            raise ValueError(
                f"distillation.inputs must be one of {list(model.inputs)} for mixup, got "
                f"{settings.inputs!r}: the model of {name!r} reads no other columns."
            )


def _divergence_from(
    students: Mapping[str, Variables],
    outputs: Mapping[str, Any],
    targets: Targets,
    loss_of: Comparison,
    outputs_of: Callable[[Any], Any],
) -> Callable[[str, Any, jax.Array], jax.Array]:
    """Returns (student's name, its outputs, mask) -> sum of divergences from the teachers' targets.

    For Readouts the sum is over positions too, and the logits of the whole batch are never computed.
    """
    compares_logits = outputs_of is logits_of
    if compares_logits and isinstance(next(iter(outputs.values())), Readout):

        def over_positions(name: str, student: Readout, mask: jax.Array) -> jax.Array:
            student = student._replace(weights=student.weights * mask[:, None])
            return total_in_chunks(
                lambda logits, of_chunk: loss_of(logits, targets(name, of_chunk)), student, outputs
            )

        return over_positions

    for name, answer in outputs.items():
        if compares_logits:
            _check_logits(name, answer)
        else:
            _check_arrays(f"teacher {name!r} must return arrays with outputs_of", answer)
    batch_targets = {name: targets(name, outputs) for name in students}

    def over_examples(name: str, student: Any, mask: jax.Array) -> jax.Array:
        if not compares_logits:
            _check_arrays(f"outputs_of must return arrays for student {name!r}", student)
        values = jnp.asarray(loss_of(student, batch_targets[name]))
        if values.shape != mask.shape:
            raise ValueError(
                f"divergence must return one number per example, {list(mask.shape)}, got "
                f"{list(values.shape)}."
            )
        return jnp.sum(values * mask)

    return over_examples


def _check_logits(name: str, logits: Any) -> None:
    if getattr(logits, "ndim", None) != 2:
        raise ValueError(
            f"the model of {name!r} must return logits [batch, classes] to distill, or a "
            f"fedcodist.core.readout.Readout of several positions, got {described(logits)}."
        )
    check_classes(logits)


def _check_arrays(promise: str, outputs: Any) -> None:
    """Raises ValueError for a Readout, which only the comparison of logits can compute in chunks."""
    is_readout = lambda node: isinstance(node, Readout)
    if any(map(is_readout, jax.tree.leaves(outputs, is_leaf=is_readout))):
        raise ValueError(
            f"{promise}, got a fedcodist.core.readout.Readout: take arrays of it, such as its features."
        )


def _num_positions(outputs: Mapping[str, Any], mask: jax.Array) -> jax.Array | None:
    """The number of positions that count in a batch of Readouts, over which losses are averaged."""
    first = next(iter(outputs.values()))
    if not isinstance(first, Readout):
        return None
    return jnp.sum(first.weights * mask[:, None])


def agree_on_mutable(
    students: Mapping[str, Variables], batch_size: int, axis_name: str | None
) -> dict[str, Variables]:
    """Averages mutable state over the devices that have examples of batches of `batch_size`.

    In a network that does not use `axis_name`, a device's statistics are those of its part of batches.
    """
    if axis_name is None:
        return dict(students)
    first, share = part_of_batch(batch_size, axis_name)
    has_examples, count = first < batch_size, -(-batch_size // share)
    # The statistics of padding only may be NaN.
    mutable = jax.tree.map(
        lambda leaf: jnp.where(has_examples, leaf, jnp.zeros_like(leaf)),
        {name: values.mutable for name, values in students.items()},
    )
    total = sum_over_devices(mutable, axis_name)
    mean = jax.tree.map(lambda leaf: (leaf / count).astype(leaf.dtype), total)
    return {name: values._replace(mutable=mean[name]) for name, values in students.items()}
