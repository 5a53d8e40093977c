"""The state from which another run begins: `Experiment.start`."""

from typing import Any

import jax

from fedcodist.core.method import FederatedAlgorithm

PyTree = Any


def restarted(algorithm: FederatedAlgorithm, state: PyTree) -> PyTree:
    """The last state of one run as the first state of another one, leaves [seeds, ...].

    The new run counts its rounds from 0, and its clients have kept nothing. What depends on the earlier
    run's rounds or on what its clients kept begins anew: by `algorithm.restart`, and by the method
    `without_clients` of every server state that has it, such as those of SCAFFOLD and FedGKD.
    """
    has_clients = lambda node: hasattr(node, "without_clients")
    state = jax.tree.map(
        lambda node: node.without_clients() if has_clients(node) else node,
        state,
        is_leaf=has_clients,
    )
    return state if algorithm.restart is None else jax.vmap(algorithm.restart)(state)
