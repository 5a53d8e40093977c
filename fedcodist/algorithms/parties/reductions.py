"""Reductions of what parties send: the sum, and checks of whether a method gets sums or means."""

from typing import Any

import jax

from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce

PyTree = Any


def sums() -> Reduce:
    """The weighted sum of `sends`, for methods that divide by a number of their own."""

    def prepare(result: ClientResult, key: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: leaf * result.weight, result.update), result.weight

    def finalize(total: PyTree, message: PyTree, key: jax.Array) -> Aggregate:
        update, weight = total
        return Aggregate(update, {}, weight)

    return Reduce(prepare, finalize, is_sum=True)


def checked_sums(reduce: Reduce | None) -> Reduce:
    """The reduction of a method that divides sums itself; `sums()` if none is given.

    Raises:
      ValueError: names `reduce`, if it does not sum.
    """
    if reduce is None:
        return sums()
    if not reduce.is_sum:
        raise ValueError(
            "reduce must return sums, such as fedcodist.algorithms.parties.reductions.sums() or a "
            "reduction around it, compressed_reduce(compressor, sums()), got one whose is_sum is False."
        )
    return reduce


def checked_mean(reduce: Reduce | None) -> Reduce | None:
    """The reduction of a method that needs means; None, the weighted mean, if none is given.

    Raises:
      ValueError: names `reduce`, if it returns sums.
    """
    if reduce is not None and reduce.is_sum:
        raise ValueError(
            "reduce must return means, such as fedcodist.core.aggregation.weighted_mean() or a "
            "reduction around it, compressed_reduce(compressor), got one whose is_sum is True."
        )
    return reduce
