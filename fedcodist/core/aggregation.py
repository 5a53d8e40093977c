"""How client results become one aggregate, and how trees are summed over devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
      extra: pytree that is summed over clients for the method's own server half, or None.
    """

    update: PyTree
    mutable: PyTree
    weight: jax.Array
    client_state: PyTree
    metrics: dict[str, jax.Array]
    extra: PyTree = None


class Aggregate(NamedTuple):
    """What the server learns of a cohort: a pseudo-gradient, averaged mutable state, the sum of
    weights, and the sum of what clients sent besides."""

    pseudo_gradient: PyTree
    mutable: PyTree
    weight: jax.Array
    extra: PyTree = None


class Reduce(NamedTuple):
    """A reduction over clients: `finalize(sum of prepare(result, key), message, key)`.

    Sums work alike under a scan, over a vmapped axis and across devices, and they are what secure
    aggregation can protect: what must happen on a client goes into `prepare` (clipping,
    compression, masks), what the server does to the sum into `finalize` (unmasking, noise).

    Attributes:
      prepare: (ClientResult, the client's key) -> pytree of arrays to be summed.
      finalize: (sum, message, the round's key) -> Aggregate; message is what was broadcast.
    """

    prepare: Callable[[ClientResult, jax.Array], PyTree]
    finalize: Callable[[PyTree, PyTree, jax.Array], Aggregate]


def weighted_mean() -> Reduce:
    """The weighted mean of updates and mutable state, FedAvg's aggregate.

    If no client has any weight, the pseudo-gradient is zero and the mutable state is the one that
    was broadcast. Integers of mutable state, such as Haiku's counters of steps, stay integers.
    """

    def prepare(result, key):
        weigh = lambda leaf: leaf * result.weight.astype(_type_of_means(leaf))
        return (
            jax.tree.map(weigh, result.update),
            jax.tree.map(weigh, result.mutable),
            result.weight,
            result.extra,
        )

    def finalize(total, message, key):
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

    return Reduce(prepare, finalize)


def as_stored(mean: jax.Array, like: jax.Array) -> jax.Array:
    """A mean of the type of what it is of; of integers it is rounded."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        mean = jnp.round(mean)
    return mean.astype(like.dtype)


def _type_of_means(leaf: jax.Array) -> Any:
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.float32
