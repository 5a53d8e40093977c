"""Per-example losses and metrics: checks of their shapes, and losses made from means over a batch."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.used_arguments import inner_jaxprs

Batch = Mapping[str, jax.Array]
Loss = Callable[[Any, Batch], jax.Array]
# Two sizes of batches, so that a constant is not taken for one number per example.
_SIZES = (11, 13)
_MOST_GUESSES = 300
# Two lengths that no axis of an example has: primes.
_LENGTHS = (1009, 1013)
_is_probed: contextvars.ContextVar[bool] = contextvars.ContextVar("is_probed", default=False)


class WrongShape(ValueError):
    """A loss or a metric that is not one number per example."""


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
        size = _shape(jax.tree.leaves(outputs)[0])[:1]
        if _is_probed.get():  # a column of another length would be given whole
            return jnp.zeros(size)
        axes = {name: 0 if _shape(column)[:1] == size else None for name, column in batch.items()}

        def of_one(outputs: Any, batch: Batch) -> jax.Array:
            as_batch = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
            alone = {n: column if axes[n] is None else column[None] for n, column in batch.items()}
            value = mean(as_batch(outputs), alone)
            if jnp.size(value) != 1:
                raise ValueError(
                    "per_example must be given a loss that returns one number for a batch, got "
                    f"{list(_shape(value))} for a batch of one."
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
    values = _loss_of_right_shape(name, loss, outputs, batch)
    _check_examples_do_not_mix(name, loss, outputs, batch)
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
    values = _statistic_of_right_shape(name, statistic, outputs, batch)
    _check_examples_do_not_mix(f"metrics[{name!r}]", lambda *case: statistic(*case), outputs, batch)
    return values


def _loss_of_right_shape(name: str, loss: Loss, outputs: Any, batch: Batch) -> jax.Array:
    with _with_note(name):
        values = loss(outputs, batch)
    _check_values(name, values, number_of_examples(batch))
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} must be of real numbers, got {values.dtype}.")
    return values


def _statistic_of_right_shape(
    name: str, statistic: Callable[[Any, Batch], Any] | SummedMetric, outputs: Any, batch: Batch
) -> Any:
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
    if _shape(value) != () or not hasattr(value, "dtype"):
        raise WrongShape(
            f"metrics[{name!r}]'s compute must return one number, got {described(value)}."
        )
    return sums


def _check_examples_do_not_mix(
    name: str, function: Callable[[Any, Batch], Any], outputs: Any, batch: Batch
) -> None:
    """Raises WrongShape for a function that broadcasts a column against the outputs or another column.

    Every example would be compared with all examples of the batch, padding too. So each column in turn,
    and then the outputs, get another length than the rest. A broadcast makes an array that has both
    lengths among its axes. A look-up by position does not. A loss of `per_example` passes, since it
    gives each example its own columns.
    """
    size = number_of_examples(batch)
    if size < 2 or _is_probed.get():  # no other examples, or a loss inside a loss
        return

    def resized(tree: Any, length: int) -> Any:
        of = lambda shape: (length, *shape[1:]) if shape[:1] == (size,) else shape
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(of(_shape(leaf)), leaf.dtype), tree)

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


def _has_array_with_axes(program: Any, lengths: set[int]) -> bool:
    """Whether a jaxpr computes an array that has all these lengths, in loops, branches and calls too."""
    return any(
        any(lengths <= set(_shape(result.aval)) for result in equation.outvars)
        or any(
            _has_array_with_axes(inner, lengths)
            for inner in (*inner_jaxprs(equation), *equation.params.get("branches", ()))
        )
        for equation in program.eqns
    )


def _shapes_of(tree: Any) -> str:
    return ", ".join(str(list(_shape(leaf))) for leaf in jax.tree.leaves(tree))


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


def number_of_examples(batch: Batch) -> int:
    """The length of a batch's first column, padding included."""
    return _shape(next(iter(batch.values())))[0]


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
        like = lambda leaf: jax.ShapeDtypeStruct((size, *_shape(leaf)[1:]), leaf.dtype)
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
        _check_with_guessed_columns(lambda *case: _loss_of_right_shape("loss", loss, *case), cases)
    for name, statistic in metrics.items():
        _check_with_guessed_columns(
            lambda *case, n=name, s=statistic: _statistic_of_right_shape(n, s, *case), cases
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


def _check_values(name: str, values: Any, size: int) -> None:
    if _shape(values) == (size,) and not isinstance(values, tuple | list):
        return
    is_loss = name in ("loss", "loss_hook")
    help_ = " fedcodist.per_example makes one of a mean over the batch." if is_loss else ""
    raise WrongShape(
        f"{name} must have one number per example, [batch] = [{size}], got {described(values)}.{help_}"
    )


def described(value: Any) -> str:
    """What a function returned, for messages: type and length, or dtype and shape."""
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if not hasattr(value, "dtype"):
        return f"{value!r}"[:50]
    return f"{value.dtype}{list(_shape(value))}"


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
