"""What a function does with whole columns of data. This is read from its jaxpr; nothing is computed.

A label chooses one of a network's outputs, a token one row of a table. JAX gives no error when such an
index is too large or negative: a gather returns the last entry, the first, or NaN, and a one-hot vector
is zero. So columns are followed through a program to the places where they index an axis. Operations
that keep values, or shift them by a constant, are followed. Others (clipping, modulo, replacing negative
values) are not. Of columns with several entries per example, `column_parts` tells which are used.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from fedcodist.core.labels import CLICKS, ONE_HOT
from fedcodist.core.used_arguments import inner_jaxprs, scan_parts, used_arguments
from fedcodist.run.column_parts import Part, Placed, taken_by, whole

PyTree = Any

# Operations of one operand that keep its values.
_KEEPING = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "pad",
    "reduce_precision",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
_SCATTERS = {"scatter", "scatter-add", "scatter_add", "scatter-max", "scatter_max"}
_SCATTERS |= {"scatter-min", "scatter_min", "scatter-mul", "scatter_mul"}


class Followed(NamedTuple):
    """What is known of the values of one array.

    Attributes:
      columns: (part of a column, constant that was added to its values), for the columns that the array
        has.
      is_wrapped: whether n was added to values below 0, as indexing does.
      positions: n if all values are positions on an axis of n entries, such as an argmax; else None.
    """

    columns: frozenset[tuple[Placed, int]] = frozenset()
    is_wrapped: bool = False
    positions: int | None = None


class Index(NamedTuple):
    """A column that indexes an axis.

    Attributes:
      part: the column, and the part of it whose values are the index.
      shift: the constant that is added before.
      entries: length of the axis.
      is_compared: whether values are compared with positions, as in `one_hot` and accuracy, and not used
        for a look-up.
    """

    part: Part
    shift: int
    entries: int
    is_compared: bool


class Uses(NamedTuple):
    """What a function does with columns.

    Attributes:
      results: what is known of each of the function's results, in the order of leaves.
      indices: columns that index an axis.
      one_hot: parts of columns that are one-hot vectors, given to `class_of_one_hot`.
      clicks: parts of columns that are candidates' clicks, given to `is_clicked`.
      asked: columns that the function tests for NaN or infinite values.
      read: columns on which some result depends.
    """

    results: list[Followed]
    indices: set[Index]
    one_hot: set[Part]
    clicks: set[Part]
    asked: set[Any]
    read: set[Any]


def column_uses(
    jaxpr: ClosedJaxpr, arguments: Sequence[Followed], needed: Sequence[bool] | None = None
) -> Uses:
    """Follows columns through a traced function.

    Args:
      jaxpr: of `jax.make_jaxpr`.
      arguments: what is known of each argument, in the order of leaves; see `of_column`.
      needed: whether each result is read; all are where not given.
    """
    read = {
        placed.part.column
        for argument, is_used in zip(arguments, used_arguments(jaxpr, needed), strict=True)
        if is_used
        for placed, _ in argument.columns
    }
    uses = Uses([], set(), set(), set(), set(), read)
    results = _follow(jaxpr.jaxpr, [_of_constant(c) for c in jaxpr.consts], arguments, uses)
    return uses._replace(results=results)


def of_column(column: Any, shape: Sequence[int]) -> Followed:
    """An argument that is a column of data; `column` is its name, of any hashable type."""
    return Followed(frozenset({(whole(column, shape), 0)}))


UNKNOWN = Followed()


def _follow(
    jaxpr: Any, constants: Sequence[Followed], arguments: Sequence[Followed], uses: Uses
) -> list[Followed]:
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))

    def of(atom: Any) -> Followed:
        if isinstance(atom, Literal):
            return UNKNOWN
        return known.get(atom, UNKNOWN)

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        for variable, result in zip(
            equation.outvars, _results(equation, operands, uses), strict=True
        ):
            if result != UNKNOWN:
                known[variable] = result
    return [of(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[Followed], uses: Uses) -> list[Followed]:
    """What is known of an equation's results. Adds the equation's uses of columns to `uses`."""
    name, first = equation.primitive.name, operands[0] if operands else UNKNOWN
    if name == "iota":
        return [Followed(positions=equation.params["shape"][equation.params["dimension"]])]
    if name in ("argmax", "argmin"):
        (axis,) = equation.params["axes"]
        return [Followed(positions=equation.invars[0].aval.shape[axis])]
    if name in ("top_k", "approx_top_k"):
        return [UNKNOWN, Followed(positions=equation.invars[0].aval.shape[-1])]
    if name == "is_finite" or (name in ("ne", "eq") and equation.invars[0] is equation.invars[1]):
        uses.asked.update(placed.part.column for placed, _ in first.columns)
        return [UNKNOWN]
    if name == "eq":
        _compare(operands, uses)
        return [UNKNOWN]
    if name == "gather":
        _look_up(equation, equation.invars[0].aval.shape, operands[1], uses)
        return [_taken(equation, 0, first)]
    if name in _SCATTERS:
        _look_up(equation, equation.invars[0].aval.shape, operands[1], uses)
        return [_written(equation, first, operands[2]) if name == "scatter" else UNKNOWN]
    if name in ("add", "sub"):
        return [_shifted(equation, operands, 1 if name == "add" else -1)]
    if name == "select_n":
        return [_selected(operands[1:])]
    if name == "optimization_barrier":
        return operands
    if name == "sort":
        return [_taken(equation, *operand) for operand in enumerate(operands)]
    if name == "dynamic_slice":
        _pick(equation.invars[0].aval.shape, operands[1:], uses)
    if name == "dynamic_update_slice":
        _pick(equation.invars[0].aval.shape, operands[2:], uses)
        return [_written(equation, *operands[:2])]
    if name in _KEEPING:
        return [_taken(equation, 0, first)]
    if name == "concatenate":
        return [_joined(_taken(equation, *operand) for operand in enumerate(operands))]
    if name in _CONTROL:
        return _CONTROL[name](equation, operands, uses)
    for function, columns in ((ONE_HOT, uses.one_hot), (CLICKS, uses.clicks)):
        if equation.params.get("name") == function:
            columns.update(placed.part for placed, _ in first.columns)
    for inner in inner_jaxprs(equation):
        if len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            results = _inside(inner, operands, uses)
            if len(results) == len(equation.outvars):
                return results
    return [UNKNOWN] * len(equation.outvars)


def _look_up(equation: Any, shape: tuple[int, ...], index: Followed, uses: Uses) -> None:
    numbers = equation.params["dimension_numbers"]
    # mode='clip' is what the user asked for, unless the index is wrapped: vmap gives plain indexing this
    # mode.
    is_clipped = equation.params["mode"] == jax.lax.GatherScatterMode.CLIP
    if is_clipped and not index.is_wrapped:
        return
    axes = getattr(numbers, "start_index_map", None)
    if axes is None:
        axes = numbers.scatter_dims_to_operand_dims
    # With several indices (x[rows, label]) it is unknown which of them is the column, so the longest
    # axis is checked.
    entries = max((shape[axis] for axis in axes), default=None)
    if entries is not None:
        for placed, shift in index.columns:
            uses.indices.add(Index(placed.part, shift, int(entries), False))


def _pick(shape: tuple[int, ...], starts: Sequence[Followed], uses: Uses) -> None:
    """Adds the uses of scalars as indices. Starts of slices that are not wrapped may be anything."""
    for entries, start in zip(shape, starts, strict=False):
        for placed, shift in start.columns if start.is_wrapped else ():
            uses.indices.add(Index(placed.part, shift, int(entries), False))


def _compare(operands: Sequence[Followed], uses: Uses) -> None:
    for column_side, other in (operands, operands[::-1]):
        if other.positions is not None:
            for placed, shift in column_side.columns:
                uses.indices.add(Index(placed.part, shift, other.positions, True))


def _taken(equation: Any, operand: int, followed: Followed) -> Followed:
    """What is known of the result of an operation that keeps the values of its n-th operand."""
    taken = ((taken_by(equation, placed, operand), shift) for placed, shift in followed.columns)
    return followed._replace(
        columns=frozenset((placed, shift) for placed, shift in taken if placed is not None)
    )


def _written(equation: Any, operand: Followed, update: Followed) -> Followed:
    """What is known of an array into some of whose entries others were written."""
    rank = len(equation.outvars[0].aval.shape)
    return _with_axes(_joined([operand, update]), lambda axes: (None,) * rank)


def _with_axes(
    followed: Followed, changed: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> Followed:
    """The same values in an array of other axes; see `Placed.axes`."""
    return followed._replace(
        columns=frozenset(
            (placed._replace(axes=changed(placed.axes)), shift)
            for placed, shift in followed.columns
        )
    )


def _shifted(equation: Any, operands: Sequence[Followed], sign: int) -> Followed:
    first, second = operands
    amount = equation.invars[1]
    if sign > 0 and isinstance(equation.invars[0], Literal):
        first, amount = second, equation.invars[0]
    if not isinstance(amount, Literal) or not first.columns or np.ndim(amount.val):
        return UNKNOWN
    number = np.asarray(amount.val)
    if number.dtype.kind not in "iu":
        return UNKNOWN
    by = sign * int(number)
    return Followed(frozenset((column, shift + by) for column, shift in first.columns))


def _selected(cases: Sequence[Followed]) -> Followed:
    """What is known of `where(index < 0, index + n, index)`; of other selections only positions."""
    if len(cases) == 2 and cases[0].columns and cases[1].columns:
        columns = dict(cases[0].columns)
        wrapped = dict(cases[1].columns)
        if columns.keys() == wrapped.keys():
            if all(wrapped[column] > columns[column] for column in columns):
                return Followed(cases[0].columns, is_wrapped=True)
            if columns == wrapped:
                return cases[0]
    positions = {case.positions for case in cases}
    return Followed(positions=positions.pop()) if len(positions) == 1 else UNKNOWN


def _joined(parts: Iterable[Followed]) -> Followed:
    parts = list(parts)
    positions = {part.positions for part in parts}
    return Followed(
        frozenset().union(*(part.columns for part in parts)),
        any(part.is_wrapped for part in parts),
        positions.pop() if len(positions) == 1 else None,
    )


def _of_constant(value: Any) -> Followed:
    """Positions if a constant is 0, 1, ..., as in a comparison with `jnp.arange(classes)`."""
    shape = np.shape(value)
    if getattr(value, "dtype", np.dtype(float)).kind not in "iu" or sum(n > 1 for n in shape) != 1:
        return UNKNOWN
    numbers = np.asarray(value).reshape(-1)
    return Followed(positions=len(numbers) if (numbers == np.arange(len(numbers))).all() else None)


def _inside(inner: Any, operands: Sequence[Followed], uses: Uses) -> list[Followed]:
    if isinstance(inner, ClosedJaxpr):
        return _follow(inner.jaxpr, [_of_constant(c) for c in inner.consts], operands, uses)
    return _follow(inner, [UNKNOWN] * len(inner.constvars), operands, uses)


def _while(equation: Any, operands: list[Followed], uses: Uses) -> list[Followed]:
    skipped, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    held = operands[skipped : skipped + constants]
    body = equation.params["body_jaxpr"]
    return _until_settled(
        lambda carry: _inside(body, [*held, *carry], uses), operands[skipped + constants :]
    )


def _scan(equation: Any, operands: list[Followed], uses: Uses) -> list[Followed]:
    inner, first, last = scan_parts(equation)
    carried = last - first
    held = operands[:first]
    xs = [_with_axes(operand, lambda axes: axes[1:]) for operand in operands[last:]]
    others: list[Followed] = []

    def one_pass(carry: list[Followed]) -> list[Followed]:
        results = _inside(inner, [*held, *carry, *xs], uses)
        others[:] = results[carried:]
        return results[:carried]

    carry = _until_settled(one_pass, operands[first:last])
    return [*carry, *(_with_axes(other, lambda axes: (None, *axes)) for other in others)]


def _cond(equation: Any, operands: list[Followed], uses: Uses) -> list[Followed]:
    branches = [_inside(branch, operands[1:], uses) for branch in equation.params["branches"]]
    return [_joined(results) for results in zip(*branches, strict=True)]


def _until_settled(body: Any, carry: list[Followed]) -> list[Followed]:
    """What is known of a loop's carry in all passes; after three passes if a shift keeps growing."""
    for _ in range(3):
        after = [_joined(pair) for pair in zip(carry, body(carry), strict=True)]
        if after == carry:
            break
        carry = after
    return carry


_CONTROL = {"while": _while, "scan": _scan, "cond": _cond}
