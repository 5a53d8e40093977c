"""The orders in which FedMD's parties visit examples in this library's first round, for all programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

SEED = 0


def orders(parties: int, aligned: int, private: int) -> dict[str, np.ndarray]:
    """'digest' int32 [parties, aligned] and 'revisit' int32 [parties, private]: positions."""
    import jax
    import jax.numpy as jnp

    from fedcodist import keys
    from fedcodist.shuffling import permuted_positions

    root = keys.derive(jax.random.key(SEED), "client_update", 0)

    def order(party, purpose, size):
        key = keys.derive(root, party, purpose, "order")
        return np.asarray(permuted_positions(key, jnp.arange(size), size))

    with jax.enable_x64(False):
        return {
            purpose: np.stack([order(party, purpose, size) for party in range(parties)])
            for purpose, size in (("digest", aligned), ("revisit", private))
        }
