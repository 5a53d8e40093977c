"""Which part of a column an array of a traced function holds.

An example may have several entries in a column, such as two labels, of which a program takes one by
`batch["label"][:, 0]`. So a column's axes are followed through the operations that keep values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of a column.

    Attributes:
      column: its name, of any hashable type.
      bounds: (start, stop) on each of the column's axes but the first.
    """

    column: Any
    bounds: tuple[tuple[int, int], ...] = ()


class Placed(NamedTuple):
    """A part of a column, and where an array that holds it has the column's axes.

    Attributes:
      part: the part.
      axes: per axis of the array, the position in `part.bounds` of the column's axis that it is; None
        if it is no such axis.
    """

    part: Part
    axes: tuple[int | None, ...]


def whole(column: Any, shape: Sequence[int]) -> Placed:
    """All of a column of this shape [examples, ...]."""
    bounds = tuple((0, size) for size in shape[1:])
    return Placed(Part(column, bounds), (None, *range(len(bounds))))


def taken_by(equation: Any, placed: Placed, operand: int = 0) -> Placed | None:
    """What the result of an operation that keeps values holds of the part in one of its operands.

    Returns:
      None if it is unknown which of an example's entries the result holds.
    """
    shape, result = equation.invars[operand].aval.shape, equation.outvars[0].aval.shape
    windows, bounds = _windows(equation, shape), list(placed.part.bounds)
    # Some axis of the column was merged with another, or is no longer as long.
    is_hidden = any(
        stop - start > 1 and axis not in placed.axes for axis, (start, stop) in enumerate(bounds)
    )
    axis_of: dict[int | None, int] = {}  # axis of the operand -> the column's, where it is known
    for source, (axis, window) in enumerate(zip(placed.axes, windows, strict=True)):
        if axis is None:
            is_one = window is None or window[1] - window[0] == 1 < shape[source]
            if is_one and is_hidden:
                return None
        elif window is None:
            return None
        else:
            start = bounds[axis][0]
            bounds[axis] = (start + window[0], start + window[1])
            axis_of[source] = axis
    axes: list[int | None] = []
    for source_or_none, size in zip(_sources(equation, shape, result), result, strict=True):
        axis = axis_of.get(source_or_none)
        is_all = axis is not None and bounds[axis][1] - bounds[axis][0] == size
        axes.append(axis if is_all else None)
    return Placed(placed.part._replace(bounds=tuple(bounds)), tuple(axes))


def _windows(equation: Any, shape: Sequence[int]) -> list[tuple[int, int] | None]:
    """The entries that the result has of each axis of the operand; None: one of them, or every nth."""
    params = equation.params
    if equation.primitive.name == "slice":
        bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
        strides = params["strides"] or [1] * len(shape)
        return [pair if stride == 1 else None for pair, stride in zip(bounds, strides, strict=True)]
    # Where the start is computed, several entries may be any of the axis.
    sizes = params.get("slice_sizes", shape)
    return [
        None if taken == 1 < size else (0, size) for taken, size in zip(sizes, shape, strict=True)
    ]


def _sources(equation: Any, shape: Sequence[int], result: Sequence[int]) -> list[int | None]:
    """For each axis of the result, the axis of the operand that it is; None if it is another one."""
    name, params = equation.primitive.name, equation.params
    sources: list[int | None] = [None] * len(result)
    if name == "squeeze":
        return [axis for axis in range(len(shape)) if axis not in params["dimensions"]]
    if name == "transpose":
        return list(params["permutation"])
    if name == "broadcast_in_dim":
        for axis, place in enumerate(params["broadcast_dimensions"]):
            sources[place] = axis
        return sources
    if name == "gather":
        numbers = params["dimension_numbers"]
        dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [axis for axis in range(len(shape)) if axis not in dropped]
        for place, axis in zip(numbers.offset_dims, kept, strict=True):
            sources[place] = axis
        return sources
    if name == "reshape":
        # From the last axis on they are the same until one has another length.
        for back in range(1, min(len(shape), len(result)) + 1):
            if shape[-back] != result[-back]:
                break
            sources[-back] = len(shape) - back
        return sources
    changed: set[int] = set()
    if name == "rev":
        changed = set(params["dimensions"])
    if name in ("concatenate", "sort"):
        changed = {params["dimension"]}
    if name == "pad":
        changed = {axis for axis, widths in enumerate(params["padding_config"]) if any(widths)}
    return [None if axis in changed else axis for axis in range(len(shape))]
