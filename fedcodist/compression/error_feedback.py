"""Error feedback (Seide et al., 2014; Stich et al., 2018): what one message lost, the next one has."""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.compression.compressor import Compressor

PyTree = Any


def with_error_feedback(compressor: Compressor) -> Compressor:
    """Sends the tree plus what earlier messages lost, and keeps what this one loses.

    So what was sent and what is kept add up to what was to be sent: nothing is lost, it is only late.
    The memory is a tree like the sender's; for clients it lies in the client store.
    """

    def init(tree):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
        return zeros, compressor.init(tree)

    def compress(tree, memory, key, progress):
        error, inner = memory
        wanted = jax.tree.map(jnp.add, tree, error)
        message, inner = compressor.compress(wanted, inner, key, progress)
        sent = compressor.decompress(message, wanted)
        return message, (jax.tree.map(jnp.subtract, wanted, sent), inner)

    return compressor._replace(init=init, compress=compress)
