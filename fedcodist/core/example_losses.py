"""Per-example losses and metrics: checks of their shapes, and losses made from means over a batch."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.batches import number_of_examples
from fedcodist.core.mixed_examples import check_examples_do_not_mix, is_probed
from fedcodist.core.shape_checks import WrongShape, axes_of, described
from fedcodist.core.summed_metrics import SummedMetric

Batch = Mapping[str, jax.Array]
Loss = Callable[[Any, Batch], jax.Array]


def per_example(mean: Callable[[Any, Batch], jax.Array]) -> Loss:
    """Makes a per-example loss, [batch], from a mean over a batch, such as those in Flax's examples.

    `mean` is called with every example as a batch of one, so padding does not count. A column whose
    first axis is as long as the batch has one entry per example. Columns of other lengths are given
    whole. So a table, such as one of class weights, belongs into `mean` itself, not into the batch.

    Args:
      mean: (outputs, batch) -> scalar. All outputs must have the batch as their first axis.

    >>> import jax.numpy as jnp
    >>> loss = per_example(lambda outputs, batch: jnp.mean((outputs - batch['target']) ** 2))
    >>> loss(jnp.array([[1.0], [2.0]]), {'target': jnp.array([[0.0], [0.0]])})
    Array([1., 4.], dtype=float32)
    """

    def loss(outputs: Any, batch: Batch) -> jax.Array:
        size = axes_of(jax.tree.leaves(outputs)[0])[:1]
        if is_probed():  # a column of another length would be given whole
            return jnp.zeros(size)
        axes = {name: 0 if axes_of(column)[:1] == size else None for name, column in batch.items()}

        def of_one(outputs: Any, batch: Batch) -> jax.Array:
            as_batch = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
            alone = {n: column if axes[n] is None else column[None] for n, column in batch.items()}
            value = mean(as_batch(outputs), alone)
            if jnp.size(value) != 1:
                raise ValueError(
                    "per_example must be given a loss that returns one number for a batch, got "
                    f"{list(axes_of(value))} for a batch of one."
                )
            return jnp.reshape(value, ())

        return jax.vmap(of_one, in_axes=(0, axes))(outputs, dict(batch))

    return loss


def checked_loss(loss: Loss, outputs: Any, batch: Batch, name: str = "loss") -> jax.Array:
    """The loss of each example, [batch]. The check happens at trace time and costs nothing in a run.

    Raises:
      ValueError, TypeError: names the loss, if it has another shape, is of integers, or broadcasts a
        column against the outputs.
      Exception: of the loss itself, with a note that names it.
    """
    values = loss_of_right_shape(name, loss, outputs, batch)
    check_examples_do_not_mix(name, loss, outputs, batch)
    return values


def checked_statistic(
    name: str, statistic: Callable[[Any, Batch], Any] | SummedMetric, outputs: Any, batch: Batch
) -> Any:
    """A metric's values and weights, [batch] each; for a SummedMetric its sums, leaves [batch, ...].

    Raises:
      ValueError: names the metric, if it returns anything else, if it broadcasts a column against the
        outputs, or if a SummedMetric's `compute` does not return a scalar.
      Exception: of the metric itself, with a note that names it.
    """
    values = statistic_of_right_shape(name, statistic, outputs, batch)
    check_examples_do_not_mix(f"metrics[{name!r}]", lambda *case: statistic(*case), outputs, batch)
    return values


def loss_of_right_shape(name: str, loss: Loss, outputs: Any, batch: Batch) -> jax.Array:
    """As `checked_loss`, but without the search for examples that are mixed."""
    with _with_note(name):
        values = loss(outputs, batch)
    _check_values(name, values, number_of_examples(batch))
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} must be of real numbers, got {values.dtype}.")
    return values


def statistic_of_right_shape(
    name: str, statistic: Callable[[Any, Batch], Any] | SummedMetric, outputs: Any, batch: Batch
) -> Any:
    """As `checked_statistic`, but without the search for examples that are mixed."""
    if isinstance(statistic, SummedMetric):
        with _with_note(f"metrics[{name!r}]"):
            return _checked_sums(name, statistic, outputs, batch)
    with _with_note(f"metrics[{name!r}]"):
        pair = statistic(outputs, batch)
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise WrongShape(
            f"metrics[{name!r}] must return two arrays (values [batch], weights [batch]), got "
            f"{described(pair)}."
        )
    size = number_of_examples(batch)
    for part, values in zip(("values", "weights"), pair, strict=True):
        _check_values(f"metrics[{name!r}]'s {part}", values, size)
    return pair[0], pair[1]


def _checked_sums(name: str, metric: SummedMetric, outputs: Any, batch: Batch) -> Any:
    sums, size = jax.tree.map(jnp.asarray, metric.sums(outputs, batch)), number_of_examples(batch)
    for leaf in jax.tree.leaves(sums):
        if leaf.shape[:1] != (size,):
            raise WrongShape(
                f"metrics[{name!r}]'s sums must have one entry per example, [batch, ...] with batch = "
                f"{size}, got {described(leaf)}."
            )
    total = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], jnp.float32), sums)
    value = jax.eval_shape(metric.compute, total)
    if axes_of(value) != () or not hasattr(value, "dtype"):
        raise WrongShape(
            f"metrics[{name!r}]'s compute must return one number, got {described(value)}."
        )
    return sums


def _check_values(name: str, values: Any, size: int) -> None:
    if axes_of(values) == (size,) and not isinstance(values, tuple | list):
        return
    is_loss = name in ("loss", "loss_hook")
    help_ = " fedcodist.per_example makes one of a mean over the batch." if is_loss else ""
    raise WrongShape(
        f"{name} must have one number per example, [batch] = [{size}], got {described(values)}.{help_}"
    )


@contextlib.contextmanager
def _with_note(name: str) -> Iterator[None]:
    """Names the loss or metric in its errors.

    An error gets the note "in NAME", for the message of `check_experiment`. A WrongShape is one line
    that begins with the name.
    """
    try:
        yield
    except WrongShape as error:
        if not str(error).startswith(name):
            error.args = (f"{name}: {error}",)
        raise
    except Exception as error:
        error.add_note(f"in {name}")
        raise
