"""The compressors that configs name: what they lose does not grow over rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.compression.count_sketch import count_sketch
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.config import defaults
from fedcodist.config.compression import COMPRESSORS
from fedcodist.configs import digits_compression

UPDATE = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(49, 49)), jnp.float32)}
ROUNDS = 60


def restored(compressor):
    """[rounds, entries]: what the receiver gets of one dense update that is sent in every round."""

    @jax.jit
    def send(memory, key, progress):
        message, memory = compressor.compress(UPDATE, memory, key, progress)
        return compressor.decompress(message, UPDATE)["w"].ravel(), memory

    memory, received = compressor.init(UPDATE), []
    for round in range(ROUNDS):
        values, memory = send(memory, jax.random.key(round), jnp.float32(round / ROUNDS))
        received.append(np.asarray(values))
    return np.stack(received)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "none"])
def test_messages_do_not_grow(name):
    config = digits_compression.get_config("fed_avg,count_sketch")
    settings = config.training.compression
    assert set(defaults.compression()) <= set(settings)
    norms = np.linalg.norm(restored(COMPRESSORS[name](settings)), axis=1)
    assert norms[-20:].max() < 4 * np.linalg.norm(UPDATE["w"])


def test_a_sketch_with_error_feedback_grows():
    """Why configs have none: the largest estimates of a dense update are collisions."""
    largest = np.abs(restored(with_error_feedback(count_sketch(3, 160, 120)))).max(axis=1)
    assert largest[20] > 1e3 * np.abs(UPDATE["w"]).max()
