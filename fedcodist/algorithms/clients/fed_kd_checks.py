"""FedKD's checks by shapes: options that do not exist, and models that do not fit together."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses, aligned, by_input
from fedcodist.core import keys
from fedcodist.core.checks import check_choice, check_columns
from fedcodist.core.layer_outputs import LayerOutputs, as_layers
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model
from fedcodist.core.shape_checks import described
from fedcodist.core.user_functions import traced
from fedcodist.distillation.divergences import check_classes


def check_mutual(mutual: MutualLosses, training: LocalTraining) -> None:
    """Raises ValueError that names an option with a value that does not exist or fit `training`."""
    check_choice("mutual.adaptive", mutual.adaptive, ("batch", "sample", "none"))
    check_choice("mutual.kl_reduction", mutual.kl_reduction, ("batchmean", "elementmean"))
    check_choice("mutual.hidden_map", mutual.hidden_map, ("learned", "identity"))
    if training.differentiate is not None and mutual.adaptive == "batch":
        raise ValueError(
            "mutual.adaptive must be 'sample' or 'none' with training.differentiate, which takes the "
            "gradient of one example at a time, got 'batch'."
        )


def map_shapes(
    teacher: Model,
    student: Model,
    columns: Mapping[str, Any],
    training: LocalTraining,
    mutual: MutualLosses,
    teacher_name: str = "teacher",
) -> list[tuple[int, int]]:
    """The shapes of W^h; none if it is the identity. Raises ValueError if the models do not fit.

    Messages call the teacher by `teacher_name`.
    """
    check_columns("columns", columns)
    on_device = jax.dtypes.canonicalize_dtype
    example = {
        name: jax.ShapeDtypeStruct((1, *column.shape[1:]), on_device(column.dtype))
        for name, column in columns.items()
    }
    key = keys.key_shape()
    hint = f": the columns are {sorted(columns)}"
    positions: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    batch = traced("training.preprocess", training.preprocess, example, key, positions, hint=hint)

    def outputs(name: str, model: Model) -> LayerOutputs:
        call = lambda key, batch: as_layers(model.apply(model.init(key), batch)[0])
        return traced(f"{name}.apply", call, key, batch, hint=f"{hint} before preprocessing")

    of_teacher, of_student = outputs(teacher_name, teacher), outputs("student", student)
    for name, layers in ((teacher_name, of_teacher), ("student", of_student)):
        if getattr(layers.logits, "ndim", 0) != 2:
            found = described(layers.logits)
            raise TypeError(f"{name} must return logits [batch, classes], got {found}.")
    try:
        widths = _widths(of_teacher, of_student, mutual)
    except ValueError as error:
        if teacher_name == "teacher":
            raise
        raise ValueError(f"{teacher_name} does not fit as a teacher: {error}") from None
    return [] if mutual.hidden_map == "identity" else widths


def _widths(
    of_teacher: LayerOutputs, of_student: LayerOutputs, mutual: MutualLosses
) -> list[tuple[int, int]]:
    """Widths (student's, teacher's) of each pair of aligned layers."""
    classes = of_teacher.logits.shape[1], of_student.logits.shape[1]
    if classes[0] != classes[1]:
        raise ValueError(
            f"teacher and student must have as many classes, got {classes[0]} and {classes[1]}."
        )
    check_classes(of_teacher.logits)
    widths = []
    for layers in aligned("hidden states", of_teacher.hidden, of_student.hidden):
        for target, state in by_input("hidden states", *layers):
            if target.shape[:-1] != state.shape[:-1]:
                raise ValueError(
                    "student's hidden states must be of the teacher's shapes but for the width, got "
                    f"{list(state.shape)} for {list(target.shape)}."
                )
            if mutual.hidden_map == "identity" and target.shape != state.shape:
                raise ValueError(
                    "mutual.hidden_map must be 'learned' where widths differ, got 'identity' for a "
                    f"student's {state.shape[-1]} and a teacher's {target.shape[-1]}."
                )
        widths.append((state.shape[-1], target.shape[-1]))  # one for all inputs
    if of_teacher.attention and of_student.attention:
        for layers in aligned("attention maps", of_teacher.attention, of_student.attention):
            for target, state in by_input("attention maps", *layers):
                if target.shape[2:] != state.shape[2:]:
                    raise ValueError(
                        "student's attention maps must be of the teacher's positions, got "
                        f"{list(state.shape)} for {list(target.shape)}."
                    )
    if mutual.without_padding:
        _check_real(of_teacher, of_student)
    return widths


def _check_real(of_teacher: Any, of_student: Any) -> None:
    """Raises ValueError unless both models return `is_real` for each input that their layers read."""
    for whose, outputs in (("teacher", of_teacher), ("student", of_student)):
        layers = outputs.hidden or outputs.attention
        inputs = len(jax.tree.leaves(layers[0])) if layers else 0
        if not inputs or len(jax.tree.leaves(outputs.is_real)) != inputs:
            raise ValueError(
                f"mutual.without_padding must be False for a {whose} that does not tell padding "
                "(LayerOutputs.is_real, for each input that its layers read), got True."
            )
