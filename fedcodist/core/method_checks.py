"""Checks by shape that the functions of a FederatedMethod fit together, before anything compiles.

Authors of a method get one line that names the function. Without these checks they would get an error
of JAX from inside a compiled loop.
"""

import dis
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamShapeError

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.inputs import ClientData
from fedcodist.core.tracing import strongly_typed
from fedcodist.core.trees import named_leaves

PyTree = Any
_OF_TRACING = " The error occurred while tracing"  # from here JAX tells of this library's functions


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
    key = keys.key_shape()
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    on_device = jax.dtypes.canonicalize_dtype
    shapes: Any = {
        name: jax.ShapeDtypeStruct(v.shape, on_device(v.dtype)) for name, v in columns.items()
    }
    data = ClientData(shapes, scalar, scalar, scalar, capacity=1, ragged=False)
    # None would count as nothing in a tree, and a method would calculate with it.
    is_missing = lambda value: value is None and method.hyper is not None
    hyper = hyper_shapes(method.hyper, is_leaf=is_missing)
    server = traced("method.init", lambda key: strongly_typed(method.init(key)), key)
    no_server = " (the server's state is None: method.init returns none)" if server is None else ""
    message = traced("method.broadcast", method.broadcast, server, about_none=no_server)
    for name in ("params", "mutable"):
        if not hasattr(message, name):
            raise TypeError(
                "method.broadcast must return what has the model's 'params' and 'mutable', such as "
                f"Variables, got {kind_of(message)} without {name!r}."
            )
    if has_server:
        variables = traced("method.variables", method.variables, server)
        check_variables("method.variables", variables)
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
        key,
        hyper,
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
    if not has_server:
        return message, result
    if method.sends_models:
        promise = "method.client_update must return {}, or have sends_models=False"
        check_same_shapes(
            promise.format("an update of the model's shapes"), message.params, result.update
        )
        check_same_shapes(
            promise.format("mutable state of the model's"), message.mutable, result.mutable
        )
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
        key,
    )
    after = traced("method.server_update", method.server_update, server, aggregate, scalar, hyper)
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
    return message, result


def _as_result(result: Any) -> Any:
    missing = [name for name in ClientResult._fields if not hasattr(result, name)]
    if missing:
        raise Promised(
            f"must return a ClientResult, of {', '.join(ClientResult._fields[:-1])} and extra, got "
            f"{kind_of(result)}."
        )
    if not isinstance(result.metrics, Mapping):
        raise Promised(f"must return metrics by name, a dictionary, got {kind_of(result.metrics)}.")
    metrics = {f"metrics[{name!r}]": value for name, value in result.metrics.items()}
    for name, value in {"weight": result.weight, **metrics}.items():
        if isinstance(value, str) or not jax.tree_util.all_leaves([value]):
            raise Promised(f"must return a number as {name}, got {value!r:.80}.")
    return result


def _as_aggregate(aggregate: Any) -> Any:
    if any(not hasattr(aggregate, name) for name in Aggregate._fields):
        raise Promised(f".finalize must return an Aggregate, got {kind_of(aggregate)}.")
    if not isinstance(aggregate.metrics, Mapping):
        metrics = kind_of(aggregate.metrics)
        raise Promised(f".finalize must return metrics by name, a dictionary, got {metrics}.")
    return aggregate


def traced(
    name: str,
    function: Callable[..., Any],
    *arguments: Any,
    hint: str = "",
    about_none: str = "",
    given: str = "what it is given",
) -> Any:
    """The shapes of a function's result.

    Args:
      name: the function's name, for messages.
      function: the function to trace.
      arguments: arrays or shapes.
      hint: what the function may look up; ends the message if it looks up something else.
      about_none: which argument is None, and why; for messages about a None.
      given: the arguments, for messages.

    Raises:
      ValueError, TypeError: names the function, and says what is wrong with it.
    """
    try:
        return jax.eval_shape(function, *arguments)
    except Promised as error:
        raise TypeError(f"{name} {error}") from None
    except KeyError as error:
        line = f" ({place})" if (place := users_line(error)) else ""
        raise ValueError(f"{name} looks up {error}{line}, which is not there{hint}.") from error
    except Exception as error:
        if raised_here(error):
            raise
        message = " ".join(str(error).split()).partition(_OF_TRACING)[0] or type(error).__name__
        kind = type(error) if type(error) in (TypeError, ValueError) else ValueError
        about = about_none if "NoneType" in message else ""
        if isinstance(error, ScopeParamShapeError):
            about += ", inputs of another shape than the network was made with"
        raise kind(f"{name} does not fit {given}{about}{error_place(error)}: {message}") from error


def raised_here(error: BaseException) -> bool:
    """Whether this library raised an error, so that its message is already complete."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not place.tb_frame.f_globals["__name__"].startswith("fedcodist."):
        return False
    # Python itself raises if the library calls a function with too many arguments.
    return place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def error_place(error: BaseException) -> str:
    """Where an error comes from, " (in <function>, module.py, line 3)"; '' if nothing is known."""
    # JAX adds notes too.
    functions = [note for note in getattr(error, "__notes__", []) if note.startswith("in ")]
    places = ", ".join(filter(None, [*functions[:1], users_line(error)]))
    return f" ({places})" if places else ""


def users_line(error: BaseException) -> str:
    """The last line of a user's module that led to the error, "module.py, line 3"; '' if none did."""
    # This library, Python's own modules, and installed packages, whose folder Debian names otherwise.
    folders = (Path(__file__).parents[1], Path(dis.__file__).parent)
    ours = tuple(f"{folder}{os.sep}" for folder in folders)
    is_installed = lambda file: "site-packages" in file or "dist-packages" in file
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_installed(frame.filename) and not frame.filename.startswith(ours)
    ]
    return f"{Path(users[-1].filename).name}, line {users[-1].lineno}" if users else ""


class Promised(Exception):
    """A function returned a wrong kind of value. The message continues after the function's name."""


def hyper_shapes(hyper: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """The shapes of an algorithm's hyper-parameters. Raises ValueError or TypeError that names one."""

    def shape(path: tuple[Any, ...], value: Any) -> Any:
        return hyper_shape(value, f"hyper{jax.tree_util.keystr(path)}")

    return jax.tree_util.tree_map_with_path(shape, hyper, is_leaf=is_leaf)


def hyper_shape(value: Any, name: str = "hyper") -> Any:
    """A hyper-parameter's shape in training. Raises TypeError or ValueError unless it is a number."""
    try:
        if value is None or np.asarray(value).dtype.kind in "OSU":  # text may look like a number
            raise TypeError
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must hold numbers, got {value!r}.") from None
    if np.isnan(numbers).any():
        raise ValueError(f"{name} must hold numbers, got {value!r}.")
    return jax.ShapeDtypeStruct(numbers.shape, jax.dtypes.canonicalize_dtype(float))


def without_value(hyper: PyTree) -> str:
    """Which hyper-parameters are None, for messages about a None; '' if none is."""
    leaves = jax.tree_util.tree_flatten_with_path(hyper, is_leaf=lambda value: value is None)[0]
    missing = [f"hyper{jax.tree_util.keystr(path)}" for path, value in leaves if value is None]
    return f" ({', '.join(missing)} is None)" if missing and hyper is not None else ""


def check_variables(name: str, variables: Any) -> None:
    """Raises TypeError that names the function unless it returned Variables of real float32 or more."""
    if not (hasattr(variables, "params") and hasattr(variables, "mutable")):
        raise TypeError(f"{name} must return Variables, got {kind_of(variables)}.")
    for path, leaf in named_leaves(variables.params).items():
        # The gradient of a complex number is its conjugate, along which optimizers would ascend.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
            instead = (
                "real and imaginary parts as two parameters" if is_complex else "it in `mutable`"
            )
            raise TypeError(
                f"{name} must return parameters that are real numbers, {path!r} is {leaf.dtype}: keep "
                f"{instead}."
            )
        # Sums over clients have the parameters' type, and in 16 bits most of their digits are lost.
        if leaf.dtype.itemsize < 4:
            raise TypeError(
                f"{name} must return parameters of at least float32, {path!r} is {leaf.dtype}: networks "
                "compute in bfloat16 by fedcodist.in_bfloat16, and their parameters stay float32."
            )


def check_same(promise: str, expected: PyTree, actual: PyTree) -> None:
    """Raises TypeError that begins with `promise` unless structures, shapes and dtypes are the same."""
    before, after = (
        {jax.tree_util.keystr(path): shape_of(leaf) for path, leaf in leaves}
        for leaves in (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (expected, actual))
    )
    for path in [*before, *after]:
        if before.get(path) != after.get(path):
            raise TypeError(
                f"{promise}: at {path or 'its only array'} it has {after.get(path, 'nothing')} in place "
                f"of {before.get(path, 'nothing')}."
            )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (expected, actual)]
    if structures[0] != structures[1]:
        raise TypeError(f"{promise}: it has {kind_of(actual)} in place of {kind_of(expected)}.")


def check_same_shapes(promise: str, expected: PyTree, actual: PyTree) -> None:
    """As `check_same`, for arrays of any dtypes. Arrays of other shapes would be broadcast."""
    shapes = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32), tree)
        for tree in (expected, actual)
    )
    check_same(promise, *shapes)


def shape_of(leaf: Any) -> str:
    """An array's dtype and shape, in a line."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def kind_of(value: Any) -> str:
    """What a value is, in a line."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return "nothing" if value is None else type(value).__name__
