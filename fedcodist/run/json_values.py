"""Simple values as JSON, and the keys of mappings as text."""

import enum
import types
from typing import Any

import numpy as np

from fedcodist.run.code_names import name_of

NOT_JSON = object()


def json_value(value: Any) -> Any:
    """A simple value as JSON; NOT_JSON for other values."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex | np.dtype) or value is Ellipsis:
        return str(value)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return value.__name__
    return NOT_JSON


def key_text(key: Any) -> str:
    """A key of a mapping, or a member of a set, as text."""
    plain = json_value(key)
    if plain is not NOT_JSON:
        return repr(plain)
    if isinstance(key, tuple | frozenset):
        parts = map(key_text, key) if isinstance(key, tuple) else sorted(map(key_text, key))
        return f"({', '.join(parts)})"
    return name_of(key if hasattr(key, "__qualname__") else type(key))
