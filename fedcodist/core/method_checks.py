"""Checks by shape that the functions of a FederatedMethod fit together, before anything compiles.

Authors of a method get one line that names the function. Without these checks they would get an error
of JAX from inside a compiled loop.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.hyper_shapes import hyper_shapes
from fedcodist.core.inputs import ClientData
from fedcodist.core.shape_checks import check_same, check_same_shapes, check_variables, kind_of
from fedcodist.core.tracing import strongly_typed
from fedcodist.core.user_functions import WrongResult, traced

PyTree = Any
_INTEGER: Any = jax.ShapeDtypeStruct((), jnp.int32)


def check_method(
    method: Any, columns: Mapping[str, Any], has_server: bool = True
) -> tuple[PyTree, ClientResult]:
    """Checks by shape that the functions of a FederatedMethod fit together.

    Args:
      method: a FederatedMethod.
      columns: the federated data's columns, arrays or shapes.
      has_server: whether the method's own functions are the server. False for methods of levels
        (HeteroFL, FedRolex, FjORD, DepthFL): clients get a part of the model, and the algorithm holds
        the whole.

    Returns:
      The shapes of the message that a client downloads, and of its ClientResult.

    Raises:
      ValueError, TypeError: names the function, what it returns and what it must return.
    """
    server = traced("method.init", lambda key: strongly_typed(method.init(key)), keys.key_shape())
    message = _checked_message(method, server)
    if not has_server:
        return message, _checked_result(method, message, columns)
    variables = traced("method.variables", method.variables, server)
    check_variables("method.variables", variables)
    result = _checked_result(method, message, columns)
    _check_sends(method, message, result)
    _check_server(method, server, message, result, variables)
    return message, result


def _checked_message(method: Any, server: PyTree) -> PyTree:
    no_server = " (the server's state is None: method.init returns none)" if server is None else ""
    message = traced("method.broadcast", method.broadcast, server, about_none=no_server)
    for name in ("params", "mutable"):
        if not hasattr(message, name):
            raise TypeError(
                "method.broadcast must return what has the model's 'params' and 'mutable', such as "
                f"Variables, got {kind_of(message)} without {name!r}."
            )
    return message


def _checked_result(method: Any, message: PyTree, columns: Mapping[str, Any]) -> ClientResult:
    """What `client_update` returns for one client with these columns."""
    on_device = jax.dtypes.canonicalize_dtype
    shapes: Any = {
        name: jax.ShapeDtypeStruct(v.shape, on_device(v.dtype)) for name, v in columns.items()
    }
    data = ClientData(shapes, _INTEGER, _INTEGER, _INTEGER, capacity=1, ragged=False)
    client_state = traced("method.init_client_state", lambda: method.init_client_state())
    keeps_none = (
        " (client_state is None: method.init_client_state makes none)"
        if client_state is None
        else ""
    )
    result = traced(
        "method.client_update",
        lambda *arguments: _as_result(method.client_update(*arguments)),
        message,
        client_state,
        data,
        keys.key_shape(),
        _hyper(method),
        hint=f": the columns are {sorted(columns)} before preprocessing",
        about_none=keeps_none,
    )
    check_same(
        "method.client_update must return a client state as method.init_client_state makes it"
        + keeps_none,
        client_state,
        result.client_state,
    )
    if "num_steps" not in result.metrics:
        raise ValueError(
            "method.client_update must return metrics with 'num_steps', the client's steps, got "
            f"{sorted(result.metrics)}."
        )
    if jnp.shape(result.weight) != ():
        raise ValueError(
            "method.client_update must return a weight that is a scalar, got shape "
            f"{list(jnp.shape(result.weight))}."
        )
    return result


def _check_sends(method: Any, message: PyTree, result: ClientResult) -> None:
    if method.sends_models:
        promise = "method.client_update must return {}, or have sends_models=False"
        check_same_shapes(
            promise.format("an update of the model's shapes"), message.params, result.update
        )
        check_same_shapes(
            promise.format("mutable state of the model's"), message.mutable, result.mutable
        )


def _check_server(
    method: Any, server: PyTree, message: PyTree, result: ClientResult, variables: PyTree
) -> None:
    """Checks what the server makes of a client's result, and of a model that is set."""
    at_server = message
    if method.server_message is not None:
        at_server = traced("method.server_message", method.server_message, server)
    aggregate = traced(
        "method.reduce",
        lambda result, message, key: _as_aggregate(
            method.reduce.finalize(method.reduce.prepare(result, key), message, key)
        ),
        result,
        at_server,
        keys.key_shape(),
    )
    after = traced(
        "method.server_update", method.server_update, server, aggregate, _INTEGER, _hyper(method)
    )
    check_same("method.server_update must return a state as method.init makes it", server, after)
    for reset_optimizer in (True, False):
        after = traced(
            "method.set_model",
            lambda server, variables, reset=reset_optimizer: method.set_model(
                server, variables, reset
            ),
            server,
            variables,
        )
        check_same("method.set_model must return a state as method.init makes it", server, after)


def _hyper(method: Any) -> PyTree:
    # None would count as nothing in a tree, and a method would calculate with it.
    is_missing = lambda value: value is None and method.hyper is not None
    return hyper_shapes(method.hyper, is_leaf=is_missing)


def _as_result(result: Any) -> Any:
    missing = [name for name in ClientResult._fields if not hasattr(result, name)]
    if missing:
        raise WrongResult(
            f"must return a ClientResult, of {', '.join(ClientResult._fields[:-1])} and extra, got "
            f"{kind_of(result)}."
        )
    if not isinstance(result.metrics, Mapping):
        raise WrongResult(
            f"must return metrics by name, a dictionary, got {kind_of(result.metrics)}."
        )
    metrics = {f"metrics[{name!r}]": value for name, value in result.metrics.items()}
    for name, value in {"weight": result.weight, **metrics}.items():
        if isinstance(value, str) or not jax.tree_util.all_leaves([value]):
            raise WrongResult(f"must return a number as {name}, got {value!r:.80}.")
    return result


def _as_aggregate(aggregate: Any) -> Any:
    if any(not hasattr(aggregate, name) for name in Aggregate._fields):
        raise WrongResult(f".finalize must return an Aggregate, got {kind_of(aggregate)}.")
    if not isinstance(aggregate.metrics, Mapping):
        metrics = kind_of(aggregate.metrics)
        raise WrongResult(f".finalize must return metrics by name, a dictionary, got {metrics}.")
    return aggregate
