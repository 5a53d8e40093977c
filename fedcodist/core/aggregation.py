"""Client results, and reductions that combine them into one aggregate."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import keys

PyTree = Any


class ClientResult(NamedTuple):
    """What one client returns.

    Attributes:
      update: pytree like the parameters; for FedAvg the parameters received minus the parameters
        after local training, so it has a gradient's sign.
      mutable: the client's mutable state (such as BatchNorm statistics) after local training.
      weight: scalar weight in the aggregate, such as the number of examples.
      client_state: what the client keeps for its next participation, or None.
      metrics: dict of scalars, or of arrays to be averaged over clients; `num_steps` is among them.
      extra: pytree that is summed over clients for the method's `server_update`, or None.
    """

    update: PyTree
    mutable: PyTree
    weight: jax.Array
    client_state: PyTree
    metrics: dict[str, jax.Array]
    extra: PyTree = None


class Aggregate(NamedTuple):
    """What the server gets from a cohort.

    Attributes:
      pseudo_gradient: pytree like the parameters, the mean update.
      mutable: averaged mutable state.
      weight: scalar, the sum of the clients' weights.
      extra: the sum of the clients' `extra`, or None.
      metrics: name -> scalar, what the reduction measures of a round, such as how many clients dropped
        out. A pool reports them beside the means of its clients' metrics, `client_<name>`, and they must
        have other names. In a method of parties every party reports them.
    """

    pseudo_gradient: PyTree
    mutable: PyTree
    weight: jax.Array
    extra: PyTree = None
    metrics: Mapping[str, jax.Array] = {}


class Measured(NamedTuple):
    """A simulation's measurements of clients' messages, such as bytes: summed like them, not sent."""

    values: PyTree


class Reduce(NamedTuple):
    """A reduction over clients: `finalize(sum of prepare(result, key), message, key)`.

    Sums are the same under a scan, over a vmapped axis and across devices, and secure aggregation can
    protect them. `prepare` has the steps on a client, such as clipping and compression. `finalize` has
    the server's steps on the sum, such as noise.

    Attributes:
      prepare: (ClientResult, the client's key) -> pytree of arrays to be summed.
      finalize: (sum, message, the round's key) -> Aggregate; message is what was broadcast.
      is_mean: whether the aggregate is the weighted mean of updates and mutable state, and the sum of
        `extra`. The aggregate of a single client is then its own update. Privacy needs this.
      mask: (prepared, the client's index, the indices of all clients of the round with -1 in empty
        slots, a key that they share) -> what the client sends. None: it sends `prepared` unchanged.
        The masks of all clients sum to zero, so `finalize` does not need them.
      bound: a client's update -> the update that `prepare` uses in its place, such as a clipped one. It
        is for methods whose clients continue from what they sent. None: `prepare` changes no update.
      is_sum: whether the aggregate's pseudo-gradient is a sum of updates, with noise or without.
        Methods that divide it themselves, such as FD, need this.
    """

    prepare: Callable[[ClientResult, jax.Array], PyTree]
    finalize: Callable[[PyTree, PyTree, jax.Array], Aggregate]
    is_mean: bool = False
    mask: Callable[[PyTree, jax.Array, jax.Array, jax.Array], PyTree] | None = None
    bound: Callable[[PyTree], PyTree] | None = None
    is_sum: bool = False


def weighted_mean() -> Reduce:
    """The weighted mean of updates and mutable state, FedAvg's aggregate.

    If no client has any weight, the pseudo-gradient is zero and the mutable state is the broadcast one.
    Integers in mutable state, such as Haiku's step counters, stay integers.
    """

    def prepare(result: ClientResult, key: jax.Array) -> PyTree:
        weigh = lambda leaf: leaf * result.weight.astype(_type_of_means(leaf))
        return (
            jax.tree.map(weigh, result.update),
            jax.tree.map(weigh, result.mutable),
            result.weight,
            result.extra,
        )

    def finalize(total: PyTree, message: PyTree, key: jax.Array) -> Aggregate:
        update, mutable, weight, extra = total
        safe = jnp.where(weight > 0, weight, 1)
        pseudo_gradient = jax.tree.map(lambda leaf: leaf / safe.astype(leaf.dtype), update)
        mutable = jax.tree.map(
            lambda leaf, old: jnp.where(
                weight > 0, as_stored(leaf / safe.astype(leaf.dtype), old), old
            ),
            mutable,
            message.mutable,
        )
        return Aggregate(pseudo_gradient, mutable, weight, extra)

    return Reduce(prepare, finalize, is_mean=True)


def divided_by_holders(total: PyTree, holders: PyTree) -> PyTree:
    """The mean of every parameter over its holders, the clients that had it; 0 if no client had it.

    Args:
      total: the weighted sum over the holders.
      holders: of the same structure and shapes, the sum of the holders' weights.
    """
    return jax.tree.map(lambda leaf, by: leaf / jnp.where(by > 0, by, 1), total, holders)


def mask_of_round(
    reduce: Reduce, clients: jax.Array, key: jax.Array, present: jax.Array | None = None
) -> Callable[[PyTree, jax.Array], PyTree] | None:
    """(prepared, client) -> what the client sends in one round; None if nothing is masked.

    Args:
      reduce: the reduction that defines the masks.
      clients: int32 [slots], indices.
      key: the round's.
      present: bool [slots], who takes part; None: all.
    """
    mask = reduce.mask
    if mask is None:
        return None
    shared = keys.derive(key, "masks")
    taking_part = clients if present is None else jnp.where(present, clients, -1)
    return lambda prepared, client: mask(prepared, client, taking_part, shared)


def as_stored(mean: jax.Array, like: jax.Array) -> jax.Array:
    """A mean in the dtype of the averaged values, rounded if these are integers."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        mean = jnp.round(mean)
    return mean.astype(like.dtype)


def _type_of_means(leaf: jax.Array) -> Any:
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.float32
