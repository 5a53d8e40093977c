"""The library's random draws for parties and MHD's clients in the first rounds, for all programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from peers import workload as work

SEED = 0


def _on_the_processor() -> None:
    """Uses the CPU: JAX would occupy most of an accelerator's memory as long as this process lives."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def orders(parties: int, aligned: int, private: int) -> dict[str, np.ndarray]:
    """'digest' int32 [parties, aligned] and 'revisit' int32 [parties, private]: positions."""
    import jax
    import jax.numpy as jnp

    from fedcodist.core import keys
    from fedcodist.core.shuffling import permuted_positions

    _on_the_processor()
    root = keys.derive(jax.random.key(SEED), "client_update", 0)

    def order(party, purpose, size):
        key = keys.derive(root, party, purpose, "order")
        return np.asarray(permuted_positions(key, jnp.arange(size), size))

    with jax.enable_x64(False):
        return {
            purpose: np.stack([order(party, purpose, size) for party in range(parties)])
            for purpose, size in (("digest", aligned), ("revisit", private))
        }


def htfl_orders(method: str, clients: int, private: int) -> np.ndarray:
    """Positions of examples in the order in which local training visits them, for the first rounds.

    Returns:
      int32 [clients, HTFL_ORDERS, private].
    """
    import jax
    import jax.numpy as jnp

    from fedcodist.core import keys
    from fedcodist.core.shuffling import permuted_positions

    _on_the_processor()
    stream = "isolated" if method == "local_only" else "client_update"

    def order(client, round):
        key = keys.derive(jax.random.key(SEED), stream, round, client, "order")
        return np.asarray(permuted_positions(key, jnp.arange(private), private))

    with jax.enable_x64(False):
        rounds = range(work.HTFL_ORDERS)
        found = [[order(client, round) for round in rounds] for client in range(clients)]
    return np.array(found, np.int32)


def mhd_orders(clients: int, steps: int, private: int) -> dict[str, np.ndarray]:
    """The entries of `workload.Pool.orders` for MHD, each int32 [clients, ...]."""
    import jax
    import jax.numpy as jnp

    from fedcodist.algorithms.graph import graphs
    from fedcodist.algorithms.graph.mhd_exchange import exchange_schedule
    from fedcodist.algorithms.parties.groups import PartyGroup
    from fedcodist.core import keys
    from fedcodist.core.local_steps import CLIENT_STEPS
    from fedcodist.core.shuffling import stream_positions

    _on_the_processor()
    root, shape = jax.random.key(SEED), (steps, work.MHD_BATCH)

    def stream(key, size):
        return stream_positions(key, 0, steps * work.MHD_BATCH, size).reshape(shape)

    def teacher(key, step):
        own = keys.derive(key, "step", step, "further", "teachers")
        return jax.random.choice(own, clients, (1,), replace=False)[0]

    def of(client):
        key = keys.derive(root, CLIENT_STEPS, client)
        return {
            "private": stream(keys.derive(key, "private"), private),
            "public": stream(keys.derive(root, "public", client), work.UNLABELLED),
            "drawn": jax.vmap(lambda step: teacher(key, step))(jnp.arange(steps)),
        }

    with jax.enable_x64(False):
        drawn = jax.jit(lambda: jax.lax.map(of, jnp.arange(clients)))()
    everybody = {"clients": PartyGroup(None, np.arange(clients))}  # the model is not used
    schedule = exchange_schedule(
        everybody, graphs.complete(clients), clients, work.MHD_ROUNDS, SEED
    )
    exchanged = {
        "first": schedule.first_source,
        "replaced": schedule.replaced.T,
        "source": schedule.source.T,
    }
    return {name: np.asarray(each, np.int32) for name, each in (drawn | exchanged).items()}
