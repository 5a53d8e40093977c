"""Error feedback: the compression error of one message is added to the next one.

Seide et al. 2014, 1-Bit Stochastic Gradient Descent; Stich et al. 2018, https://arxiv.org/abs/1809.07599.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.compression.compressor import Compressor, Progress

PyTree = Any


def with_error_feedback(compressor: Compressor) -> Compressor:
    """Sends the tree plus the error of earlier messages, and keeps the error of this message.

    All messages and the memory add up to the trees that were to be sent, so nothing is lost, only
    delayed. The memory has the structure of the tree. Clients keep it in their client states.

    The compressor's error must be smaller than what it compresses, as that of `top_k`. `count_sketch`
    is no such compressor unless a few entries stand out from the others; the memory would grow.
    """

    def init(tree: PyTree) -> tuple[PyTree, PyTree]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
        return zeros, compressor.init(tree)

    def compress(
        tree: PyTree, memory: tuple[PyTree, PyTree], key: jax.Array, progress: Progress
    ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        error, inner = memory
        corrected = jax.tree.map(jnp.add, tree, error)
        message, inner = compressor.compress(corrected, inner, key, progress)
        sent = compressor.decompress(message, corrected)
        return message, (jax.tree.map(jnp.subtract, corrected, sent), inner)

    return compressor._replace(init=init, compress=compress)
