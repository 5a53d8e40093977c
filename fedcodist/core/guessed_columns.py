"""Checks of a model's loss and metrics by shape, without its data: labels and the like are guessed."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.batches import number_of_examples
from fedcodist.core.example_losses import Batch, Loss, loss_of_right_shape, statistic_of_right_shape
from fedcodist.core.shape_checks import WrongShape, axes_of
from fedcodist.core.summed_metrics import SummedMetric

# Two sizes of batches, so that a constant is not taken for one number per example.
_SIZES = (11, 13)
_MOST_GUESSES = 300


def cases_by_shape(
    inputs: Mapping[str, Any], outputs_of: Callable[[Mapping[str, Any]], Any]
) -> list[tuple[Mapping[str, Any], Any]]:
    """Shapes of inputs and of a network's outputs, for two sizes of batches if it takes both.

    The network is traced once if every output has a leading batch axis.

    Args:
      inputs: the network's input columns, as arrays or shapes with a leading batch axis.
      outputs_of: inputs -> shapes of the outputs.
    """

    def resized(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        like = lambda leaf: jax.ShapeDtypeStruct((size, *axes_of(leaf)[1:]), leaf.dtype)
        return {name: like(column) for name, column in inputs.items()}

    try:
        size, other = _SIZES
        outputs = outputs_of(resized(size))
        if all(leaf.shape[:1] == (size,) for leaf in jax.tree.leaves(outputs)):
            of_other = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((other, *leaf.shape[1:]), leaf.dtype), outputs
            )
        else:
            of_other = outputs_of(resized(other))
        return [(resized(size), outputs), (resized(other), of_other)]
    except Exception:
        # Some networks take batches of one size only.
        return [(resized(number_of_examples(inputs)), outputs_of(inputs))]


def check_by_shape(
    loss: Loss | None,
    metrics: Mapping[str, Callable[[Any, Batch], Any] | SummedMetric],
    cases: Sequence[tuple[Mapping[str, Any], Any]],
) -> None:
    """Checks a model's loss and metrics by shape, as far as that can be done without its data.

    The shapes of columns other than the inputs are guessed. A loss or metric raises only if its shape is
    wrong for every guess. The rest is checked with the data, before an experiment compiles anything. So
    is whether columns are broadcast, since a guess may have fewer axes than the column.

    Args:
      loss, metrics: of a Model. The loss is None, and metrics are empty, if they need no check.
      cases: of `cases_by_shape`.

    Raises:
      ValueError, TypeError: names the loss or metric.
    """
    if loss is not None:
        _check_with_guessed_columns(lambda *case: loss_of_right_shape("loss", loss, *case), cases)
    for name, statistic in metrics.items():
        _check_with_guessed_columns(
            lambda *case, n=name, s=statistic: statistic_of_right_shape(n, s, *case), cases
        )


def _check_with_guessed_columns(
    check: Callable[[Any, Batch], Any], cases: Sequence[tuple[Mapping[str, Any], Any]]
) -> None:
    """Raises the error of `check` unless some guessed columns pass it, or none can be evaluated."""
    refused: WrongShape | None = None
    guesses = 0
    names: list[str] = []
    while True:
        batch, outputs = cases[0]
        unknown = None
        kinds = itertools.product(range(len(_guesses(batch, outputs))), repeat=len(names))
        for kind in kinds:
            guesses += 1
            if guesses > _MOST_GUESSES:
                return
            try:
                for batch, outputs in cases:
                    columns = _guesses(batch, outputs)
                    guessed = {n: columns[k] for n, k in zip(names, kind, strict=True)}
                    jax.eval_shape(check, outputs, {**batch, **guessed})
                return
            except WrongShape as error:
                refused = refused or error
            except KeyError as missing:
                unknown = missing.args[0] if missing.args else None
                break
            except Exception:
                continue  # these columns do not fit
        if isinstance(unknown, str) and unknown not in names:
            names.append(unknown)
            continue
        if refused is not None and unknown is None:
            raise refused
        return


def _guesses(batch: Mapping[str, Any], outputs: Any) -> list[jax.ShapeDtypeStruct]:
    """Shapes that a further column may have: first those of labels, then of inputs and outputs."""
    size = number_of_examples(batch)
    known = [
        leaf.shape for leaf in jax.tree.leaves((outputs, dict(batch))) if leaf.shape[:1] == (size,)
    ]
    shapes = [(size,), (size, 1)]
    for shape in known:
        shapes += [shape[:length] for length in range(len(shape) - 1, len(shape) + 1) if length > 0]
    return [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in dict.fromkeys(shapes)
        for dtype in (jnp.int32, jnp.float32)
    ]
