"""Checks that padding does not count in networks' batch statistics, or in outputs without a batch axis.

A client's last batch is padded where its examples are not a multiple of the batch size. `mask` tells
networks which examples are padding. Batch statistics of a network that ignores `mask` count padding too,
and so does an output that is a mean over the batch, such as an auxiliary loss.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from fedcodist.core.inputs import ClientData
from fedcodist.core.padding_dependence import ReadOutputs, counts_padding, reads_padding, uses_axis

PyTree = Any
STATISTICS, OUTPUT = "statistics", "output"  # where padding counts
_HOW_TO_MEND = (
    "Let it take `mask` [batch] and give it to its normalisation (fedcodist.models.BatchNorm takes "
    "`mask`, Flax's `mask[:, None] > 0` for inputs [batch, features], and Haiku's none), or choose a "
    "batch size that divides the number of every client's examples."
)


class PaddedBatches(NamedTuple):
    """Batches that may be padded, for a network whose batch statistics count padding.

    Attributes:
      clients: indices of the clients that train on them; None where unknown.
      batch_size: examples per step.
      capacity: the most examples of a client in this training.
      num_examples: length of the columns.
      left_out: how many of a client's examples, at most half of them, this training does not see.
      counted_in: STATISTICS, or OUTPUT for an output without a batch axis.
    """

    clients: Any
    batch_size: int
    capacity: int
    num_examples: int
    left_out: int = 0
    counted_in: str = STATISTICS


_collected: contextvars.ContextVar[list[PaddedBatches] | None] = contextvars.ContextVar(
    "collected", default=None
)
_clients: contextvars.ContextVar[Any] = contextvars.ContextVar("clients", default=None)
_left_out: contextvars.ContextVar[int] = contextvars.ContextVar("left_out", default=0)


def training_clients(clients: Any) -> contextlib.AbstractContextManager[None]:
    """Declares the clients whose training is traced inside: indices of a pool's or a group's clients."""
    return _declared(_clients, clients)


def leaving_out(count: int) -> contextlib.AbstractContextManager[None]:
    """Declares that training traced inside leaves out `count` examples, at most half of a client's."""
    return _declared(_left_out, count)


@contextlib.contextmanager
def collected_padding() -> Iterator[list[PaddedBatches]]:
    """Collects the padded batches that are traced inside, in place of warnings."""
    padded: list[PaddedBatches] = []
    with _declared(_collected, padded):
        yield padded


@contextlib.contextmanager
def _declared(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def check_filled_batches(
    apply: Callable[..., Any],
    variables: PyTree,
    batch: Mapping[str, Any],
    batch_size: int,
    data: ClientData,
    outputs: Any,
    read: ReadOutputs,
) -> None:
    """Warns or raises if padding would count in batch statistics, or in an output that the loss reads.

    This happens when training is traced. `run_experiment` checks the clients' sizes itself.

    Args:
      apply: a Model's.
      variables: its Variables.
      batch: a batch.
      batch_size: examples per step.
      data: the client's examples; `data.size` is a tracer inside a compiled program.
      outputs: of the network for the batch.
      read: the loss.

    Raises:
      ValueError: names the network, if the client's size is known and not a multiple of the batch size.
    """
    if jax.tree.leaves(variables.mutable) and counts_padding(apply, variables, batch):
        counted_in = STATISTICS
    elif reads_padding(apply, variables, batch, outputs, read):
        counted_in = OUTPUT
    else:
        return
    if not isinstance(data.size, jax.core.Tracer):
        if int(data.size) % batch_size:
            why = not_a_multiple_text(f"A client has {int(data.size)}", batch_size)
            raise ValueError(padding_message(why, counted_in))
        return
    num_examples = len(next(iter(data.columns.values())))
    padded = _collected.get()
    if padded is not None:
        padded.append(
            PaddedBatches(
                _clients.get(),
                batch_size,
                data.capacity,
                num_examples,
                _left_out.get(),
                counted_in,
            )
        )
    else:
        # Python shows a warning of the same text and place only once.
        why = f"Clients may have a number of examples that is not a multiple of batch_size={batch_size}"
        warnings.warn(padding_message(why, counted_in), stacklevel=1)


def check_dealt_batches(
    apply: Callable[..., Any],
    variables: PyTree,
    batch: Mapping[str, Any],
    batch_size: int,
    devices: int,
    axis_name: str | None,
) -> None:
    """Raises or warns if the statistics of a batch that devices share would depend on their number.

    It raises ValueError if the batch is padded and the network counts padding, and warns if the network
    does not use `axis_name`: then the statistics are those of each device's part.

    Args:
      apply: a Model's.
      variables: its Variables.
      batch: one device's part.
      batch_size: examples of the whole batch.
      devices: how many share it.
      axis_name: the mesh axis over which they do.
    """
    if devices == 1 or not jax.tree.leaves(variables.mutable):
        return
    if batch_size % devices and counts_padding(apply, variables, batch):
        raise ValueError(padding_message(f"{devices} devices share batches of {batch_size}"))
    if not uses_axis(apply, variables, batch, axis_name):
        warnings.warn(
            "network should use `axis_name`: its batch statistics are those of the part of a batch that "
            f"each of {devices} devices has, so another number of devices gives another model. Pass it "
            "to the normalisation; it is an attribute of linen modules, and otherwise a parameter.",
            stacklevel=1,
        )


def check_masked(
    why: str, apply: Callable[..., Any], variables: PyTree, batch: Mapping[str, Any]
) -> None:
    """Raises ValueError, with the reason, if the network's batch statistics would count padding."""
    if jax.tree.leaves(variables.mutable) and counts_padding(apply, variables, batch):
        raise ValueError(padding_message(why))


def padding_message(why: str, counted_in: str = STATISTICS) -> str:
    """The message of the error and of the warning; `why` is a sentence without its full stop."""
    if counted_in == OUTPUT:
        return (
            "network must return an output that its loss reads per example, [batch, ...], or use "
            f"`mask`: otherwise padding counts in it. {why}. Return a term of the loss as [batch], or "
            "choose a batch size that divides the number of every client's examples."
        )
    return (
        "network must use `mask`: otherwise padding counts in its batch statistics. "
        f"{why}. {_HOW_TO_MEND}"
    )


def not_a_multiple_text(who_has: str, batch_size: int) -> str:
    """The sentence about a number of examples that does not fill batches."""
    return f"{who_has} examples, which is not a multiple of batch_size={batch_size}"
