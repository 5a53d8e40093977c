"""Whether what training reads of a network depends on padding. Networks are only traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from fedcodist.core import keys
from fedcodist.core.used_arguments import used_arguments

PyTree = Any
# (outputs, batch, mask) -> what training reads of a network's outputs
ReadOutputs = Callable[[Any, Mapping[str, Any], jax.Array], jax.Array]


def counts_padding(apply: Callable[..., Any], variables: PyTree, batch: Mapping[str, Any]) -> bool:
    """Whether mutable state depends, in training, on the batch but not on its mask. Only traces.

    It does not find a layer that ignores the mask after one that uses it: what the second layer reads
    depends on the mask through the first.
    """

    def statistics(
        batch: Mapping[str, jax.Array], mask: jax.Array, variables: PyTree, key: jax.Array
    ) -> PyTree:
        return apply(variables, batch, train=True, key=key, mask=mask)[1]

    key = keys.key_shape()
    program = jax.make_jaxpr(statistics)(
        _shapes(dict(batch)), _mask_shape(batch), _shapes(variables), key
    ).jaxpr
    columns = len(jax.tree.leaves(dict(batch)))
    of_batch = _depending(program, program.invars[:columns])
    of_mask = _depending(program, program.invars[columns : columns + 1])
    return any(
        result in of_batch and result not in of_mask
        for result in program.outvars
        if not isinstance(result, Literal)
    )


def reads_padding(
    apply: Callable[..., Any],
    variables: PyTree,
    batch: Mapping[str, Any],
    outputs: Any,
    read: ReadOutputs,
) -> bool:
    """Whether the loss reads an output that joins the batch's examples without its mask. Only traces.

    Such an output is of real numbers, has no batch axis, and depends on the batch. A mean over the batch
    that is given to every example is not found.
    """
    mask = _mask_shape(batch)
    (size,) = mask.shape
    joins = [
        jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.shape(leaf)[:1] != (size,)
        for leaf in jax.tree.leaves(outputs)
    ]
    if not any(joins):  # as in nearly all networks, which are then not traced again
        return False

    def outputs_of(
        batch: Mapping[str, jax.Array], mask: jax.Array, variables: PyTree, key: jax.Array
    ) -> Any:
        return apply(variables, batch, train=True, key=key, mask=mask)[0]

    columns, others = _shapes(dict(batch)), (_shapes(variables), keys.key_shape())
    network = jax.make_jaxpr(outputs_of)(columns, mask, *others)
    loss = jax.make_jaxpr(read)(_shapes(outputs), columns, mask)
    count, is_read = len(jax.tree.leaves(columns)), used_arguments(loss)
    for place in (place for place, leaf_joins in enumerate(joins) if leaf_joins and is_read[place]):
        used = used_arguments(network, [other == place for other in range(len(joins))])
        if any(used[:count]) and not used[count]:
            longer = [_resized(tree, size, size + 1) for tree in (columns, mask)]
            try:
                after = jax.tree.leaves(jax.eval_shape(outputs_of, *longer, *others))
            except Exception:  # some networks take batches of one size only
                continue
            # Otherwise its batch axis is another one than the first.
            if after[place].shape == network.out_avals[place].shape:
                return True
    return False


def uses_axis(
    apply: Callable[..., Any], variables: PyTree, batch: Mapping[str, Any], axis_name: str | None
) -> bool:
    """Whether a network's program in training has a sum or another collective over the axis."""

    def statistics(
        variables: PyTree, batch: Mapping[str, jax.Array], mask: jax.Array, key: jax.Array
    ) -> PyTree:
        return apply(variables, batch, train=True, key=key, mask=mask, axis_name=axis_name)[1]

    program = jax.make_jaxpr(statistics)(
        _shapes(variables), _shapes(dict(batch)), _mask_shape(batch), keys.key_shape()
    )
    return repr(axis_name) in str(program)


def _resized(tree: PyTree, size: int, other: int) -> PyTree:
    """Shapes in which a first axis of `size` has another length."""
    length = lambda leaf: (other,) if leaf.shape[:1] == (size,) else leaf.shape[:1]
    resized = lambda leaf: jax.ShapeDtypeStruct((*length(leaf), *leaf.shape[1:]), leaf.dtype)
    return jax.tree.map(resized, tree)


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _mask_shape(batch: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(next(iter(batch.values())))[:1], jnp.float32)


def _depending(program: Jaxpr, starts: Sequence[Var]) -> set[Var]:
    """The variables of a program that depend on some of its inputs."""
    reached = set(starts)
    for operation in program.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in operation.invars):
            reached |= set(operation.outvars)
    return reached
