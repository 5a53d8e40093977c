"""FedJAX's view of a method: `init(key)` and `apply(server_state, clients)`, one call per round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import Cohort
from fedcodist.core.method import FederatedMethod

PyTree = Any


class FedJAXAlgorithm(NamedTuple):
    """What FedJAX calls a FederatedAlgorithm.

    Attributes:
      init: key -> server state. FedJAX's takes the model's parameters.
      apply: (server state, clients, round=0) -> (server state, diagnostics).
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[..., tuple[PyTree, dict[str, dict[str, float]]]]


def as_fedjax(
    method: FederatedMethod, hyper: PyTree = None, execution: Execution = Execution("eager")
) -> FedJAXAlgorithm:
    """Offers a method the way FedJAX does, one call per round, for debugging and for old notebooks.

    `apply(server_state, clients, round=0)` takes a sequence of (client_id, columns, key) and returns
    (server_state, diagnostics) with diagnostics[client_id] = that client's metrics. By default
    clients run eagerly, so prints and debuggers work inside `client_update`.

    Raises:
      ValueError: a method whose clients keep something, such as SCAFFOLD's variates: FedJAX's clients
        are forgotten after their round.
    """
    if jax.tree.leaves(method.init_client_state()):
        raise ValueError(
            "method must be one whose clients keep nothing between rounds; SCAFFOLD, FedKD and memories "
            "of compressors need an algorithm, such as independent_pools."
        )
    hyper = method.hyper if hyper is None else hyper

    def apply(
        server_state, clients: Sequence[tuple[Any, Mapping[str, np.ndarray], jax.Array]], round=0
    ):
        if not clients:
            raise ValueError("clients must hold at least one (client_id, columns, key), got none.")
        ids, datasets, client_keys = zip(*clients, strict=True)
        sizes = np.array([len(next(iter(columns.values()))) for columns in datasets], np.int32)
        names = datasets[0].keys()
        cohort = Cohort(
            columns={n: jnp.concatenate([jnp.asarray(d[n]) for d in datasets]) for n in names},
            clients=jnp.arange(len(ids), dtype=jnp.int32),
            starts=jnp.asarray(np.concatenate([[0], np.cumsum(sizes)[:-1]]), jnp.int32),
            sizes=jnp.asarray(sizes),
            capacity=int(sizes.max()),
        )
        message = method.broadcast(server_state)

        def client_update(message, own_key, data, key):
            return method.client_update(message, method.init_client_state(), data, own_key, hyper)

        # FedJAX gives every client its own key; as a client state it comes with the client.
        own_keys = jnp.stack(client_keys)
        result = for_each_client(
            client_update,
            method.reduce.prepare,
            message,
            own_keys,
            cohort,
            jax.random.key(0),
            execution,
        )
        aggregate = method.reduce.finalize(
            result.total, message, keys.derive(jax.random.key(0), "reduce")
        )
        server_state = method.server_update(server_state, aggregate, jnp.asarray(round), hyper)
        diagnostics = {
            name: {metric: float(values[i]) for metric, values in result.metrics.items()}
            for i, name in enumerate(ids)
        }
        return server_state, diagnostics

    return FedJAXAlgorithm(method.init, apply)
