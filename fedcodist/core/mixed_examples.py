"""Finds losses and metrics that mix a batch's examples: a column is broadcast against the outputs."""

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core.batches import number_of_examples
from fedcodist.core.shape_checks import WrongShape, axes_of
from fedcodist.core.used_arguments import inner_jaxprs

Batch = Mapping[str, jax.Array]
# Two lengths that no axis of an example has: primes.
_LENGTHS = (1009, 1013)
_is_probed: contextvars.ContextVar[bool] = contextvars.ContextVar("is_probed", default=False)


def check_examples_do_not_mix(
    name: str, function: Callable[[Any, Batch], Any], outputs: Any, batch: Batch
) -> None:
    """Raises WrongShape for a function that broadcasts a column against the outputs or another column.

    Every example would be compared with all examples of the batch, padding too. So each column in turn,
    and then the outputs, get another length than the rest. A broadcast makes an array that has both
    lengths among its axes. A look-up by position does not. A loss of `per_example` passes, since it
    gives each example its own columns.
    """
    size = number_of_examples(batch)
    if size < 2 or is_probed():  # no other examples, or a loss inside a loss
        return

    def resized(tree: Any, length: int) -> Any:
        of = lambda shape: (length, *shape[1:]) if shape[:1] == (size,) else shape
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(of(axes_of(leaf)), leaf.dtype), tree)

    names, arrays = [*batch, "outputs"], [*batch.values(), outputs]
    shapes = ", ".join(f"{n} {_shapes_of(a)}" for n, a in zip(names, arrays, strict=True))
    # A hook may call networks, which take long to trace.
    for longer in names[-1:] if name == "loss_hook" else names:
        lengths = [_LENGTHS[array == longer] for array in names]
        token = _is_probed.set(True)
        try:
            *columns, of_network = map(resized, arrays, lengths)
            program = jax.make_jaxpr(function)(of_network, dict(zip(batch, columns, strict=True)))
        except Exception:  # it notices, or it cannot be called alone
            continue
        finally:
            _is_probed.reset(token)
        if _has_array_with_axes(program, set(_LENGTHS)):
            raise WrongShape(
                f"{name} must compute an example's number from this example alone, but it broadcasts "
                f"{longer!r} against another of {shapes}: give both the same shape, as outputs[:, 0] "
                "does for one output."
            )


def is_probed() -> bool:
    """Whether `check_examples_do_not_mix` calls the loss or metric, with columns of several lengths."""
    return _is_probed.get()


def _has_array_with_axes(program: Any, lengths: set[int]) -> bool:
    """Whether a jaxpr computes an array that has all these lengths, in loops, branches and calls too."""
    return any(
        any(lengths <= set(axes_of(result.aval)) for result in equation.outvars)
        or any(
            _has_array_with_axes(inner, lengths)
            for inner in (*inner_jaxprs(equation), *equation.params.get("branches", ()))
        )
        for equation in program.eqns
    )


def _shapes_of(tree: Any) -> str:
    return ", ".join(str(list(axes_of(leaf))) for leaf in jax.tree.leaves(tree))
