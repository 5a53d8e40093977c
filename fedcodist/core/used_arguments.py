"""The arguments of a traced function on which results depend, through loops, branches and calls."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal


def used_arguments(jaxpr: ClosedJaxpr, needed: Sequence[bool] | None = None) -> list[bool]:
    """Whether each argument affects a needed result.

    Args:
      jaxpr: of `jax.make_jaxpr`.
      needed: whether each result is read; all are where not given.
    """
    return _used(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars) if needed is None else needed)


def inner_jaxprs(equation: Any) -> list[Any]:
    """The functions that an equation calls (jit, checkpoint, custom derivatives)."""
    name = equation.primitive.name
    if name == "sort" or name.startswith(("scatter", "reduce")):
        return []
    return [value for value in equation.params.values() if hasattr(value, "eqns")]


def scan_parts(equation: Any) -> tuple[Any, int, int]:
    """A scan's body, and the indices of its arguments at which the carry begins and ends."""
    inner = equation.params["jaxpr"]
    body = _open(inner)
    # Scanned arrays have one axis less inside. (Versions of JAX name the counts differently.)
    is_part = lambda outer, inside: len(outer.aval.shape) > len(inside.aval.shape)
    scanned = sum(map(is_part, equation.invars, body.invars))
    carried = len(body.outvars) - sum(map(is_part, equation.outvars, body.outvars))
    end = len(equation.invars) - scanned
    return inner, end - carried, end


def _used(jaxpr: Any, needed: Sequence[bool]) -> list[bool]:
    live = {
        result
        for result, is_needed in zip(jaxpr.outvars, needed, strict=True)
        if is_needed and not isinstance(result, Literal)
    }
    for equation in reversed(jaxpr.eqns):
        wanted = [result in live for result in equation.outvars]
        if any(wanted) or equation.effects:
            live |= {
                operand
                for operand, is_used in zip(
                    equation.invars, _operands(equation, wanted), strict=True
                )
                if is_used and not isinstance(operand, Literal)
            }
    return [argument in live for argument in jaxpr.invars]


def _operands(equation: Any, wanted: list[bool]) -> list[bool]:
    """Whether each operand of an equation affects its wanted results."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        skipped, constants = params["cond_nconsts"], params["body_nconsts"]
        asked = _used(params["cond_jaxpr"].jaxpr, [True])
        carry = [a or b for a, b in zip(wanted, asked[skipped:], strict=True)]
        used = _until_settled(params["body_jaxpr"].jaxpr, carry, [], constants)
        return [*asked[:skipped], *used]
    if name == "scan":
        inner, first, last = scan_parts(equation)
        carried = last - first
        return _until_settled(_open(inner), wanted[:carried], wanted[carried:], first)
    if name == "cond":
        branches = [_used(branch.jaxpr, wanted) for branch in params["branches"]]
        return [True, *map(any, zip(*branches, strict=True))]
    for inner in map(_open, inner_jaxprs(equation)):
        if (len(inner.invars), len(inner.outvars)) == (len(equation.invars), len(wanted)):
            return _used(inner, wanted)
    return [True] * len(equation.invars)


def _until_settled(body: Any, carry: list[bool], others: list[bool], first: int) -> list[bool]:
    """The used arguments of a loop's body in all passes; its carry begins at argument `first`."""
    while True:
        used = _used(body, [*carry, *others])
        after = [a or b for a, b in zip(carry, used[first : first + len(carry)], strict=True)]
        if after == carry:
            return [*used[:first], *carry, *used[first + len(carry) :]]
        carry = after


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
