"""A reduction that sums fixed-point numbers with pairwise masks, so that the server sees only the sum.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017,
https://eprint.iacr.org/2017/281. Inside a compiled round a random key stands for the seed on which two
clients agree; `secure_sum_protocol` has the protocol itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Measured, Reduce, weighted_mean
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.privacy.fixed_point import MOST_BITS, FixedPoint, decoded, encoded, modulo
from fedcodist.privacy.secure_sum_bytes import agreement_bytes, vector_bytes
from fedcodist.privacy.secure_sum_dropouts import (
    Attendance,
    check_dropout,
    dropout_metrics,
    drops_out,
    is_discarded,
    partners,
)

PyTree = Any


class Prepared(NamedTuple):
    """What a client sends, or the sum of it.

    Attributes:
      numbers: what the inner reduction sums, as FixedPoint.
      flags: (was clipped, is not finite), as FixedPoint; () if nothing is sent.
      attendance: `Measured` with an Attendance, () if no client can drop out.
    """

    numbers: PyTree
    flags: tuple[FixedPoint, ...]
    attendance: Any = ()


def secure_sum_reduce(
    num_clients: int,
    value_range: float,
    max_weight: float = 1.0,
    bits: int = 32,
    masks: bool = True,
    reduce: Reduce | None = None,
) -> Reduce:
    """The reduction as a secure sum: of the clients' messages the server sees only the sum.

    It is for methods of parties: `fed_md(..., reduce=secure_sum_reduce(10, value_range=50))`. Methods of
    one model use `secure_sum`, which also documents what is hidden and what is lost. It goes around
    compression and clipping: `secure_sum_reduce(10, 50, reduce=compressed_reduce(quantisation(8)))`. FD,
    FedProto and FedL2G need `reduce=sums()`, with `fedcodist.algorithms.parties.reductions.sums`. The
    metrics are `<party>/client_bytes_up` and `<party>/client_clipped_share`, how many parties have a
    number out of range, by `num_clients`.

    Args:
      num_clients, value_range, max_weight, bits, masks: as in `secure_sum`.
      reduce: the reduction to compute securely; by default the weighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(secure_sum_reduce, locals())
    inner = weighted_mean() if reduce is None else reduce
    summed = fixed_point_reduce(inner, num_clients, value_range, max_weight, bits, masks)

    def finalize(total: Prepared, message: PyTree, key: jax.Array) -> Aggregate:
        aggregate = summed.finalize(total, message, key)
        if not _is_summed(total):
            return aggregate
        measured = {
            "client_bytes_up": jnp.float32(bytes_up(total, num_clients, bits)),
            "client_clipped_share": modulo(total.flags[0].values, bits) / num_clients,
        }
        return aggregate._replace(metrics={**aggregate.metrics, **measured})

    return summed._replace(finalize=finalize)


def fixed_point_reduce(
    inner: Reduce,
    num_clients: int,
    value_range: float,
    max_weight: float,
    bits: int,
    masks: bool,
    dropout: float = 0.0,
    is_private: bool = False,
) -> Reduce:
    """`secure_sum_reduce` without its metrics, for `secure_sum`, whose clients report their own.

    If norms are clipped, by `inner` or (`is_private`) before, numbers are rounded towards zero.

    A client who is alone in its cohort sends zeros, unless its result is private (`is_private`).
    With `dropout`, as in `secure_sum`, the aggregate has the metrics of `dropout_metrics`. Of a sum that
    is discarded `inner` gets zeros.
    """
    check_secure_sum(inner, num_clients, value_range, max_weight, bits)
    check_dropout(dropout)
    largest = _largest(value_range, max_weight)
    most = _most(num_clients, bits)
    step = largest / most
    # After rounding up, a clipped update could be longer than the noise is for.
    keeps_norms = is_private or inner.bound is not None

    def prepare(result: ClientResult, key: jax.Array) -> Prepared:
        if not jax.tree.leaves(result.update):  # a pass in which clients send nothing
            return Prepared(inner.prepare(result, key), ())
        if inner.bound is not None:  # clip norms before single numbers
            result = result._replace(update=inner.bound(result.update))
        prepared = inner.prepare(bounded(result, value_range, max_weight), key)
        # `inner.prepare` may turn numbers in range into larger ones.
        leaves = _sent_leaves(prepared)
        is_larger = _any(leaves, lambda leaf: jnp.abs(leaf) > largest * (1 + 1e-6))
        # An exact number of clipped clients is no part of what epsilon covers.
        is_clipped = jnp.zeros((), bool)
        if not is_private:
            is_clipped = exceeds(result, value_range, max_weight) | is_larger
        # Integers have no NaN, so a client with NaN sends a flag beside the numbers.
        sent = (result.update, result.mutable, result.weight, result.extra, leaves)
        is_broken = _any(sent, lambda leaf: ~jnp.isfinite(leaf))
        flags = tuple(
            FixedPoint(flag.astype(jnp.uint32), "bool") for flag in (is_clipped, is_broken)
        )
        encode = lambda leaf: encoded(leaf, step, most, bits, towards_zero=keeps_norms)
        attendance = Measured(Attendance(jnp.int32(1), jnp.int32(0))) if dropout else ()
        return Prepared(_of_sent_leaves(encode, prepared), flags, attendance)

    def mask(prepared: Prepared, client: jax.Array, clients: jax.Array, key: jax.Array) -> Prepared:
        if not _is_summed(prepared):
            return prepared
        if not 2 <= len(clients) <= num_clients:
            raise ValueError(
                f"num_clients must be at least the cohort's size and the cohort at least 2 clients to "
                f"sum securely, got num_clients={num_clients} and a cohort of {len(clients)}."
            )
        if not is_private:
            # The sum of one vector would be this vector. In private sums noise hides a client who is
            # alone, and whether a client sends must not depend on who else is there.
            prepared = _zeros_where(jnp.sum(clients >= 0) < 2, prepared)
        if dropout:
            prepared = _left_out(prepared, drops_out(client, key, dropout))
            clients = partners(client, clients, key, dropout)
        if not masks:
            return prepared
        sizes = [leaf.size for leaf in _sent_leaves(prepared)]
        all_masks = sum_of_masks(client, clients, key, sum(sizes))
        of_leaves = iter(jnp.split(all_masks, np.cumsum(sizes)[:-1].tolist()))
        add = lambda leaf: modulo(leaf + next(of_leaves).reshape(leaf.shape), bits)
        return _of_sent_leaves(add, prepared)

    def finalize(total: Prepared, message: PyTree, key: jax.Array) -> Aggregate:
        if not _is_summed(total):
            return inner.finalize(total.numbers, message, key)
        if dropout:
            # The server could not remove the masks, so it would have no sum.
            total = _zeros_where(is_discarded(total.attendance.values), total)
        is_broken = modulo(total.flags[1].values, bits) > 0
        decode = lambda number: decoded(number, step, bits, is_broken)
        numbers = _of_sent_leaves(decode, total.numbers, FixedPoint)
        aggregate = inner.finalize(numbers, message, key)
        if not dropout:
            return aggregate
        size = vector_bytes(sum(leaf.size for leaf in _sent_leaves(total)), bits)
        metrics = dropout_metrics(total.attendance.values, num_clients, size)
        return aggregate._replace(metrics={**aggregate.metrics, **metrics})

    def bound(update: PyTree) -> PyTree:
        return _clipped(update if inner.bound is None else inner.bound(update), value_range)

    return Reduce(prepare, finalize, mask=mask, bound=bound, is_sum=inner.is_sum)


def check_secure_sum(
    inner: Reduce, num_clients: int, value_range: float, max_weight: float, bits: int
) -> None:
    """Raises ValueError or TypeError that names the argument."""
    check_integer("num_clients", num_clients, low=2)
    check_number("value_range", value_range, above=0)
    check_number("max_weight", max_weight, above=0)
    check_integer("bits", bits, low=2, high=MOST_BITS)
    if _most(num_clients, bits) < 1:
        raise ValueError(
            f"bits must be enough for {num_clients} clients to count to 1 each, at least "
            f"{int(np.ceil(np.log2(num_clients + 1))) + 1}, got {bits}."
        )
    if inner.mask is not None:
        raise ValueError("reduce must not be a secure sum already.")


def resolution(num_clients: int, value_range: float, max_weight: float, bits: int) -> float:
    """The step of the fixed-point numbers, to whose multiples clients round."""
    return _largest(value_range, max_weight) / _most(num_clients, bits)


def bytes_up(prepared: PyTree, num_clients: int, bits: int) -> int:
    """Bytes that a client uploads in a round: the masked vector, keys and shares."""
    size = sum(int(leaf.size) for leaf in _sent_leaves(prepared))
    return vector_bytes(size, bits) + agreement_bytes(num_clients).up


def bounded(result: ClientResult, value_range: float, max_weight: float) -> ClientResult:
    """The client's result with every number clipped to the range, and the weight to `max_weight`."""
    update, mutable = _clipped((result.update, result.mutable), value_range)
    extra = _clipped(result.extra, _range_of_extra(value_range))
    weight = jnp.minimum(result.weight, max_weight).astype(result.weight.dtype)
    return result._replace(update=update, mutable=mutable, weight=weight, extra=extra)


def exceeds(result: ClientResult, value_range: float, max_weight: float) -> jax.Array:
    """Whether `bounded` changes anything, a scalar bool."""
    is_outside = _any(
        (result.update, result.mutable), lambda leaf: jnp.abs(leaf) > value_range
    ) | _any(result.extra, lambda leaf: jnp.abs(leaf) > _range_of_extra(value_range))
    return is_outside | (result.weight > max_weight)


def sum_of_masks(client: jax.Array, clients: jax.Array, key: jax.Array, length: int) -> jax.Array:
    """The sum of a client's masks for all other clients, uint32 [length].

    Of every two clients the one with the smaller index adds their mask and the other subtracts it, so
    that the masks of all clients add up to 0 modulo 2^32.
    """

    def add(place: jax.Array, total: jax.Array) -> jax.Array:
        other = clients[place]
        seed = keys.derive(key, jnp.minimum(client, other), jnp.maximum(client, other))
        mask = jax.random.bits(seed, (length,), jnp.uint32)
        signed = jnp.where(client < other, mask, jnp.where(client > other, -mask, 0))
        return total + jnp.where(other < 0, 0, signed)  # below 0: an empty slot

    return jax.lax.fori_loop(0, len(clients), add, jnp.zeros(length, jnp.uint32))


def _left_out(prepared: Prepared, is_dropped: jax.Array) -> Prepared:
    """What is left of a client: if `is_dropped`, zeros, and it counts as one who dropped out."""
    there = prepared.attendance.values.there  # 0 for a party that another device runs
    counted = Attendance(there, jnp.where(is_dropped, there, 0))
    return _zeros_where(is_dropped, prepared)._replace(attendance=Measured(counted))


def _zeros_where(is_so: jax.Array, prepared: Prepared) -> Prepared:
    """The same, but zeros in place of all numbers and flags if `is_so`."""
    return _of_sent_leaves(lambda leaf: jnp.where(is_so, jnp.uint32(0), leaf), prepared)


def _clipped(tree: PyTree, value_range: float) -> PyTree:
    clip = lambda leaf: jnp.clip(leaf, -value_range, value_range).astype(leaf.dtype)
    return jax.tree.map(clip, tree)


def _range_of_extra(value_range: float) -> float:
    """That of a client's `extra`: it may say with 0 and 1 which parameters the client had."""
    return max(value_range, 1.0)


def _largest(value_range: float, max_weight: float) -> float:
    """The largest magnitude of a weighted number in range, and of a weight."""
    return max(value_range, 1.0) * max_weight


def _most(num_clients: int, bits: int) -> int:
    """The largest integer per client for which the sum of all clients stays below 2^(bits - 1)."""
    return (2 ** (bits - 1) - 1) // num_clients


def _any(tree: PyTree, is_so: Any) -> jax.Array:
    """Whether `is_so` holds for any number of a tree, a scalar bool."""
    is_any_so = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(tree):
        is_any_so |= jnp.any(is_so(leaf))
    return is_any_so


def _of_sent_leaves(function: Any, tree: PyTree, kind: Any = ()) -> PyTree:
    """Applies the function to all leaves that clients send; `Measured` nodes are not changed.

    Args:
      function: of a leaf, or of a node of class `kind`.
      tree: a prepared result, or the sum of several.
      kind: a class whose instances are treated as leaves.
    """
    return jax.tree.map(
        lambda node: node if isinstance(node, Measured) else function(node),
        tree,
        is_leaf=lambda node: isinstance(node, (Measured, kind) if kind else Measured),
    )


def _sent_leaves(tree: PyTree) -> list[Any]:
    """The leaves that clients send, without `Measured` nodes, in the tree's order."""
    is_measured = lambda node: isinstance(node, Measured)
    nodes = jax.tree.leaves(tree, is_leaf=is_measured)
    return [node for node in nodes if not is_measured(node)]


def _is_summed(prepared: Prepared) -> bool:
    """Whether `prepare` has made fixed-point numbers; not in a pass in which nothing is sent."""
    return prepared.flags != ()
