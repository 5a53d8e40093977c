"""Batch statistics of networks that cannot leave out examples which only fill up a batch.

A client's last batch is filled up where its examples are not a multiple of the batch size. A network is
told by `mask`; one that does not use it would normalise by, and keep, statistics of what is not there.
"""

import contextlib
import contextvars
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fedcodist.core.inputs import ClientData

PyTree = Any
_HOW_TO_MEND = (
    "Let it take `mask` [batch] and give it to its normalisation (fedcodist.models.BatchNorm and Flax's "
    "take one), or choose a batch size that divides the number of every client's examples."
)


class Filled(NamedTuple):
    """Batches that may be filled up, of a network that counts what fills them.

    Attributes:
      clients: indices of those who train on them; None where that is not known.
      batch_size: examples per step.
      capacity: the most examples that a client trains on here.
      num_examples: how many the columns have.
    """

    clients: Any
    batch_size: int
    capacity: int
    num_examples: int


_collected: contextvars.ContextVar[list[Filled] | None] = contextvars.ContextVar(
    "collected", default=None
)
_clients: contextvars.ContextVar[Any] = contextvars.ContextVar("clients", default=None)
_OF_ROUNDS: Any = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def of_clients(clients: Any) -> Iterator[None]:
    """Whose training is traced inside: indices of a pool's or a group's clients."""
    token = _clients.set(clients)
    try:
        yield
    finally:
        _clients.reset(token)


@contextlib.contextmanager
def collected() -> Iterator[list[Filled]]:
    """Collects what is traced inside, in place of warnings."""
    found: list[Filled] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def of_round(round_: Callable[..., Any], found: list[Filled]) -> list[Filled]:
    """What tracing an algorithm's round collected, also where JAX had traced it before."""
    if found:
        _OF_ROUNDS[round_] = found
    return _OF_ROUNDS.get(round_, [])


def check_filled_batches(
    apply: Callable[..., Any],
    variables: PyTree,
    batch: Mapping[str, Any],
    batch_size: int,
    data: ClientData,
) -> None:
    """Where a client's batches are cut: whether examples that fill the last one are in batch statistics.

    Nothing is computed. Within `run_experiment` clients' sizes are known before, and checked there.

    Args:
      apply: a Model's.
      variables: its Variables.
      batch: a batch.
      batch_size: examples per step.
      data: the client's; its size is a tracer inside a compiled program.

    Raises:
      ValueError: one line; a size that is known and is not a multiple of the batch size.
    """
    if not jax.tree.leaves(variables.mutable) or not counts_padding(apply, variables, batch):
        return
    if not isinstance(data.size, jax.core.Tracer):
        if int(data.size) % batch_size:
            raise ValueError(counted(no_multiple(f"a client has {int(data.size)}", batch_size)))
        return
    rows = len(next(iter(data.columns.values())))
    found = _collected.get()
    if found is not None:
        found.append(Filled(_clients.get(), batch_size, data.capacity, rows))
    else:
        # Python shows a warning of one text and place a single time.
        warnings.warn(
            counted(no_multiple("clients may have a number of", batch_size)), stacklevel=1
        )


def check_dealt_batches(
    apply: Callable[..., Any],
    variables: PyTree,
    batch: Mapping[str, Any],
    batch_size: int,
    devices: int,
) -> None:
    """Raises one line where a batch that is dealt over devices is filled up and that would count.

    Args:
      apply: a Model's.
      variables: its Variables.
      batch: one device's part.
      batch_size: examples of the whole.
      devices: how many it is dealt over.
    """
    if batch_size % devices == 0 or not jax.tree.leaves(variables.mutable):
        return
    if counts_padding(apply, variables, batch):
        raise ValueError(counted(f"{devices} devices share batches of {batch_size}"))


def counted(why: str) -> str:
    """The line of the error and of the warning."""
    return (
        "network must use `mask`, or what only fills up a batch counts in its batch statistics: "
        f"{why}. {_HOW_TO_MEND}"
    )


def no_multiple(who_has: str, batch_size: int) -> str:
    """Says whose examples do not fill batches."""
    return f"{who_has} examples, no multiple of batch_size={batch_size}"


def counts_padding(apply: Callable[..., Any], variables: PyTree, batch: Mapping[str, Any]) -> bool:
    """Whether some mutable state depends, in training, on the batch and not on its mask. By shape."""
    like = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tree)
    size = jnp.shape(next(iter(batch.values())))[0]
    mask = jax.ShapeDtypeStruct((size,), jnp.float32)

    def statistics(batch, mask, variables, key):
        return apply(variables, batch, train=True, key=key, mask=mask)[1]

    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.make_jaxpr(statistics)(like(dict(batch)), mask, like(variables), key).jaxpr
    columns = len(jax.tree.leaves(dict(batch)))
    of_batch = _depending(program, program.invars[:columns])
    of_mask = _depending(program, program.invars[columns : columns + 1])
    return any(
        result in of_batch and result not in of_mask
        for result in program.outvars
        if not isinstance(result, Literal)
    )


def _depending(program, starts) -> set[Any]:
    """The variables of a program that depend on some of its inputs."""
    reached = set(starts)
    for operation in program.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in operation.invars):
            reached |= set(operation.outvars)
    return reached
