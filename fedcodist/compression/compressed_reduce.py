"""A reduction of compressed updates, for methods that take a `reduce`."""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.compression.compressor import Compressor
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Measured, Reduce, weighted_mean
from fedcodist.core.arguments import check_arguments

PyTree = Any


def compressed_reduce(compressor: Compressor, reduce: Reduce | None = None) -> Reduce:
    """The reduction of the updates that the server can restore from compressed messages.

    It is for methods of parties who send scores: `fed_md(..., reduce=compressed_reduce(compressor))`
    quantises them, with `quantisation(8)`. FD, FedProto and FedL2G need sums: for them it is
    `compressed_reduce(compressor, sums())`, with `fedcodist.algorithms.parties.reductions.sums`. A party
    of FD later subtracts its means as they were before compression, and messages of all three have
    counts. So these need a compressor of small errors for every number, such as quantisation with many
    bits, and not top-k. Bytes are measured: the metric `<party>/client_bytes_up` is their mean over the
    parties. For methods of one model use `compressed`, which compresses downloads too.

    Args:
      compressor: one without a memory, since a reduction keeps nothing from round to round. A compressor
        that changes during training is used with its settings at the end of training.
      reduce: the reduction of the restored updates; by default the weighted mean.

    Raises:
      ValueError: `reduce` is a secure sum, which must be outermost.
      ValueError: the compressor has a memory; raised when the method is traced.
    """
    check_arguments(compressed_reduce, locals())
    if reduce is not None and reduce.mask is not None:
        raise ValueError(
            "reduce must not be a secure sum: put the secure sum around compressed_reduce."
        )
    inner = weighted_mean() if reduce is None else reduce

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, Measured]:
        update = result.update
        if not jax.tree.leaves(update):  # a pass in which clients send nothing
            return inner.prepare(result, key), Measured(())
        memory = compressor.init(update)
        if jax.tree.leaves(memory):
            raise ValueError("compressor must not have a memory, such as an error feedback's.")
        message, _ = compressor.compress(update, memory, keys.derive(key, "uplink"), 1.0)
        restored = compressor.decompress(message, update)
        measured = jnp.asarray(compressor.payload(message), jnp.float32), jnp.ones((), jnp.float32)
        return inner.prepare(result._replace(update=restored), key), Measured(measured)

    def finalize(total: tuple[PyTree, Measured], message: PyTree, key: jax.Array) -> Aggregate:
        inner_total, (measured,) = total
        aggregate = inner.finalize(inner_total, message, key)
        if not measured:
            return aggregate
        sum_of_bytes, count = measured
        mean = sum_of_bytes / jnp.maximum(count, 1)
        return aggregate._replace(metrics={**aggregate.metrics, "client_bytes_up": mean})

    return Reduce(prepare, finalize, bound=inner.bound, is_sum=inner.is_sum)
