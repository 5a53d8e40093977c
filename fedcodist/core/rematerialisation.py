"""Less memory for more arithmetic: activations are computed again in the backward pass."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fedcodist.core.model import Model

# XLA:CPU merged what is computed twice, and kept it all the time, unless XLA_FLAGS held this: it does so
# with JAX 0.10, and no more with 0.12.
CPU_FLAG = "--xla_disable_hlo_passes=cse_barrier_expander"
NEEDS_CPU_FLAG = jax.__version_info__[:2] < (0, 12)


def rematerialised(model: Model) -> Model:
    """Makes training keep fewer of a network's activations.

    The network's n operations are cut into about sqrt(n) parts of equal length. What passes from
    part to part is kept for the gradient; what is inside a part is computed again when its gradient
    is due, which is one more forward pass in all (Chen et al. 2016, Training Deep Nets with Sublinear
    Memory Cost). One `jax.checkpoint` around the whole network would save nothing: its gradient
    follows at once and needs all activations together.

    Values and gradients are the model's, up to float reassociation. Where all of a network is one
    operation to JAX, such as a `jax.jit` or a scan over layers, it stays whole; `jax.checkpoint`
    belongs around its layers then. On a CPU see `CPU_FLAG`.

    Args:
      model: any model.

    Returns:
      The same model but for `apply` in training mode.
    """

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        if not train:
            return model.apply(variables, batch, key=key, mask=mask, axis_name=axis_name)

        def network(variables, batch, key, mask):
            return model.apply(
                variables, batch, train=True, key=key, mask=mask, axis_name=axis_name
            )

        return _in_parts(network, variables, dict(batch), key, mask)

    return model._replace(apply=apply)


def _in_parts(function, *arguments):
    """Calls a function with every part of its operations under a `jax.checkpoint` of its own."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    program, rest = closed.jaxpr, list(closed.jaxpr.eqns)
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= zip(program.invars, jax.tree.leaves(arguments), strict=True)
    for operations in _cut(program.eqns):
        rest = rest[len(operations) :]
        wanted = {*_variables(program.outvars), *_read(rest)}
        kept = [v for operation in operations for v in operation.outvars if v in wanted]
        given = [v for v in _read(operations) if v in values]
        part = program.replace(constvars=[], invars=given, outvars=kept, eqns=operations)
        again = jax.checkpoint(jaxpr_as_fun(ClosedJaxpr(part, ())))
        values |= zip(kept, again(*[values[v] for v in given]), strict=True)
    leaves = [v.val if isinstance(v, Literal) else values[v] for v in program.outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _cut(operations: Sequence[Any]) -> list[Sequence[Any]]:
    """Cuts operations into about sqrt(n) runs of equal length."""
    length = max(1, round(math.sqrt(len(operations))))
    return [operations[start : start + length] for start in range(0, len(operations), length)]


def _read(operations: Iterable[Any]) -> list[Any]:
    """What operations read, in order of first use: the same in every process."""
    return _variables(v for operation in operations for v in operation.invars)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))
