"""Checks of a function's arguments by its signature, before the function uses them."""

import collections.abc
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedcodist.core.checks import check_boolean, check_text, shown


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Checks that arguments have the types of the function's annotations.

    Booleans, text, functions, mappings by name, and named tuples with their fields are checked. A field
    whose default is a float, such as a learning rate, must be a number. Limits of numbers are checked by
    the function itself, or by a method `check(name)` of the tuple.

    Args:
      function: its annotations are read.
      arguments: name -> value; `locals()` in the function's first line.

    Raises:
      TypeError, ValueError: names the argument, or its field.
    """
    for name, kind in _annotations(function).items():
        if name in arguments:
            _check(name, arguments[name], kind)


@functools.cache
def _annotations(owner: Any) -> dict[str, Any]:
    kinds = typing.get_type_hints(owner)
    kinds.pop("return", None)
    return kinds


def _check(name: str, value: Any, kind: Any) -> None:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        others = [part for part in parts if part is not types.NoneType]
        if len(others) == 1 and not (value is None and len(parts) > 1):
            _check(name, value, others[0])
    elif kind is bool:
        check_boolean(name, value)
    elif kind is str:
        check_text(name, value)
    elif origin is collections.abc.Callable:
        # `check_factory` checks functions that make optimizers, with a better message.
        if parts[-1] is not optax.GradientTransformation and not callable(value):
            raise TypeError(f"{name} must be a function, got {shown(value)}.")
    elif origin is Mapping:
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping by name, got {shown(value)}.")
        for key, item in value.items():
            if _is_named_tuple(parts[1]):
                _check(f"{name}[{key!r}]", item, parts[1])
    elif _is_named_tuple(kind):
        _check_named_tuple(name, value, kind)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _check_named_tuple(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be made by {kind.__module__}.{kind.__name__}, got {shown(value)}."
        )
    for field, field_kind in _annotations(kind).items():
        content = getattr(value, field)
        if field_kind is Any and isinstance(kind._field_defaults.get(field), float):
            if not hasattr(content, "dtype") and not isinstance(
                content, int | float | list | tuple
            ):
                raise TypeError(f"{name}.{field} must be a number, got {shown(content)}.")
        else:
            _check(f"{name}.{field}", content, field_kind)
    if hasattr(kind, "check"):
        value.check(name)
