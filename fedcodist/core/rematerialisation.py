"""Rematerialisation: activations are computed again in the backward pass, to need less memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fedcodist.core.model import Batch, Model, Variables

PyTree = Any

# In JAX 0.10, XLA:CPU merges the two computations and keeps the activations unless XLA_FLAGS has this
# flag. In JAX 0.12 it does not merge them.
CPU_FLAG = "--xla_disable_hlo_passes=cse_barrier_expander"
NEEDS_CPU_FLAG = jax.__version_info__[:2] < (0, 12)


def rematerialised(model: Model) -> Model:
    """Makes training keep fewer of a network's activations.

    The network's n operations are cut into about sqrt(n) parts of equal length. Values between parts are
    kept for the gradient. Values inside a part are computed again for its gradient, which costs one more
    forward pass in total (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost,
    https://arxiv.org/abs/1604.06174). One `jax.checkpoint` around the whole network would save nothing:
    its backward pass follows at once and needs all activations together.

    Values and gradients are the model's, up to float reassociation. A network that is one operation to
    JAX, such as a `jax.jit` or a scan over layers, is not cut; put `jax.checkpoint` around its layers.
    On a CPU see `CPU_FLAG`.

    Args:
      model: any model.

    Returns:
      The model with another `apply`, which differs in training mode.
    """

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> tuple[Any, PyTree]:
        if not train:
            return model.apply(variables, batch, key=key, mask=mask, axis_name=axis_name)

        def network(
            variables: Variables, batch: Batch, key: jax.Array | None, mask: jax.Array | None
        ) -> tuple[Any, PyTree]:
            return model.apply(
                variables, batch, train=True, key=key, mask=mask, axis_name=axis_name
            )

        return _in_parts(network, variables, dict(batch), key, mask)

    return model._replace(apply=apply)


def _in_parts(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Calls a function with a `jax.checkpoint` around every part of its operations."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    program, rest = closed.jaxpr, list(closed.jaxpr.eqns)
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= zip(program.invars, jax.tree.leaves(arguments), strict=True)
    for operations in _cut(program.eqns):
        rest = rest[len(operations) :]
        wanted = {*_variables(program.outvars), *_read(rest)}
        outputs = [v for operation in operations for v in operation.outvars if v in wanted]
        inputs = [v for v in _read(operations) if v in values]
        part = program.replace(constvars=[], invars=inputs, outvars=outputs, eqns=operations)
        again = jax.checkpoint(jaxpr_as_fun(ClosedJaxpr(part, ())))
        values |= zip(outputs, again(*[values[v] for v in inputs]), strict=True)
    leaves = [v.val if isinstance(v, Literal) else values[v] for v in program.outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _cut(operations: Sequence[Any]) -> list[Sequence[Any]]:
    """Cuts operations into about sqrt(n) runs of equal length."""
    length = max(1, round(math.sqrt(len(operations))))
    return [operations[start : start + length] for start in range(0, len(operations), length)]


def _read(operations: Iterable[Any]) -> list[Any]:
    """The variables that operations read, in order of first use, which all processes share."""
    return _variables(v for operation in operations for v in operation.invars)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))
