"""Methods with FedJAX's interface: `init(key)` and `apply(server_state, clients)`, a call per round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult, mask_of_round
from fedcodist.core.checks import check_integer, shown
from fedcodist.core.for_each_client import Execution, for_each_client
from fedcodist.core.inputs import ClientData, Cohort
from fedcodist.core.method import FederatedMethod, message_to_reduce
from fedcodist.core.user_functions import traced
from fedcodist.data.columns import check_numbers, check_same_columns, checked_columns

PyTree = Any


class FedJAXAlgorithm(NamedTuple):
    """A method with the interface of `fedjax.FederatedAlgorithm`.

    Attributes:
      init: key -> server state. FedJAX's `init` takes the model's parameters instead.
      apply: (server state, clients, round=None) -> (server state, diagnostics).
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[..., tuple[PyTree, dict[str, dict[str, Any]]]]


def as_fedjax(
    method: FederatedMethod,
    hyper: PyTree = None,
    execution: Execution = Execution("eager"),
    seed: int = 0,
) -> FedJAXAlgorithm:
    """Gives a method FedJAX's interface, a call per round, for debugging and for old notebooks.

    `apply(server_state, clients, round=None)` takes a sequence of (client_id, columns, key) and returns
    (server_state, diagnostics), where diagnostics[client_id] are that client's metrics, numbers or lists
    of numbers. By default clients run eagerly, so prints and debuggers work inside `client_update`.
    Schedules and what the server draws depend on `round`, which is 0 where not given. A private method
    and a secure sum need it, since the same noise or masks in two rounds would protect neither. Values
    in columns are not checked, unlike in `run_experiment`: labels must be below the number of outputs.

    Args:
      method: one without client states, since FedJAX's clients keep nothing between rounds.
      hyper: hyper-parameters; the method's defaults where not given.
      execution: how clients are executed.
      seed: of what the server draws, such as noise; clients' draws come from their own keys.

    Raises:
      ValueError: names the method if its clients keep states, such as SCAFFOLD's variates. In `apply`,
        if there are no clients, if two have one id, if a client's columns do not fit each other or those
        of the first client, if its key is none, or if `round` must be given.
      TypeError: in `apply`, `round` is no integer.
    """
    if jax.tree.leaves(traced("method.init_client_state", lambda: method.init_client_state())):
        raise ValueError(
            "method must be one whose clients keep nothing between rounds; SCAFFOLD, FedKD and memories "
            "of compressors need an algorithm, such as independent_pools."
        )
    hyper = method.hyper if hyper is None else hyper
    needs_round = method.privacy is not None or method.reduce.mask is not None

    def apply(
        server_state: PyTree,
        clients: Sequence[tuple[Any, Mapping[str, np.ndarray], jax.Array]],
        round: int | None = None,
    ) -> tuple[PyTree, dict[str, dict[str, Any]]]:
        if not clients:
            raise ValueError("clients must hold at least one (client_id, columns, key), got none.")
        if round is None and needs_round:
            raise ValueError(
                "round must be given for a private method or a secure sum, whose noise and masks must "
                "differ from round to round."
            )
        round = 0 if round is None else round
        check_integer("round", round, low=0)
        ids, datasets, client_keys = zip(*map(_checked_client, clients), strict=True)
        _check_alike(ids, datasets, client_keys)
        sizes = np.array([len(next(iter(columns.values()))) for columns in datasets], np.int32)
        names = datasets[0].keys()
        cohort = Cohort(
            columns={n: jnp.concatenate([jnp.asarray(d[n]) for d in datasets]) for n in names},
            clients=jnp.arange(len(ids), dtype=jnp.int32),
            starts=jnp.asarray(np.concatenate([[0], np.cumsum(sizes)[:-1]]), jnp.int32),
            sizes=jnp.asarray(sizes),
            capacity=int(sizes.max()),
        )
        # A loaded state holds NumPy arrays, which traced indices cannot index.
        server_state = jax.tree.map(jnp.asarray, server_state)
        message = method.broadcast(server_state)
        root = keys.derive(jax.random.key(seed), round)

        def client_update(
            message: PyTree, client_key: jax.Array, data: ClientData, key: jax.Array
        ) -> ClientResult:
            return method.client_update(
                message, method.init_client_state(), data, client_key, hyper
            )

        # FedJAX gives every client a key, which is passed on as the client's state.
        stacked_keys = jnp.stack(client_keys)
        result = for_each_client(
            client_update,
            method.reduce.prepare,
            message,
            stacked_keys,
            cohort,
            root,
            execution,
            mask=mask_of_round(method.reduce, cohort.clients, root),
        )
        aggregate = method.reduce.finalize(
            result.total,
            message_to_reduce(method, server_state, message),
            keys.derive(root, "reduce"),
        )
        server_state = method.server_update(server_state, aggregate, jnp.asarray(round), hyper)
        diagnostics = {
            name: {metric: np.asarray(v[i]).tolist() for metric, v in result.metrics.items()}
            for i, name in enumerate(ids)
        }
        return server_state, diagnostics

    return FedJAXAlgorithm(method.init, apply)


def _checked_client(client: Any) -> tuple[Any, Mapping[str, np.ndarray], jax.Array]:
    """Checks that a client is (client_id, columns, key), with columns of numbers of one length."""
    if not (isinstance(client, tuple | list) and len(client) == 3):
        raise ValueError(f"clients must hold (client_id, columns, key), got {shown(client)}.")
    name, columns, key = client
    try:
        columns = checked_columns(columns)
        check_numbers("columns", columns)
    except (TypeError, ValueError) as error:
        raise ValueError(f"client {name!r}: {error}") from None
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", ())
    is_typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    # jax.random.PRNGKey makes arrays of uint32.
    if not ((is_typed and shape == ()) or (dtype == np.uint32 and len(shape) == 1)):
        raise ValueError(f"client {name!r} must have a key of jax.random.key, got {shown(key)}.")
    return name, columns, key


def _check_alike(
    ids: Sequence[Any],
    datasets: Sequence[Mapping[str, np.ndarray]],
    client_keys: Sequence[jax.Array],
) -> None:
    """Checks that ids differ, and that all clients have columns and keys as the first client's."""
    for place, (name, columns, key) in enumerate(zip(ids, datasets, client_keys, strict=True)):
        if name in ids[:place]:
            raise ValueError(f"clients must have different ids, got {name!r} twice.")
        check_same_columns(name, dict(columns), ids[0], dict(datasets[0]))
        if key.dtype != client_keys[0].dtype:
            raise ValueError(
                f"clients must have keys of one kind, got {client_keys[0].dtype} for {ids[0]!r} and "
                f"{key.dtype} for {name!r}."
            )
