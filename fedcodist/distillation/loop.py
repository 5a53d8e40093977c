"""Distillation: soft targets, losses, and the loop in which students learn from teachers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedcodist.core import batches, keys
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import check_integer, check_number, check_stream
from fedcodist.core.devices import sum_over_devices, this_device
from fedcodist.core.input_types import note_inputs
from fedcodist.core.inputs import Examples
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory
from fedcodist.core.padding_checks import check_dealt_batches
from fedcodist.core.readout import Readout, total_in_chunks
from fedcodist.core.shuffling import permuted_positions, stream_positions
from fedcodist.data import augmentation
from fedcodist.distillation.divergences import (
    DIVERGENCES,
    KL,
    Divergence,
    check_classes,
    kl_divergence,
    own_divergence,
)

PyTree = Any
# A frozen model, or an ensemble of them, in evaluation mode: batch -> outputs.
Teacher = Callable[[Batch], Any]
# (student's name, every teacher's outputs on a batch) -> target probabilities
Targets = Callable[[str, Mapping[str, Any]], jax.Array]
# The carry of a distillation's steps: (students, states of their optimizers).
DistillationCarry = tuple[dict[str, Variables], dict[str, PyTree]]
UNLABELLED = "unlabelled"
LABEL = "label"  # the column of labels, for `label_teacher`
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


class Distillation(NamedTuple):
    """How students are trained on unlabelled data.

    Attributes:
      steps: optimizer steps of one distillation.
      batch_size: unlabelled examples per step.
      optimizer: learning rate -> optax optimizer; every distillation starts with a fresh state.
      direction: 'forward' for KL(target || student), 'reverse' for KL(student || target). It must be
        'forward' if `divergence` is not 'kl'.
      mixup_beta: mixup coefficients are drawn from Beta(beta, beta); 0 switches mixup off.
      preprocess: (batch, key, positions) -> batch, before mixup.
      inputs: the column of the network's inputs.
      divergence: the students' loss: 'kl', 'jensen_shannon' or 'mean_squared_logits' (see
        `fedcodist.distillation.divergences`), or a function (student logits [batch, classes], target
        probabilities [batch, classes]) -> [batch].
    """

    steps: int
    batch_size: int = 128
    optimizer: OptimizerFactory = lambda rate: optax.adam(rate, eps=1e-5)
    direction: str = "forward"
    mixup_beta: float = 2.0
    preprocess: Preprocess = lambda batch, key, positions: batch
    inputs: str = "image"
    divergence: str | Divergence = KL


class Distilled(NamedTuple):
    """The students after distillation, and their losses in the first and the last step."""

    students: dict[str, Variables]
    first_loss: dict[str, jax.Array]
    last_loss: dict[str, jax.Array]


def check_distillation(distillation: Distillation, num_unlabelled: int) -> None:
    """Raises ValueError or TypeError that names the setting which is not allowed."""
    check_stream(
        "distillation.batch_size",
        distillation.batch_size,
        "distillation.steps",
        distillation.steps,
        low=0,
    )
    check_integer("num_unlabelled", num_unlabelled, low=1)
    check_factory("distillation.optimizer", distillation.optimizer)
    check_preprocess("distillation.preprocess", distillation.preprocess)
    check_number("distillation.mixup_beta", distillation.mixup_beta, low=0)
    divergence_of(distillation)


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
    divergence: Divergence | None = None,
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
      divergence: of a student's logits from its target; by default `divergence_of(settings)`.

    Raises:
      ValueError: a student's outputs, or a setting of mixup, do not fit.
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
    )
    if settings.steps == 0:
        nothing = {name: jnp.zeros(()) for name in students}
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
    divergence: Divergence | None = None,
) -> tuple[
    DistillationCarry,
    Callable[[DistillationCarry, jax.Array], tuple[DistillationCarry, dict[str, jax.Array]]],
]:
    """The loop of `distill`, for callers that run its steps themselves.

    Returns:
      (start, step): the initial carry (students, states of their optimizers), and
      step(carry, index) -> (carry, student's name -> loss).
    """
    chex.assert_shape(unlabelled.indices, (settings.steps, settings.batch_size))
    _check_mixed_column(models, settings)
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
        summed_divergence = _divergence_from(students, outputs, targets, loss_of)
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
                losses[name] = (
                    summed_divergence(name, logits_of(student_outputs), mask) / settings.batch_size
                )
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


def frozen(model: Model, variables: Variables) -> Teacher:
    """A model as a teacher: its outputs in evaluation mode."""
    return lambda batch: logits_of(model.apply(variables, batch)[0])


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


def divergence_of(distillation: Distillation) -> Divergence:
    """The loss (student logits, target probabilities) -> divergence per example.

    Raises:
      ValueError, TypeError: names `divergence` or `direction`, and what is allowed.
    """
    named, direction = distillation.divergence, distillation.direction
    if direction not in ("forward", "reverse"):
        raise ValueError(
            f"distillation.direction must be 'forward' or 'reverse', got {direction!r}."
        )
    kl = kl_divergence(direction)
    if named == KL:
        return kl
    if direction != "forward":
        raise ValueError(
            f"distillation.direction must be 'forward' where distillation.divergence is not {KL!r}, "
            f"got {direction!r}."
        )
    if callable(named):
        return own_divergence("distillation.divergence", named)
    if named not in DIVERGENCES:
        raise ValueError(
            f"distillation.divergence must be one of {(KL, *DIVERGENCES)} or a function, got "
            f"{named!r}."
        )
    return DIVERGENCES[named]


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
    loss_of: Divergence,
) -> Callable[[str, Any, jax.Array], jax.Array]:
    """Returns (student's name, its outputs, mask) -> sum of divergences from the teachers' targets.

    For Readouts the sum is over positions too, and the logits of the whole batch are never computed.
    """
    if not isinstance(next(iter(outputs.values())), Readout):
        for name, logits in outputs.items():
            if jnp.ndim(logits) != 2:
                raise ValueError(
                    f"the model of {name!r} must return logits [batch, classes] to distill, or a "
                    f"fedcodist.core.readout.Readout of several positions, got {jax.typeof(logits)}."
                )
            check_classes(logits)
        batch_targets = {name: targets(name, outputs) for name in students}
        return lambda name, student, mask: jnp.sum(loss_of(student, batch_targets[name]) * mask)

    def over_positions(name: str, student: Readout, mask: jax.Array) -> jax.Array:
        student = student._replace(weights=student.weights * mask[:, None])
        return total_in_chunks(
            lambda logits, of_chunk: loss_of(logits, targets(name, of_chunk)), student, outputs
        )

    return over_positions


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
    first, share = _part_of_batch(batch_size, axis_name)
    has_examples, count = first < batch_size, -(-batch_size // share)
    # The statistics of padding only may be NaN.
    own = jax.tree.map(
        lambda leaf: jnp.where(has_examples, leaf, jnp.zeros_like(leaf)),
        {name: values.mutable for name, values in students.items()},
    )
    total = sum_over_devices(own, axis_name)
    mean = jax.tree.map(lambda leaf: (leaf / count).astype(leaf.dtype), total)
    return {name: values._replace(mutable=mean[name]) for name, values in students.items()}


def _part_of_batch(batch_size: int, axis_name: str | None) -> tuple[jax.Array, int]:
    """This device's first position in a batch, which may lie beyond it, and how many it takes."""
    devices, device = this_device(axis_name)
    share = -(-batch_size // devices)
    return device * share, share


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
    first, share = _part_of_batch(batch_size, axis_name)
    positions = first + jnp.arange(share)
    return jnp.minimum(positions, batch_size - 1), (positions < batch_size).astype(jnp.float32)
