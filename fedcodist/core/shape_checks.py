"""Checks of what functions return: structures, shapes and dtypes."""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.trees import named_leaves

PyTree = Any


class WrongShape(ValueError):
    """A loss or a metric that is not one number per example."""


def check_same(promise: str, expected: PyTree, actual: PyTree) -> None:
    """Raises TypeError that begins with `promise` unless structures, shapes and dtypes are the same."""
    before, after = (
        {jax.tree_util.keystr(path): shape_of(leaf) for path, leaf in leaves}
        for leaves in (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (expected, actual))
    )
    for path in [*before, *after]:
        if before.get(path) != after.get(path):
            raise TypeError(
                f"{promise}: at {path or 'its only array'} it has {after.get(path, 'nothing')} in place "
                f"of {before.get(path, 'nothing')}."
            )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (expected, actual)]
    if structures[0] != structures[1]:
        raise TypeError(f"{promise}: it has {kind_of(actual)} in place of {kind_of(expected)}.")


def check_same_shapes(promise: str, expected: PyTree, actual: PyTree) -> None:
    """As `check_same`, for arrays of any dtypes. Arrays of other shapes would be broadcast."""
    shapes = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32), tree)
        for tree in (expected, actual)
    )
    check_same(promise, *shapes)


def check_variables(name: str, variables: Any) -> None:
    """Raises TypeError that names the function unless it returned Variables of real float32 or more."""
    if not (hasattr(variables, "params") and hasattr(variables, "mutable")):
        raise TypeError(f"{name} must return Variables, got {kind_of(variables)}.")
    for path, leaf in named_leaves(variables.params).items():
        # The gradient of a complex number is its conjugate, along which optimizers would ascend.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
            instead = (
                "real and imaginary parts as two parameters" if is_complex else "it in `mutable`"
            )
            raise TypeError(
                f"{name} must return parameters that are real numbers, {path!r} is {leaf.dtype}: keep "
                f"{instead}."
            )
        # Sums over clients have the parameters' type, and in 16 bits most of their digits are lost.
        if leaf.dtype.itemsize < 4:
            raise TypeError(
                f"{name} must return parameters of at least float32, {path!r} is {leaf.dtype}: networks "
                "compute in bfloat16 by fedcodist.in_bfloat16, and their parameters stay float32."
            )


def shape_of(leaf: Any) -> str:
    """An array's dtype and shape, in a line."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def kind_of(value: Any) -> str:
    """What a value is, in a line."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return "nothing" if value is None else type(value).__name__


def described(value: Any) -> str:
    """What a function returned, for messages: type and length, or dtype and shape."""
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if not hasattr(value, "dtype"):
        return f"{value!r}"[:50]
    return f"{value.dtype}{list(axes_of(value))}"


def axes_of(value: Any) -> tuple[int, ...]:
    """The shape of an array; () for anything else."""
    return tuple(getattr(value, "shape", ()))
